/* SPDX-License-Identifier: Apache-2.0
 *
 * parse.c: translates the PTX text of a kernel into emu_ins. Letters describe the operands of an opcode:
 *
 *   w l p x   a register that is read: 32-bit, 64-bit, predicate, any class
 *   W L P X   the same, written
 *   B M       a register that is read and written: 32-bit, 64-bit
 *   D         a register and optionally "|" and a predicate, both written
 *   A         an address in brackets; the operand is its register
 *   T         [map, {coordinates}]; the operands are the map's register and the coordinates
 *   b         a label
 *   ?         the letters after it are optional
 *
 * Braces hold several operands of the same letter. */
#include "emulator.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAMES = 4096 };

typedef struct name { /* a family of registers %r<N>, a single register, or a symbol with an address */
    const char *text;
    int length, count, first;
    enum emu_class class;
    enum { REGISTER, ADDRESS, PARAMETER } kind;
    int64_t value;
} name;

typedef struct label_position {
    int ins;
    const char *label;
    int length;
} label_position;

typedef struct parser {
    const char *file, *kernel, *begin, *statement;
    jmp_buf failed;
    emu_kernel *k;
    int code_capacity, line;
    const char *line_position;
    name names[MAX_NAMES];
    int name_count, register_count, register_capacity;
    uint8_t *classes;
    int32_t *pool; /* operands of all instructions */
    uint8_t *roles;
    int pool_count, pool_capacity, constant_words, constant_capacity, discarded[3];
    label_position *label_uses, *labels;
    int label_use_count, label_count, label_use_capacity, label_capacity;
    int shared_end, local_end;
} parser;

#define GROW(array, count, capacity)                                          \
    do {                                                                      \
        if ((count) >= (capacity)) {                                          \
            (capacity) = 2 * (capacity) + 256;                                \
            (array) = realloc((array), (size_t)(capacity) * sizeof *(array)); \
        }                                                                     \
    } while (0)

static int line_of(parser *p, const char *at)
{
    for (; p->line_position < at; p->line_position++)
        p->line += *p->line_position == '\n';
    return p->line;
}

__attribute__((noreturn)) static void fail(parser *p, const char *what)
{
    const int length = (int)strcspn(p->statement, ";\n");
    snprintf(emu_message, sizeof emu_message, "%s:%d: kernel %s: %s: %.*s", p->file, line_of(p, p->statement),
             p->kernel, what, length, p->statement);
    longjmp(p->failed, 1);
}

bool emu_has(const char *opcode, const char *modifier)
{
    const size_t length = strlen(modifier);
    for (const char *at = strstr(opcode, modifier); at != NULL; at = strstr(at + 1, modifier))
        if (at[length] == 0 || at[length] == '.')
            return true;
    return false;
}

/* ---- names ---------------------------------------------------------------------------------------------- */

static int is_name(int c)
{
    return isalnum(c) || c == '_' || c == '$' || c == '%' || c == '.';
}

static name *add_name(parser *p, const char *text, int length)
{
    if (p->name_count == MAX_NAMES)
        fail(p, "too many names");
    name *n = &p->names[p->name_count++];
    *n = (name){.text = text, .length = length};
    return n;
}

static int new_registers(parser *p, enum emu_class class, int count)
{
    while (p->register_count + count > p->register_capacity)
        GROW(p->classes, p->register_capacity, p->register_capacity);
    memset(p->classes + p->register_count, class, (size_t)count);
    p->register_count += count;
    return p->register_count - count;
}

static const char *skip(const char *at)
{
    for (;;) {
        at += strspn(at, " \t\r\n");
        if (at[0] == '/' && at[1] == '/')
            at += strcspn(at, "\n");
        else if (at[0] == '/' && at[1] == '*')
            at = strstr(at, "*/") + 2;
        else
            return at;
    }
}

