/* SPDX-License-Identifier: Apache-2.0
 * test_attention_order.c: the tables of docs/kernels/attention_bwd_order.md, and the table of kernels in the README of
 * the op, compared with choose_backward; the sizes that the backward for Hopper supports.
 *
 * A row of a table applies to a call if all phrases of its cells "mode" and "call" do. The first row that applies
 * counts. A phrase that is not in `applies` fails the test. */
#include "ops/attention/cuda/attention_bwd_choice.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define PAGE "docs/kernels/attention_bwd_order.md"
#define README "src/ops/attention/README.md"

enum { MAX_ROWS = 40, CELLS = 8, CELL_BYTES = 128 };

/* The rows of a table, without its two header lines. */
typedef struct table {
    char cell[MAX_ROWS][CELLS][CELL_BYTES];
    int rows;
} table;

/* A call, and what the code chooses for it. */
typedef struct call {
    const attention_problem *problem;
    int64_t columns, key_blocks;
    bool general;
    backward_choice choice;
} call;

/* ---- the page ---------------------------------------------------------------------------------------------- */

static void read_row(char *line, char cells[CELLS][CELL_BYTES])
{
    int i = 0;
    for (char *text = strchr(line, '|') + 1, *end; i < CELLS && (end = strchr(text, '|')) != NULL; text = end + 1) {
        while (*text == ' ')
            text++;
        int length = (int)(end - text);
        while (length > 0 && text[length - 1] == ' ')
            length--;
        snprintf(cells[i++], CELL_BYTES, "%.*s", length, text);
    }
}

/* The table of a page whose header line begins with `header`. */
static table read_table(const char *path, const char *header)
{
    table t = {.rows = -2};
    char line[1024];
    FILE *page = fopen(path, "r");
    assert_non_null(page);
    bool inside = false;
    while (fgets(line, sizeof line, page) != NULL) {
        inside = inside ? line[0] == '|' : strncmp(line, header, strlen(header)) == 0;
        if (!inside)
            continue;
        assert_true(t.rows < MAX_ROWS);
        if (t.rows >= 0)
            read_row(line, t.cell[t.rows]);
        t.rows++;
    }
    fclose(page);
    assert_true(t.rows > 0);
    return t;
}

/* ---- conditions -------------------------------------------------------------------------------------------- */

static bool applies(const call *c, const char *phrase)
{
    const attention_sizes *sizes = &c->problem->sizes;
    const bool causal = sizes->right == 0, grouped = sizes->H != sizes->Hkv, is_long = is_long_call(sizes, c->columns);
    const struct {
        const char *phrase;
        bool applies;
    } phrases[] = {
        {"both", true},
        {"deterministic", c->choice.deterministic},
        {"nondeterministic", !c->choice.deterministic},
        {"`_general`", c->general && sizes->softcap == 0},
        {"`_softcap`", sizes->softcap > 0},
        {"`_general` or `_softcap`", c->general},
        {"pair kernel", c->choice.pairs},
        {"pair kernel that stores dq", c->choice.pairs && c->choice.stores_dq},
        {"pair kernel or key_blocks < 32", c->choice.pairs || c->key_blocks < 32},
        {"full mask", !causal},
        {"causal", causal},
        {"GQA", grouped},
        {"stores dq", c->choice.stores_dq},
        {"long", is_long},
        {"key_blocks >= 128", c->key_blocks >= 128},
        {"64 tile columns", c->columns == 64},
        {"96 used columns", attention_bwd_used_columns(sizes) == 96},
        {"128 used columns", attention_bwd_used_columns(sizes) == 128},
        {"long packed sequences",
         sizes->packed && causal && sizes->left >= sizes->Tk && sizes->rows_k >= 4096 * sizes->B},
        {"128 tile columns", c->columns == 128},
        {"128 tile columns and above", c->columns >= 128},
        {"up to 128 tile columns", c->columns <= 128},
        {"above 128 tile columns", c->columns > 128},
        {"above 128 tile columns or with one key-value head", c->columns > 128 || sizes->Hkv == 1},
        {"all others", true},
    };
    for (int i = 0; i < COUNT(phrases); i++)
        if (strcmp(phrase, phrases[i].phrase) == 0)
            return phrases[i].applies;
    print_error("%s: the test has no condition '%s'\n", PAGE, phrase);
    fail();
    return false;
}

