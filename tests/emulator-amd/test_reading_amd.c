/* SPDX-License-Identifier: Apache-2.0
 * test_reading_amd.c: tests that code.c reads the disassembly without loss. Instructions of the library's code objects are
 * read, written again from what was read, and assembled by llvm-mc. They must have the bytes of the original text. Of
 * the instructions that differ in numbers alone, the first is taken, and variants of it with random registers, offsets
 * and modifiers, where llvm-mc takes them. */
#include "emulator.h"
#include "support.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { TEXT = 256, ENCODING = 128, VARIANTS = 12 };

/* A line of assembly, and what was read of it. */
typedef struct line {
    char text[TEXT], again[TEXT];
    char encoding[ENCODING], encoding_again[ENCODING]; /* empty: llvm-mc refuses it */
    bool original;                                     /* not changed at random */
} line;

static uint32_t random_state = 1;

static unsigned random_below(unsigned bound)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % bound;
}

/* ---- writing ---------------------------------------------------------------------------------------------- */

static void append(char *to, const char *format, ...)
{
    const size_t length = strlen(to);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(to + length, TEXT - length, format, arguments);
    va_end(arguments);
}

static void write_register(const emu_operand *o, char *to)
{
    static const struct {
        int index, count;
        const char *name;
    } named[] = {{EMU_VCC, 2, "vcc"},         {EMU_VCC, 1, "vcc_lo"},    {EMU_VCC + 1, 1, "vcc_hi"},
                 {EMU_EXEC, 2, "exec"},       {EMU_EXEC, 1, "exec_lo"},  {EMU_EXEC + 1, 1, "exec_hi"},
                 {EMU_M0, 1, "m0"},           {102, 2, "flat_scratch"},  {102, 1, "flat_scratch_lo"},
                 {103, 1, "flat_scratch_hi"}, {104, 1, "xnack_mask_lo"}, {105, 1, "xnack_mask_hi"}};
    for (size_t k = 0; k < sizeof named / sizeof *named && o->kind == EMU_SCALAR; k++)
        if (named[k].index == o->index && named[k].count == o->count) {
            append(to, "%s", named[k].name);
            return;
        }
    const char kind = o->kind == EMU_SCALAR ? 's' : o->index < 256 ? 'v' : 'a';
    const int first = kind == 'a' ? o->index - 256 : o->index;
    if (o->count == 1)
        append(to, "%c%d", kind, first);
    else
        append(to, "%c[%d:%d]", kind, first, first + o->count - 1);
}

static void write_operand(const emu_operand *o, char *to)
{
    append(to, "%s%s", o->negated ? "-" : "", o->absolute ? "|" : "");
    if (o->kind == EMU_OFF)
        append(to, "off");
    else if (o->kind != EMU_CONSTANT)
        write_register(o, to);
    else if (o->decimal)
        append(to, o->number == (double)(int)o->number ? "%.1f" : "%.8g", o->number);
    else
        append(to, "%lld", (long long)o->value);
    if (o->absolute)
        append(to, "|");
}

/* Writes a modifier with as many bits as the original text has there. */
static void write_bits(const char *name, unsigned bits, const char *text, char *to)
{
    const char *at = strstr(text, name);
    if (at == NULL)
        return;
    append(to, " %s[", name);
    unsigned count = 0;
    for (at += strlen(name) + 1; *at != ']'; at++)
        if (*at != ',') {
            append(to, count > 0 ? ",%u" : "%u", bits >> count & 1);
            count++;
        }
    append(to, "]");
}

/* Writes an instruction from its members. `text` gives the mnemonic with its suffix, and the number of bits of modifiers. */
static void write_instruction(const emu_instruction *i, const char *text, const char *target, char *to)
{
    to[0] = '\0';
    append(to, "%.*s", (int)strcspn(text, " \t"), text);
    if (strncmp(text, "s_waitcnt", 9) == 0) {
        if (i->wait_vector >= 0)
            append(to, " vmcnt(%d)", i->wait_vector);
        if (i->wait_scalar >= 0)
            append(to, " lgkmcnt(%d)", i->wait_scalar);
        return;
    }
    for (int k = 0; k < i->operands; k++) {
        append(to, k > 0 ? ", " : " ");
        write_operand(&i->operand[k], to);
    }
    if (i->offset != 0 && i->target < 0 && strncmp(text, "s_cbranch", 9) != 0 && strncmp(text, "s_branch", 8) != 0)
        append(to, " offset:%ld", (long)i->offset);
    if (i->offset0 != 0)
        append(to, " offset0:%ld", (long)i->offset0);
    if (i->offset1 != 0)
        append(to, " offset1:%ld", (long)i->offset1);
    write_bits("op_sel:", i->select, text, to);
    write_bits("op_sel_hi:", i->select_high, text, to);
    write_bits("neg_lo:", i->negated_low, text, to);
    write_bits("neg_hi:", i->negated_high, text, to);
    if (i->returns)
        append(to, strcmp(target, "gfx90a") == 0 ? " glc" : " sc0");
}