/* .reg .b32 %r<5>;  .reg .f16 low, high; */
static void declare_registers(parser *p, const char *at, const char *end)
{
    at = skip(at + 4);
    const char *type = at;
    const enum emu_class class = strncmp(type, ".pred", 5) == 0 ? PREDICATE : memmem(type, 4, "64", 2) ? DOUBLE : WORD;
    at += 1 + strspn(at + 1, "abcdefghijklmnopqrstuvwxyz0123456789");
    for (at = skip(at); at < end; at = skip(at)) {
        int length = 0;
        while (is_name((unsigned char)at[length]))
            length++;
        name *n = add_name(p, at, length);
        n->class = class;
        n->count = at[length] == '<' ? atoi(at + length + 1) : 0;
        n->first = new_registers(p, class, n->count > 0 ? n->count : 1);
        at += length + strcspn(at + length, ",;");
        at += *at == ',';
    }
}

/* Parses a declaration such as ".shared .align 8 .b8 name[96];". Returns the name, its size and its alignment. */
static name *declare_memory(parser *p, const char *at, int64_t *size, int *align)
{
    *align = 1;
    int element = 1;
    for (;;) {
        at = skip(at);
        if (strncmp(at, ".align", 6) == 0) {
            at = skip(at + 6);
            *align = (int)strtol(at, (char **)&at, 10);
        } else if (*at == '.') {
            element = strstr(at, "64") == at + 2   ? 8
                      : strstr(at, "32") == at + 2 ? 4
                      : strstr(at, "16") == at + 2 ? 2
                                                   : 1;
            at += 1 + strspn(at + 1, "abcdefghijklmnopqrstuvwxyz0123456789");
        } else
            break;
    }
    int length = 0;
    while (is_name((unsigned char)at[length]))
        length++;
    name *n = add_name(p, at, length);
    n->kind = ADDRESS;
    *align = *align > element ? *align : element;
    *size = element * (at[length] == '[' ? strtol(at + length + 1, NULL, 10) : 1);
    return n;
}

static int64_t reserve(int *end, int64_t size, int align)
{
    const int at = (*end + align - 1) / align * align;
    *end = at + (int)size;
    return at;
}

static name *find_name(parser *p, const char *text, int length, int *number)
{
    int digits = length;
    while (digits > 0 && isdigit((unsigned char)text[digits - 1]))
        digits--;
    for (int n = p->name_count - 1; n >= 0; n--) {
        name *c = &p->names[n];
        *number = 0;
        if (c->count == 0 && c->length == length && memcmp(c->text, text, (size_t)length) == 0)
            return c;
        if (c->count > 0 && c->length == digits && digits < length && memcmp(c->text, text, (size_t)digits) == 0) {
            *number = atoi(text + digits);
            return *number < c->count ? c : NULL;
        }
    }
    return NULL;
}

/* ---- operands ------------------------------------------------------------------------------------------- */

static void add_operand(parser *p, emu_ins *i, int32_t operand, int role)
{
    if (p->pool_count == p->pool_capacity) {
        GROW(p->pool, p->pool_count, p->pool_capacity);
        p->roles = realloc(p->roles, (size_t)p->pool_capacity);
    }
    p->pool[p->pool_count] = operand;
    p->roles[p->pool_count++] = (uint8_t)role;
    if (++i->count > MAX_OPERANDS)
        fail(p, "too many operands");
}

static int32_t add_constant(parser *p, enum emu_class class, uint64_t value)
{
    const int words = class == DOUBLE ? 2 : 1;
    for (int at = p->constant_words - LANES; at >= 0 && at > p->constant_words - 16 * LANES; at -= LANES)
        if (class == WORD && p->k->constants[at] == (uint32_t)value && p->k->constants[at + 1] == (uint32_t)value)
            return ~at;
    while (p->constant_words + words * LANES > p->constant_capacity)
        GROW(p->k->constants, p->constant_capacity, p->constant_capacity);
    const int at = p->constant_words;
    for (int l = 0; l < LANES; l++) {
        p->k->constants[at + words * l] = (uint32_t)value;
        if (words == 2)
            p->k->constants[at + 2 * l + 1] = (uint32_t)(value >> 32);
        else if (class == PREDICATE)
            p->k->constants[at + l] = value != 0 ? ~0u : 0;
    }
    p->constant_words += words * LANES;
    return ~at;
}

