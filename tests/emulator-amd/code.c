/* SPDX-License-Identifier: Apache-2.0
 *
 * code.c: reads a bundle of code objects, the kernels' descriptors, and the disassembly that llvm-objdump writes. */
#include "emulator.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the bundle ------------------------------------------------------------------------------------------ */

static const char *find_entry(const char *bundle, const char *target, size_t *size)
{
    static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
    uint64_t count, entry[3];
    if (memcmp(bundle, magic, sizeof magic - 1) != 0)
        return NULL;
    const char *at = bundle + sizeof magic - 1;
    memcpy(&count, at, sizeof count);
    at += sizeof count;
    for (uint64_t i = 0; i < count; i++) {
        memcpy(entry, at, sizeof entry);
        at += sizeof entry;
        const size_t length = strlen(target);
        if (entry[2] > length && memcmp(at + entry[2] - length, target, length) == 0) {
            *size = entry[1];
            return bundle + entry[0];
        }
        at += entry[2];
    }
    return NULL;
}

/* ---- operands -------------------------------------------------------------------------------------------- */

static bool parse_register(const char *text, emu_operand *o)
{
    static const struct {
        const char *name;
        int index, count;
    } named[] = {{"vcc", EMU_VCC, 2},         {"vcc_lo", EMU_VCC, 1},    {"vcc_hi", EMU_VCC + 1, 1},
                 {"exec", EMU_EXEC, 2},       {"exec_lo", EMU_EXEC, 1},  {"exec_hi", EMU_EXEC + 1, 1},
                 {"m0", EMU_M0, 1},           {"flat_scratch", 102, 2},  {"flat_scratch_lo", 102, 1},
                 {"flat_scratch_hi", 103, 1}, {"xnack_mask_lo", 104, 1}, {"xnack_mask_hi", 105, 1}};
    int first, last, end = 0;
    char kind;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strcmp(text, named[i].name) == 0) {
            o->kind = EMU_SCALAR, o->index = named[i].index, o->count = named[i].count;
            return true;
        }
    if (sscanf(text, "%c[%d:%d]%n", &kind, &first, &last, &end) == 3 && text[end] == '\0')
        o->count = last - first + 1;
    else if (sscanf(text, "%c%d%n", &kind, &first, &end) == 2 && text[end] == '\0')
        o->count = 1;
    else
        return false;
    if (kind != 's' && kind != 'v' && kind != 'a')
        return false;
    o->kind = kind == 's' ? EMU_SCALAR : EMU_VECTOR;
    o->index = first + (kind == 'a' ? 256 : 0);
    return true;
}

static bool parse_operand(char *text, emu_operand *o)
{
    *o = (emu_operand){0};
    size_t length = strlen(text);
    if (text[0] == '-' && (text[1] == '|' || text[1] == 'v' || text[1] == 's' || text[1] == 'a'))
        o->negated = true, text++, length--;
    if (text[0] == '|' && text[length - 1] == '|') {
        o->absolute = true;
        text[length - 1] = '\0';
        text++;
    }
    if (strcmp(text, "off") == 0) {
        o->kind = EMU_OFF;
        return true;
    }
    if (parse_register(text, o))
        return true;
    char *end;
    o->kind = EMU_CONSTANT;
    if (strchr(text, '.') != NULL && strncmp(text, "0x", 2) != 0) {
        o->decimal = true;
        o->number = strtod(text, &end);
        const float single = (float)o->number;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        o->value = bits;
    } else {
        o->value = (uint64_t)strtoll(text, &end, 0);
    }
    return *end == '\0';
}

/* ---- modifiers ------------------------------------------------------------------------------------------- */

/* Parses "[0,1,1]" to a bit per source. */
static unsigned parse_bits(const char *text)
{
    unsigned bits = 0;
    for (int k = 0; *text != '\0' && *text != ']'; text++)
        if (*text == '0' || *text == '1')
            bits |= (unsigned)(*text - '0') << k++;
    return bits;
}

/* Returns false if the emulator lacks the modifier. */
static bool parse_modifier(const char *word, emu_instruction *i)
{
    static const char *const caches[] = {"nt", "sc0", "sc1", "glc", "slc"};
    for (size_t k = 0; k < sizeof caches / sizeof *caches; k++)
        if (strcmp(word, caches[k]) == 0) {
            i->returns = i->returns || strcmp(word, "sc0") == 0 || strcmp(word, "glc") == 0;
            return true;
        }
    if (sscanf(word, "offset:%ld", &i->offset) == 1 || sscanf(word, "offset0:%ld", &i->offset0) == 1 ||
        sscanf(word, "offset1:%ld", &i->offset1) == 1)
        return true;
    if (strncmp(word, "op_sel:", 7) == 0)
        i->select = parse_bits(word + 7);
    else if (strncmp(word, "op_sel_hi:", 10) == 0)
        i->select_high = parse_bits(word + 10);
    else if (strncmp(word, "neg_lo:", 7) == 0)
        i->negated_low = parse_bits(word + 7);
    else if (strncmp(word, "neg_hi:", 7) == 0)
        i->negated_high = parse_bits(word + 7);
    else
        return false;
    return true;
}