/* ---- random variants -------------------------------------------------------------------------------------- */

/* Copies the text up to the comment, without the cache modifiers, which the emulator ignores. */
static void copy_text(const char *from, char *to)
{
    char copy[TEXT], *state = NULL;
    snprintf(copy, sizeof copy, "%s", from);
    copy[strcspn(copy, "/<\n")] = '\0';
    to[0] = '\0';
    for (char *word = strtok_r(copy, " \t", &state); word != NULL; word = strtok_r(NULL, " \t", &state)) {
        const bool is_atomic = strstr(from, "atomic") != NULL;
        if (strcmp(word, "nt") == 0 || strcmp(word, "sc1") == 0 || strcmp(word, "slc") == 0 ||
            (!is_atomic && (strcmp(word, "sc0") == 0 || strcmp(word, "glc") == 0)))
            continue;
        append(to, to[0] != '\0' ? " %s" : "%s", word);
    }
}

/* Other registers, offsets and bits in the same instruction. */
static void change(const char *from, char *to)
{
    to[0] = '\0';
    const size_t mnemonic = strcspn(from, " ");
    append(to, "%.*s", (int)mnemonic, from);
    for (const char *at = from + mnemonic; *at != '\0';) {
        int first, last, end = 0;
        char kind, next[32];
        const bool starts_word = strchr(" -|", at[-1]) != NULL;
        if (starts_word && sscanf(at, "%c[%d:%d]%n", &kind, &first, &last, &end) == 3 && strchr("sva", kind) != NULL) {
            const int count = last - first + 1, step = kind != 's' || count == 2 ? 2 : 4;
            const int begin = step * (int)random_below((unsigned)((kind == 's' ? 100 : 256) - count) / (unsigned)step);
            append(to, "%c[%d:%d]", kind, begin, begin + count - 1);
            at += end;
        } else if (starts_word && sscanf(at, "%c%d%n", &kind, &first, &end) == 2 && strchr("sva", kind) != NULL) {
            append(to, "%c%u", kind, random_below(kind == 's' ? 100 : 256));
            at += end;
        } else if (sscanf(at, "offset:%d%n", &first, &end) == 1) {
            append(to, "offset:%u", 1 + random_below(500));
            at += end;
        } else if (sscanf(at, "offset%1[01]:%d%n", next, &first, &end) == 2) {
            append(to, "offset%s:%u", next, 1 + random_below(255));
            at += end;
        } else if ((*at == '0' || *at == '1') && strchr("[,", at[-1]) != NULL && strchr(",]", at[1]) != NULL &&
                   strchr(from, '[') != NULL && strstr(from, ":[") != NULL && strstr(from, ":[") < at) {
            append(to, "%u", random_below(2));
            at++;
        } else {
            append(to, "%c", *at++);
        }
    }
}

/* ---- assembling ------------------------------------------------------------------------------------------- */

/* Assembles both texts of all lines, each after a label with its number. */
static void assemble(line *lines, int count, const char *target)
{
    char path[] = "/tmp/cotangent_text_XXXXXX", command[300], output[512];
    const int file = mkstemp(path);
    assert_true(file >= 0);
    FILE *input = fdopen(file, "w");
    for (int k = 0; k < count; k++)
        fprintf(input, "L%d:\n%s\nM%d:\n%s\n", k, lines[k].text, k, lines[k].again);
    fclose(input);
    snprintf(command, sizeof command, "%s -triple=amdgcn-amd-amdhsa -mcpu=%s --show-encoding %s 2>/dev/null",
             EMU_ASSEMBLER, target, path);
    FILE *assembler = popen(command, "r");
    assert_non_null(assembler);
    char *encoding = NULL;
    while (fgets(output, sizeof output, assembler) != NULL) {
        int number;
        char side;
        const char *bytes = strstr(output, "encoding: [");
        if (sscanf(output, "%1[LM]%d:", &side, &number) == 2)
            encoding = side == 'L' ? lines[number].encoding : lines[number].encoding_again;
        else if (bytes != NULL && encoding != NULL)
            snprintf(encoding, ENCODING, "%.*s", (int)strcspn(bytes + 11, "]"), bytes + 11);
    }
    pclose(assembler);
    unlink(path);
}