static int32_t add_special(parser *p, int id, int64_t offset, enum emu_class class)
{
    for (int s = 0; s < p->k->special_count; s++)
        if (p->k->specials[s].id == id && p->k->specials[s].offset == offset &&
            p->classes[p->k->specials[s].reg] == class)
            return p->k->specials[s].reg;
    if (p->k->special_count == 64)
        fail(p, "too many special registers");
    const int reg = new_registers(p, class, 1);
    p->k->specials[p->k->special_count++] = (struct emu_special){id, reg, offset};
    return reg;
}

static const char *const special_names[SPECIALS] = {"%tid.x",
                                                    "%tid.y",
                                                    "%tid.z",
                                                    "%ntid.x",
                                                    "%ntid.y",
                                                    "%ntid.z",
                                                    "%ctaid.x",
                                                    "%ctaid.y",
                                                    "%ctaid.z",
                                                    "%nctaid.x",
                                                    "%nctaid.y",
                                                    "%nctaid.z",
                                                    "%laneid",
                                                    "%warpid",
                                                    "%lanemask_eq",
                                                    "%lanemask_lt",
                                                    "%lanemask_le",
                                                    "%lanemask_gt",
                                                    "%lanemask_ge",
                                                    "%cluster_ctarank",
                                                    "%cluster_nctarank",
                                                    "%dynamic_smem_size",
                                                    "%clock64"};

static const char *const class_words[] = {"a 32-bit", "a 64-bit", "a predicate"};

/* Parses one operand at `at`. Returns the position after it. */
static const char *parse_operand(parser *p, emu_ins *i, const char *at, char letter)
{
    static const char written[] = "WLPX", both[] = "BM";
    const int role = strchr(both, letter) != NULL ? USED | WRITTEN : strchr(written, letter) != NULL ? WRITTEN : USED;
    const int kind = tolower(letter);
    const bool any_class = kind == 'x' || kind == 'a' || kind == 't';
    enum emu_class class = kind == 'l' || kind == 'm' ? DOUBLE : kind == 'p' ? PREDICATE : WORD;
    if (any_class && i->wide_data)
        class = DOUBLE;
    at = skip(at);
    if (*at == '_' && !is_name((unsigned char)at[1])) {
        if (p->discarded[class] < 0)
            p->discarded[class] = new_registers(p, class, 1);
        add_operand(p, i, p->discarded[class], role);
        return at + 1;
    }
    char *end;
    if (isdigit((unsigned char)*at) || *at == '-') {
        uint64_t value;
        if (at[0] == '0' && (at[1] == 'f' || at[1] == 'd'))
            value = strtoull(at + 2, &end, 16);
        else {
            const bool negative = *at == '-';
            value = strtoull(at + negative, &end, 0);
            value = negative ? -value : value;
            if (*end == '.') {
                const double real = strtod(at, &end);
                const float single = (float)real;
                uint32_t bits;
                memcpy(&bits, &single, 4);
                memcpy(&value, &real, 8);
                value = class == DOUBLE ? value : bits;
            } else if (*end == 'U')
                end++;
        }
        add_operand(p, i, add_constant(p, class, value), USED);
        return end;
    }
    int length = 0;
    while (is_name((unsigned char)at[length]))
        length++;
    for (int s = 0; s < SPECIALS; s++)
        if ((int)strlen(special_names[s]) == length && memcmp(at, special_names[s], (size_t)length) == 0) {
            add_operand(p, i, add_special(p, s, 0, class), USED);
            return at + length;
        }
    int number;
    const name *n = find_name(p, at, length, &number);
    if (n == NULL)
        fail(p, "an operand that is not known");
    if (n->kind == PARAMETER)
        add_operand(p, i, add_special(p, PARAM_ADDRESS, n->value, DOUBLE), USED);
    else if (n->kind == ADDRESS)
        add_operand(p, i, add_constant(p, class, (uint64_t)n->value), USED);
    else {
        if (!any_class && n->class != class) {
            char words[80];
            snprintf(words, sizeof words, "operand %d should be %s register", i->count + 1, class_words[class]);
            fail(p, words);
        }
        if (any_class)
            class = n->class;
        add_operand(p, i, n->first + number, role);
    }
    if (kind == 'x')
        i->wide_data = class == DOUBLE;
    return at + length;
}