static unsigned memory_width(const char *mnemonic)
{
    static const struct {
        const char *part;
        unsigned width;
    } widths[] = {{"cmpswap_x2", 8}, {"dwordx16", 64}, {"dwordx8", 32}, {"dwordx4", 16}, {"dwordx3", 12},
                  {"dwordx2", 8},    {"dword", 4},     {"b128", 16},    {"b96", 12},     {"b64", 8},
                  {"b32", 4},        {"b16", 2},       {"u16", 2},      {"i16", 2},      {"short", 2},
                  {"b8", 1},         {"u8", 1},        {"i8", 1},       {"byte", 1}};
    for (size_t k = 0; k < sizeof widths / sizeof *widths; k++)
        if (strstr(mnemonic, widths[k].part) != NULL)
            return widths[k].width;
    return 0;
}

/* ---- lines ----------------------------------------------------------------------------------------------- */

static void parse_waits(const char *text, emu_instruction *i)
{
    const char *vector = strstr(text, "vmcnt("), *scalar = strstr(text, "lgkmcnt(");
    i->wait_vector = vector != NULL ? atoi(vector + 6) : -1;
    i->wait_scalar = scalar != NULL ? atoi(scalar + 8) : -1;
}

/* Parses "\tMNEMONIC OPERAND, OPERAND MODIFIER // ADDRESS: WORDS". An instruction that is not understood keeps a null
 * handler, and stops a wave that meets it. */
void emu_read_line(char *line, emu_instruction *i)
{
    char copy[512], *comment = strstr(line, "//"), *state = NULL;
    *i = (emu_instruction){.text = line + 1, .select_high = ~0u, .target = -1};
    i->address = strtoull(comment + 2, NULL, 16);
    for (*comment = '\0'; comment > line && (comment[-1] == ' ' || comment[-1] == '\t'); *--comment = '\0') {}
    snprintf(copy, sizeof copy, "%s", line + 1);
    char *const mnemonic = strtok_r(copy, " \t", &state);
    const size_t length = strlen(mnemonic);
    if (length > 4 && (strcmp(mnemonic + length - 4, "_e32") == 0 || strcmp(mnemonic + length - 4, "_e64") == 0))
        mnemonic[length - 4] = '\0';
    emu_handler *const handler = emu_find_handler(mnemonic);
    i->width = memory_width(mnemonic);
    i->order = strncmp(mnemonic, "global_load", 11) == 0 ? EMU_GLOBAL_LOAD
               : strncmp(mnemonic, "ds_", 3) == 0        ? EMU_LDS_LOAD
                                                         : EMU_ANY_ORDER;
    if (strcmp(mnemonic, "s_waitcnt") == 0) {
        parse_waits(line, i);
        i->run = handler;
        return;
    }
    bool understood = true, in_modifiers = false;
    for (char *word = strtok_r(NULL, " \t", &state); word != NULL; word = strtok_r(NULL, " \t", &state)) {
        const size_t end = strlen(word);
        const bool comma = word[end - 1] == ',';
        if (comma)
            word[end - 1] = '\0';
        if (in_modifiers)
            understood = understood && parse_modifier(word, i);
        else if (i->operands == EMU_OPERANDS || !parse_operand(word, &i->operand[i->operands++]))
            understood = false;
        in_modifiers = !comma; /* the last operand is the first without a comma after it */
    }
    if (i->operands == 1 && (strncmp(mnemonic, "s_cbranch", 9) == 0 || strcmp(mnemonic, "s_branch") == 0))
        i->offset = 4 * (int64_t)(int16_t)i->operand[0].value;
    i->run = understood ? handler : NULL;
}