/* ---- the test --------------------------------------------------------------------------------------------- */

/* The instruction without its numbers: "v_add_u32_e32 v#, s#, v#". */
static void shape_of(const char *text, char *shape)
{
    const char *const operands = strchr(text, ' ');
    for (; *text != '\0'; text++)
        if (operands == NULL || text < operands || *text < '0' || *text > '9')
            *shape++ = *text;
        else if (shape[-1] != '#')
            *shape++ = '#';
    *shape = '\0';
}

static int compare_shapes(const void *a, const void *b)
{
    char shape_a[TEXT], shape_b[TEXT];
    shape_of(((const line *)a)->text, shape_a);
    shape_of(((const line *)b)->text, shape_b);
    return strcmp(shape_a, shape_b);
}

/* One instruction of each shape. */
static line *collect(const char *target, int *count)
{
    enum { MAX = 1 << 19 };
    line *lines = calloc(MAX, sizeof *lines);
    glob_t files;
    *count = 0;
    assert_int_equal(glob(HIP_CODE "/*.hipfb", 0, NULL, &files), 0);
    for (size_t f = 0; f < files.gl_pathc; f++) {
        size_t size;
        bool missing;
        char why[200];
        FILE *file = fopen(files.gl_pathv[f], "rb");
        assert_non_null(file);
        fseek(file, 0, SEEK_END);
        size = (size_t)ftell(file);
        rewind(file);
        char *bundle = malloc(size);
        assert_int_equal(fread(bundle, 1, size, file), size);
        fclose(file);
        emu_code *code = emu_load(bundle, target, &missing, why, sizeof why);
        assert_non_null(code);
        for (int k = 0; k < code->count && *count < MAX; k++) {
            copy_text(code->instructions[k].text, lines[*count].text);
            lines[(*count)++].original = true;
        }
        emu_unload(code);
        free(bundle);
        qsort(lines, (size_t)*count, sizeof *lines, compare_shapes);
        int kept = 0;
        for (int k = 0; k < *count; k++)
            if (k == 0 || compare_shapes(&lines[k], &lines[kept - 1]) != 0)
                lines[kept++] = lines[k];
        *count = kept;
    }
    globfree(&files);
    return lines;
}

static void read_line(const char *text, const char *target, char *again)
{
    char copy[TEXT + 40];
    emu_instruction i;
    snprintf(copy, sizeof copy, "\t%s // 000000000000:", text);
    emu_read_line(copy, &i);
    write_instruction(&i, text, target, again);
}

static void check(const char *target)
{
    int count;
    line *found = collect(target, &count);
    assert_true(count > 500);
    line *lines = calloc((size_t)count * (1 + VARIANTS), sizeof *lines);
    for (int k = 0; k < count; k++)
        for (int v = 0; v <= VARIANTS; v++) {
            line *l = &lines[k * (1 + VARIANTS) + v];
            if (v == 0)
                *l = found[k];
            else
                change(found[k].text, l->text);
            read_line(l->text, target, l->again);
        }
    free(found);
    count *= 1 + VARIANTS;
    assemble(lines, count, target);
    int compared = 0, refused = 0, failures = 0;
    for (int k = 0; k < count; k++) {
        const line *l = &lines[k];
        if (l->encoding[0] == '\0' && !l->original && l->encoding_again[0] == '\0') {
            refused++;
            continue;
        }
        compared++;
        if ((l->encoding[0] == '\0' || strcmp(l->encoding, l->encoding_again) != 0) && failures++ < 10)
            print_error("%s: '%s' was read as '%s': %s, %s\n", target, l->text, l->again, l->encoding,
                        l->encoding_again);
    }
    print_message("%s: %d instructions compared, %d random ones that llvm-mc refuses, %d differ\n", target, compared,
                  refused, failures);
    free(lines);
    assert_int_equal(failures, 0);
    assert_true(refused < compared / 2);
}

static void reads_what_llvm_writes(void **state)
{
    (void)state;
    check("gfx90a");
    check("gfx942");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reads_what_llvm_writes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