static const char *parse_operand_list(parser *p, emu_ins *i, const char *at, char letter)
{
    at = skip(at);
    if (*at != '{')
        return parse_operand(p, i, at, letter);
    do
        at = skip(parse_operand(p, i, at + 1, letter));
    while (*at == ',');
    if (*at != '}')
        fail(p, "a vector without an end");
    return at + 1;
}

static const char *parse_address(parser *p, emu_ins *i, const char *at, int which, bool tensor)
{
    at = skip(at);
    if (*at != '[')
        fail(p, "no address where one is expected");
    const int first = p->pool_count;
    const bool data_wide = i->wide_data;
    i->wide_data = true; /* a constant address gets 64 bits */
    at = skip(parse_operand(p, i, at + 1, 'a'));
    i->wide_data = data_wide;
    const int32_t base = p->pool[first];
    i->wide[which] = base < 0 || p->classes[base] == DOUBLE;
    if (*at == '+') {
        i->offset[which] = strtoll(skip(at + 1), (char **)&at, 0);
        at = skip(at);
    }
    if (tensor && *at == ',')
        at = skip(parse_operand_list(p, i, at + 1, 'w'));
    if (*at != ']')
        fail(p, "an address without an end");
    return at + 1;
}

static void parse_all_operands(parser *p, emu_ins *i, const char *at, const char *letters)
{
    bool first = true, optional = false;
    int addresses = 0;
    for (; *letters != 0; letters++) {
        if (*letters == '?') {
            optional = true;
            continue;
        }
        at = skip(at);
        if (*at == ';' && optional)
            return;
        if (!first) {
            if (*at != ',')
                fail(p, "an operand is missing");
            at = skip(at + 1);
        }
        first = false;
        if (*letters == 'A' || *letters == 'T') {
            at = parse_address(p, i, at, addresses < 2 ? addresses : 2, *letters == 'T');
            addresses++;
        } else if (*letters == 'b') {
            int length = 0;
            while (is_name((unsigned char)at[length]))
                length++;
            GROW(p->label_uses, p->label_use_count, p->label_use_capacity);
            p->label_uses[p->label_use_count++] = (label_position){p->k->count - 1, at, length};
            at += length;
        } else if (*letters == 'D') {
            at = skip(parse_operand(p, i, at, 'W'));
            at = *at == '|' ? parse_operand(p, i, at + 1, 'P') : (parse_operand(p, i, "_", 'P'), at);
        } else
            at = parse_operand_list(p, i, at, *letters);
    }
    if (*skip(at) != ';')
        fail(p, "more operands than expected");
}

/* ---- statements ----------------------------------------------------------------------------------------- */

static enum emu_step run_branch(emu_warp *w, const emu_ins *i, uint32_t mask)
{
    emu_split *s = &w->splits[w->current];
    const uint32_t others = s->mask & ~mask;
    if (others != 0) /* run_warp has already incremented pc */
        w->splits[w->split_count++] = (emu_split){.mask = others, .pc = s->pc};
    s->mask = mask;
    s->pc = i->target;
    return JUMP;
}

enum emu_step emu_exit(emu_warp *w, const emu_ins *i, uint32_t mask)
{
    (void)i;
    w->alive &= ~mask;
    w->splits[w->current].mask &= ~mask;
    emu_progress++;
    return JUMP;
}