static int find_instruction(const emu_code *code, uint64_t address)
{
    for (int low = 0, high = code->count; low < high;) {
        const int middle = low + (high - low) / 2;
        if (code->instructions[middle].address == address)
            return middle;
        if (code->instructions[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}

static void parse_lines(emu_code *code)
{
    int lines = 0;
    for (const char *at = code->text; (at = strchr(at, '\n')) != NULL; at++)
        lines++;
    code->instructions = calloc((size_t)lines + 1, sizeof *code->instructions);
    char *state = NULL;
    for (char *line = strtok_r(code->text, "\n", &state); line != NULL; line = strtok_r(NULL, "\n", &state))
        if (line[0] == '\t' && strstr(line, "//") != NULL)
            emu_read_line(line, &code->instructions[code->count++]);
    for (int k = 0; k + 1 < code->count; k++)
        if (strncmp(code->instructions[k].text, "s_cbranch", 9) == 0 ||
            strncmp(code->instructions[k].text, "s_branch", 8) == 0)
            code->instructions[k].target =
                find_instruction(code, code->instructions[k].address + 4 + (uint64_t)code->instructions[k].offset);
}

/* ---- the code object ------------------------------------------------------------------------------------- */

static const char *at_address(const char *elf, uint64_t address)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)elf;
    const Elf64_Phdr *segments = (const Elf64_Phdr *)(elf + header->e_phoff);
    for (int k = 0; k < header->e_phnum; k++)
        if (segments[k].p_type == PT_LOAD && address >= segments[k].p_vaddr &&
            address < segments[k].p_vaddr + segments[k].p_filesz)
            return elf + segments[k].p_offset + (address - segments[k].p_vaddr);
    return NULL;
}

/* A kernel NAME has a descriptor of 64 bytes, the symbol NAME.kd. */
static void add_kernel(emu_code *code, const char *elf, const char *name, uint64_t address)
{
    const char *descriptor = at_address(elf, address);
    emu_kernel *kernel = &code->kernels[code->kernel_count++];
    int64_t entry;
    uint32_t resources; /* COMPUTE_PGM_RSRC1, whose first 6 bits are the granules of 8 registers, minus 1 */
    snprintf(kernel->name, sizeof kernel->name, "%.*s", (int)(strlen(name) - 3), name);
    memcpy(&kernel->lds_bytes, descriptor, 4);
    memcpy(&kernel->private_bytes, descriptor + 4, 4);
    memcpy(&kernel->argument_bytes, descriptor + 8, 4);
    memcpy(&entry, descriptor + 16, 8);
    memcpy(&resources, descriptor + 48, 4);
    kernel->vectors = 8 * ((int)(resources & 63) + 1);
    memcpy(&kernel->registers, descriptor + 52, 4);
    memcpy(&kernel->properties, descriptor + 56, 2);
    kernel->entry = find_instruction(code, address + (uint64_t)entry);
}

static void find_kernels(emu_code *code, const char *elf)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)elf;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(elf + header->e_shoff);
    for (int k = 0; k < header->e_shnum; k++) {
        if (sections[k].sh_type != SHT_DYNSYM)
            continue;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(elf + sections[k].sh_offset);
        const char *names = elf + sections[sections[k].sh_link].sh_offset;
        const size_t count = sections[k].sh_size / sizeof *symbols;
        code->kernels = calloc(count + 1, sizeof *code->kernels);
        for (size_t n = 0; n < count; n++) {
            const char *name = names + symbols[n].st_name;
            const size_t length = strlen(name);
            if (length > 3 && strcmp(name + length - 3, ".kd") == 0)
                add_kernel(code, elf, name, symbols[n].st_value);
        }
    }
}

/* Returns the output of llvm-objdump for a code object, or NULL. */
static char *disassemble(const char *elf, size_t size)
{
    char path[] = "/tmp/cotangent_code_XXXXXX", command[256];
    const int file = mkstemp(path);
    char *text = NULL;
    size_t length = 0, room = 0;
    if (file < 0)
        return NULL;
    const bool written = write(file, elf, size) == (ssize_t)size;
    close(file);
    snprintf(command, sizeof command, "%s -d --no-show-raw-insn %s", EMU_OBJDUMP, path);
    FILE *output = written ? popen(command, "r") : NULL;
    while (output != NULL) {
        if (room - length < 65536)
            text = realloc(text, room = 2 * room + 131072);
        const size_t got = fread(text + length, 1, room - length - 1, output);
        length += got;
        if (got == 0)
            break;
    }
    if (text != NULL)
        text[length] = '\0';
    if (output != NULL && pclose(output) != 0) {
        free(text);
        text = NULL;
    }
    unlink(path);
    return text;
}

emu_code *emu_load(const void *image, const char *target, bool *missing, char *why, size_t size)
{
    size_t bytes = 0;
    const char *entry = find_entry(image, target, &bytes);
    *missing = entry == NULL;
    if (entry == NULL) {
        snprintf(why, size, "the bundle has no code object for %s", target);
        return NULL;
    }
    char *elf = malloc(bytes);
    memcpy(elf, entry, bytes);
    emu_code *code = calloc(1, sizeof *code);
    code->text = disassemble(elf, bytes);
    if (code->text == NULL) {
        snprintf(why, size, "%s does not disassemble the code object", EMU_OBJDUMP);
        free(code);
        free(elf);
        return NULL;
    }
    parse_lines(code);
    find_kernels(code, elf);
    free(elf);
    return code;
}

void emu_unload(emu_code *code)
{
    free(code->text);
    free(code->instructions);
    free(code->kernels);
    free(code);
}

const emu_kernel *emu_find_kernel(const emu_code *code, const char *name)
{
    for (int k = 0; k < code->kernel_count; k++)
        if (strcmp(code->kernels[k].name, name) == 0)
            return &code->kernels[k];
    return NULL;
}