static bool all_apply(const call *c, const char *cell)
{
    char text[CELL_BYTES], *rest = text;
    snprintf(text, sizeof text, "%s", cell);
    for (char *next; rest != NULL; rest = next) {
        next = strstr(rest, ", ");
        if (next != NULL)
            *next = '\0', next += 2;
        if (!applies(c, rest))
            return false;
    }
    return true;
}

/* The first row whose cells 0 to conditions - 1 apply. */
static int row_of(const table *t, const call *c, int conditions)
{
    for (int row = 0; row < t->rows; row++) {
        bool matches = true;
        for (int i = 0; i < conditions; i++)
            matches = matches && all_apply(c, t->cell[row][i]);
        if (matches)
            return row;
    }
    fail_msg("no row of a table applies to a call");
    return -1;
}

/* ---- values ------------------------------------------------------------------------------------------------- */

/* "8", "clamp(256 / key_blocks, 2, 32)", or "min(half, ...)" of the latter. */
static int64_t heads_of(const call *c, const char *cell)
{
    const attention_sizes *sizes = &c->problem->sizes;
    long dividend, low, high, heads;
    const bool capped = strncmp(cell, "min(half, ", 10) == 0;
    const char *value = capped ? cell + 10 : cell;
    if (sscanf(value, "clamp(%ld / key_blocks, %ld, %ld)", &dividend, &low, &high) == 3)
        heads = (long)cot_clamp(dividend / c->key_blocks, low, high);
    else
        assert_int_equal(sscanf(value, "%ld", &heads), 1);
    return capped ? cot_min(heads, cot_max(sizes->B * sizes->Hkv / 2, 1)) : heads;
}

/* Whether a cell means "descending" for a section: "ascending", "descending", or "one; last section: other". */
static bool is_descending(const char *cell, bool last_section)
{
    const char *last = strstr(cell, "last section: ");
    const char *value = last != NULL && last_section ? last + 14 : cell;
    const bool descending = strncmp(value, "descending", 10) == 0;
    assert_true(descending || strncmp(value, "ascending", 9) == 0);
    return descending;
}

/* The keys to which a query can attend. */
static int64_t query_keys(const attention_sizes *sizes)
{
    return cot_min(cot_min(sizes->left, sizes->Tk) + 1 + cot_min(sizes->right, sizes->Tk), sizes->Tk);
}

static void compare(const call *c, const table *modes, const table *directions, const table *heads)
{
    const backward_choice *choice = &c->choice;
    const attention_sizes *sizes = &c->problem->sizes;
    bool deterministic = true;
    if (c->problem->allow_nondeterminism) {
        const char *mode = modes->cell[row_of(modes, c, 1)][1], *condition = strstr(mode, " if ");
        deterministic = mode[0] == 'd';
        long key_blocks, keys;
        if (condition != NULL && sscanf(condition, " if key_blocks >= %ld", &key_blocks) == 1)
            deterministic = c->key_blocks < key_blocks;
        else if (condition != NULL && sscanf(condition, " if a query can attend to more than %ld keys", &keys) == 1)
            deterministic = query_keys(sizes) <= keys;
        else if (condition != NULL)
            deterministic = !applies(c, condition + 4);
    }
    assert_int_equal(choice->deterministic, deterministic);
    const int column = c->columns == 64 ? 2 : c->columns == 128 ? 3 : 4;
    assert_int_equal(choice->heads_per_section, heads_of(c, heads->cell[row_of(heads, c, 2)][column]));
    const char(*direction)[CELL_BYTES] = directions->cell[row_of(directions, c, 2)];
    const int64_t sections = cot_ceil_div(sizes->B * sizes->Hkv, choice->heads_per_section);
    for (int64_t section = 0; section < sections; section += cot_max(sections - 1, 1)) {
        /* As work_of does. In a general call all sections have one order, which work_of_general reads from the first. */
        const bool ascending = section >= choice->first_ascending_section;
        const bool descending_tiles = ascending && choice->descending_tiles;
        if (c->general)
            assert_true(choice->first_ascending_section ==
                        (descending_tiles ? ALL_SECTIONS_ASCEND : NO_SECTION_ASCENDS));
        assert_int_equal(!ascending, is_descending(direction[2], section == sections - 1));
        assert_int_equal(descending_tiles, is_descending(direction[3], section == sections - 1));
    }
}