static void parse_instruction(parser *p, const char *at)
{
    GROW(p->k->code, p->k->count, p->code_capacity);
    emu_ins *i = &p->k->code[p->k->count++];
    *i = (emu_ins){.guard = -1, .target = -1, .line = line_of(p, at), .text = at};
    const int first = p->pool_count;
    if (*at == '@') {
        i->negated = at[1] == '!';
        at = skip(parse_operand(p, i, at + 1 + i->negated, 'p'));
        i->guard = p->pool[first];
    }
    char opcode[128];
    int length = 0;
    while ((is_name((unsigned char)at[length]) || at[length] == ':') && length < 127)
        length++;
    memcpy(opcode, at, (size_t)length);
    opcode[length] = 0;
    at = skip(at + length);
    if (strncmp(opcode, "mov.b", 5) == 0) { /* a mov with braces packs or unpacks: the table has extra opcodes for it */
        const bool unpack = *at == '{', pack = *skip(strchr(at, ',') + 1) == '{';
        if (unpack || pack)
            snprintf(opcode, sizeof opcode, "%s.b%d", unpack ? "unpack" : "pack", opcode[5] == '6' ? 64 : 32);
    }
    const char *letters = NULL;
    if (strcmp(opcode, "bra") == 0 || strcmp(opcode, "bra.uni") == 0)
        letters = "b", i->run = run_branch;
    else if (strcmp(opcode, "ret") == 0 || strcmp(opcode, "exit") == 0)
        letters = "", i->run = emu_exit;
    if (letters == NULL)
        letters = emu_find_arithmetic(opcode, i);
    if (letters == NULL)
        letters = emu_find_memory(opcode, i);
    if (letters == NULL)
        letters = emu_find_control(opcode, i);
    if (letters == NULL)
        letters = emu_find_async(opcode, i);
    if (letters == NULL)
        fail(p, "the emulator does not know this instruction");
    const int guards = i->count;
    parse_all_operands(p, i, at, letters);
    i->count = (uint16_t)(i->count - guards); /* the guard stays in the pool, before the operands */
    i->o = (int32_t *)(intptr_t)(first + guards);
}

static void parse_statements(parser *p, const char *at)
{
    int scopes[64], depth = 0;
    for (;;) {
        at = p->statement = skip(at);
        if (*at == '{') {
            if (depth == 64)
                fail(p, "braces too deep");
            scopes[depth++] = p->name_count;
            at++;
            continue;
        }
        if (*at == '}') {
            p->name_count = scopes[--depth];
            at++;
            if (depth == 0)
                return;
            continue;
        }
        int length = 0;
        while (is_name((unsigned char)at[length]))
            length++;
        if (length > 0 && at[length] == ':' && at[length + 1] != ':') {
            GROW(p->labels, p->label_count, p->label_capacity);
            p->labels[p->label_count++] = (label_position){p->k->count, at, length};
            at += length + 1;
            continue;
        }
        if (strncmp(at, ".loc", 4) == 0 && isspace((unsigned char)at[4])) {
            at += strcspn(at, "\n");
            continue;
        }
        const char *end = strchr(at, ';');
        int64_t size;
        int align;
        if (strncmp(at, ".reg", 4) == 0)
            declare_registers(p, at, end);
        else if (strncmp(at, ".shared", 7) == 0) {
            name *n = declare_memory(p, at + 7, &size, &align);
            n->value = reserve(&p->shared_end, size, align);
        } else if (strncmp(at, ".local", 6) == 0) {
            name *n = declare_memory(p, at + 6, &size, &align);
            n->value = reserve(&p->local_end, size, align);
        } else if (*at != '.')
            parse_instruction(p, at);
        else if (strncmp(at, ".pragma", 7) != 0)
            fail(p, "the emulator does not know this directive");
        at = end + 1;
    }
}

static void link_code(parser *p)
{
    for (int j = 0; j < p->label_use_count; j++) {
        const label_position *from = &p->label_uses[j];
        int to = -1;
        for (int l = 0; l < p->label_count && to < 0; l++)
            if (p->labels[l].length == from->length &&
                memcmp(p->labels[l].label, from->label, (size_t)from->length) == 0)
                to = p->labels[l].ins;
        p->statement = from->label;
        if (to < 0 || to >= p->k->count)
            fail(p, "a label that is not there");
        p->k->code[from->ins].target = to;
    }
    emu_operands all = {p->pool, p->roles, p->classes, p->pool_count, p->register_count};
    emu_allocate_registers(p->k, &all);
    for (int n = 0; n < p->k->count; n++)
        p->k->code[n].o = p->pool + (intptr_t)p->k->code[n].o;
}