/* ---- the table of kernels ---------------------------------------------------------------------------------- */

static bool matches(const char *cell, bool value, const char *if_true, const char *if_false)
{
    assert_true(cell[0] == '\0' || strcmp(cell, if_true) == 0 || strcmp(cell, if_false) == 0);
    return cell[0] == '\0' || strcmp(cell, value ? if_true : if_false) == 0;
}

/* A cell such as "4 to 32", "at least 16", "up to 16", "any" or "never". "4 to 32, even": and even. "at least 16, even
 * or above 64": and even, or above 64. */
static bool contains(const char *cell, int64_t key_blocks)
{
    long low = 0, high = LONG_MAX, odd_above = LONG_MAX;
    const char *even = strstr(cell, ", even");
    if (even != NULL) {
        assert_true(strcmp(even, ", even") == 0 || sscanf(even, ", even or above %ld", &odd_above) == 1);
        if (key_blocks % 2 != 0 && key_blocks <= odd_above)
            return false;
    }
    if (strcmp(cell, "never") == 0)
        return false;
    if (cell[0] != '\0' && strcmp(cell, "any") != 0)
        assert_true(sscanf(cell, "%ld to %ld", &low, &high) == 2 || sscanf(cell, "at least %ld", &low) == 1 ||
                    sscanf(cell, "up to %ld", &high) == 1);
    return key_blocks >= low && key_blocks <= high;
}

static bool other_conditions_hold(const call *c, const char *cell)
{
    const attention_sizes *sizes = &c->problem->sizes;
    const bool is_long = is_long_call(sizes, c->columns), is_bf16 = sizes->dtype == COT_BF16;
    if (cell[0] == '\0')
        return true;
    if (strcmp(cell, "not *long*") == 0)
        return !is_long;
    if (strcmp(cell, "not *long*; at 64 tile columns bf16") == 0)
        return !is_long && (c->columns != 64 || is_bf16);
    if (strcmp(cell, "at 128 tile columns not *long*") == 0)
        return c->columns != 128 || !is_long;
    assert_string_equal(cell, "at least 256 key blocks in the call");
    return c->key_blocks * sizes->B * sizes->Hkv >= 256;
}

/* Whether a general call runs on _general_stores_dq, by the row of the README's table of calls. */
static bool general_stores_dq(const call *c)
{
    const attention_problem *p = c->problem;
    const attention_sizes *sizes = &p->sizes;
    const bool is_short = query_keys(sizes) < 4096 || (sizes->packed && sizes->rows_k < 4096 * sizes->B);
    return sizes->softcap == 0 && sizes->H == sizes->Hkv && sizes->d_qk == c->columns && c->columns <= 128 &&
           (c->columns == 128 || (sizes->dtype == COT_BF16 && is_short)) &&
           store_method_of(p, &p->dq) == ATTENTION_STORE_VECTORS_16;
}

/* A sentence above the table is a condition, too: the versions that store dq need dq stored as vectors. */
static void compare_kernel(const call *c, const table *kernels)
{
    const attention_problem *p = c->problem;
    const bool may_store_dq = store_method_of(p, &p->dq) == ATTENTION_STORE_VECTORS_16;
    for (int row = 0; row < kernels->rows; row++) {
        const char(*cell)[CELL_BYTES] = kernels->cell[row];
        const bool pairs = strcmp(cell[6], "pair kernel") == 0, stores_dq = strcmp(cell[7], "`_stores_dq`") == 0;
        if (!matches(cell[0], p->sizes.right == 0, "causal", "full") ||
            !matches(cell[1], p->sizes.H != p->sizes.Hkv, "yes", "no") ||
            !matches(cell[2], c->choice.deterministic, "yes", "no") ||
            !contains(cell[c->columns == 64 ? 3 : 4], c->key_blocks) || !other_conditions_hold(c, cell[5]) ||
            (stores_dq && !may_store_dq))
            continue;
        assert_int_equal(c->choice.pairs, pairs);
        assert_int_equal(c->choice.stores_dq, stores_dq);
        return;
    }
    fail_msg("no row of the table of kernels applies to a call");
}