/* ---- a kernel ------------------------------------------------------------------------------------------- */

/* Declares the module's shared memory that this kernel uses. The dynamic shared memory gets a negative value (minus
 * its alignment) until it has an address. */
static void declare_module_memory(parser *p, const char *text, const char *body, const char *end)
{
    for (const char *at = text; (at = strstr(at, ".shared ")) != NULL; at += 8) {
        const bool outside = at > text && at[-1] == '\n',
                   dynamic = at > text + 8 && memcmp(at - 9, "\n.extern ", 9) == 0;
        int64_t size;
        int align;
        if (!outside && !dynamic)
            continue;
        name *n = declare_memory(p, at + 8, &size, &align);
        if (memmem(body, (size_t)(end - body), n->text, (size_t)n->length) == NULL)
            p->name_count--;
        else
            n->value = dynamic ? -align : reserve(&p->shared_end, size, align);
    }
}

static void parse_parameters(parser *p, const char *at)
{
    int end = 0;
    for (at = skip(at); *at != ')'; at = skip(at)) {
        int64_t size;
        int align;
        p->statement = at;
        name *n = declare_memory(p, at + 6, &size, &align);
        n->kind = PARAMETER;
        n->value = reserve(&end, size, align);
        if (p->k->param_count == 64)
            fail(p, "too many parameters");
        p->k->param_offset[p->k->param_count++] = (int)n->value;
        at = n->text + n->length + strcspn(n->text + n->length, ",)");
        at += *at == ',';
    }
    p->k->param_bytes = end;
}

static void free_parser(parser *p)
{
    free(p->classes), free(p->roles), free(p->label_uses), free(p->labels), free(p);
}

emu_kernel *emu_parse(const char *file, const char *text, const char *kernel_name)
{
    const size_t length = strlen(kernel_name);
    const char *at = text;
    while ((at = strstr(at, ".entry ")) != NULL && (memcmp(at + 7, kernel_name, length) != 0 || at[7 + length] != '('))
        at++;
    emu_message[0] = 0;
    if (at == NULL)
        return NULL;
    parser *p = calloc(1, sizeof *p);
    p->file = file, p->kernel = kernel_name, p->begin = p->line_position = p->statement = text, p->line = 1;
    p->discarded[0] = p->discarded[1] = p->discarded[2] = -1;
    p->k = calloc(1, sizeof *p->k);
    p->k->name = strdup(kernel_name);
    p->shared_end = SHARED_BEGIN;
    if (setjmp(p->failed) != 0) {
        free_parser(p);
        return NULL;
    }
    const char *body = strchr(at, '{'), *next = strstr(body, ".entry "),
               *end = next != NULL ? next : body + strlen(body);
    declare_module_memory(p, text, body, end);
    const int module_names = p->name_count, begin = p->shared_end;
    parse_parameters(p, at + 8 + length);
    /* The kernel's static shared memory precedes the dynamic shared memory. */
    for (const char *s = body; (s = strstr(s, "\t.shared ")) != NULL && s < end; s++) {
        int64_t size;
        int align;
        declare_memory(p, s + 8, &size, &align);
        reserve(&p->shared_end, size, align);
        p->name_count--;
    }
    int dynamic = p->shared_end;
    for (int n = 0; n < module_names; n++)
        if (p->names[n].value < 0)
            p->names[n].value = reserve(&dynamic, 0, (int)-p->names[n].value);
    p->k->shared_bytes = dynamic;
    p->shared_end = begin;
    parse_statements(p, body);
    p->k->local_bytes = p->local_end;
    link_code(p);
    emu_kernel *k = p->k;
    free_parser(p);
    return k;
}