static void test_tables(void **state)
{
    (void)state;
    const table modes = read_table(PAGE, "| call with `allow_nondeterminism` |");
    const table directions = read_table(PAGE, "| mode | call | key blocks by keys |");
    const table heads = read_table(PAGE, "| mode | call | 64 |");
    const table kernels = read_table(README, "| mask | GQA | deterministic | key blocks, 64 tile columns |");
    static const int64_t columns[] = {64, 96, 128, 192, 256}, queries[] = {1, 24576, 24577, 98304, 98305},
                         key_blocks[] = {1,  2,  3,  4,  5,  7,   8,   15,  16,  17,  31,  32,  33,  43,
                                         63, 64, 65, 96, 99, 127, 128, 129, 180, 255, 256, 257, 300, 600},
                         kv_heads[] = {1, 2, 3, 8, 64};
    int calls = 0;
    for (int bits = 0; bits < 32; bits++)
        for (int n = 0; n < COUNT(columns) * COUNT(queries) * COUNT(key_blocks) * COUNT(kv_heads) * 2; n++) {
            int rest = n;
#define NEXT(values) values[rest % COUNT(values)], rest /= COUNT(values)
            attention_problem p = {.allow_nondeterminism = bits & 1};
            call c = {.problem = &p, .general = (bits & 4) != 0};
            p.sizes.d_qk = p.sizes.d_v = NEXT(columns);
            c.columns = attention_bwd_tile_columns(&p.sizes);
            p.sizes.Tq = NEXT(queries);
            c.key_blocks = NEXT(key_blocks);
            p.sizes.Hkv = NEXT(kv_heads);
#undef NEXT
            p.sizes.Tk = ATTENTION_BWD_KEYS * c.key_blocks - n % ATTENTION_BWD_KEYS;
            p.sizes.B = rest == 0 ? 1 : 3;
            p.sizes.H = p.sizes.Hkv * (bits & 8 ? 4 : 1);
            p.sizes.left = c.general && n % 5 == 0 ? 4000 + n % 200 : INT64_MAX;
            p.sizes.right = bits & 2 ? 0 : INT64_MAX;
            p.sizes.softcap = c.general && n % 3 == 0 ? 30 : 0;
            p.sizes.packed = c.general && n % 7 < 3;
            p.sizes.rows_k = p.sizes.B * p.sizes.Tk;
            p.sizes.dtype = n % 3 == 0 ? COT_F16 : COT_BF16;
            p.dq = (cot_tensor){.dtype = bits & 16 ? COT_F32 : p.sizes.dtype,
                                .rank = 4,
                                .shape = {1, 1, 1, c.columns},
                                .stride = {c.columns, c.columns, c.columns, 1}};
            c.choice = choose_backward(&p, c.general, c.columns);
            compare(&c, &modes, &directions, &heads);
            if (c.general)
                assert_int_equal(c.choice.stores_dq, general_stores_dq(&c));
            else if (c.columns <= 128 && attention_bwd_used_columns(&p.sizes) != 96)
                compare_kernel(&c, &kernels);
            calls++;
        }
    assert_true(calls > 10000);
}

/* Many batch elements: no grid dimension is the number of batch elements or heads. */
static void test_supported_sizes(void **state)
{
    (void)state;
    attention_problem p = {.sizes = {.B = 70000,
                                     .H = 70000,
                                     .Hkv = 70000,
                                     .Tq = 1,
                                     .Tk = 1,
                                     .q_length = 1,
                                     .k_length = 1,
                                     .d_qk = 64,
                                     .d_v = 64,
                                     .dtype = COT_BF16,
                                     .left = INT64_MAX,
                                     .right = INT64_MAX}};
    assert_string_equal(attention_bwd_sm90_refusal(&p),
                        "it counts sequences, heads, queries, keys and key blocks in 32 bits");
    p.sizes.H = p.sizes.Hkv = 1;
    assert_null(attention_bwd_sm90_refusal(&p));
    p.sizes.H = 2 * 46341;
    p.sizes.Hkv = 2;
    assert_string_equal(attention_bwd_sm90_refusal(&p),
                        "H / Hkv and Tq are too large: see docs/kernels/attention_bwd_hopper.md#limits");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tables), cmocka_unit_test(test_supported_sizes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
