/* SPDX-License-Identifier: Apache-2.0 */
#include "signature.h"

#include "core/integers.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_SYMBOLS = 16 };

/* A part of the signature's text. */
typedef struct slice {
    const char *text;
    int length;
} slice;

/* "dbias:weight[D]": dtype is "weight", like is empty, dims is "D". A missing part has length 0. dims may also be empty
 * if present. */
typedef struct entry {
    slice dtype, like, dims;
} entry;

typedef struct symbol {
    slice name;
    int64_t value;
} symbol;

typedef struct reader {
    const cot_direction *direction;
    void *args;
    const char *cursor;
    symbol symbols[MAX_SYMBOLS];
    int symbol_count;
    const cot_tensor *ellipsis_input; /* the first input with "...", which represents its leading axes */
    int ellipsis_axes;
} reader;

static const char ELLIPSIS[] = "...,";

/* Takes the text up to one of the delimiters or the end. */
static slice take_until(const char **cursor, const char *delimiters)
{
    const slice s = {*cursor, (int)strcspn(*cursor, delimiters)};
    *cursor += s.length;
    return s;
}

static bool slice_equals(slice s, const char *text)
{
    return (int)strlen(text) == s.length && strncmp(s.text, text, (size_t)s.length) == 0;
}

/* Reads the entry of the next field. Returns false if the signature names another field. */
static bool next_entry(reader *r, const char *name, entry *e)
{
    *e = (entry){0};
    if (!slice_equals(take_until(&r->cursor, ":=[ "), name))
        return false;
    if (*r->cursor == ':' && r->cursor++)
        e->dtype = take_until(&r->cursor, "[= ");
    if (*r->cursor == '=' && r->cursor++)
        e->like = take_until(&r->cursor, " ");
    if (*r->cursor == '[' && r->cursor++) {
        e->dims = take_until(&r->cursor, "] ");
        if (*r->cursor++ != ']')
            return false;
    }
    if (*r->cursor == ' ')
        r->cursor++;
    return true;
}

static const cot_tensor *field_tensor(const reader *r, slice name)
{
    for (int f = 0; f < r->direction->field_count; f++)
        if (slice_equals(name, r->direction->fields[f].name))
            return cot_field_tensor(&r->direction->fields[f], r->args);
    return NULL;
}

/* Splits "K-1" into its symbol K and its number -1. */
static slice split_term(slice term, int64_t *number)
{
    const int length = (int)strcspn(term.text, "+-/,]");
    *number = length < term.length && term.text[length] != '/' ? strtoll(term.text + length, NULL, 10) : 0;
    return (slice){term.text, length};
}

/* Skips a leading "...," and returns whether there was one. *named_axes is the number of axes that are named after
 * it. */
static bool skip_ellipsis(slice dims, const char **cursor, int *named_axes)
{
    const size_t length = strlen(ELLIPSIS);
    *cursor = dims.text;
    *named_axes = dims.length > 0;
    for (int i = 0; i < dims.length; i++)
        *named_axes += dims.text[i] == ',';
    if ((size_t)dims.length <= length || strncmp(dims.text, ELLIPSIS, length) != 0)
        return false;
    *cursor += length;
    --*named_axes;
    return true;
}

static const symbol *find_symbol(const reader *r, slice name)
{
    for (int i = 0; i < r->symbol_count; i++)
        if (r->symbols[i].name.length == name.length &&
            strncmp(r->symbols[i].name.text, name.text, (size_t)name.length) == 0)
            return &r->symbols[i];
    return NULL;
}

/* Each symbol gets its value from the first input that uses it. x may have fewer axes than the signature (update's
 * [B,D]). */
static void bind_symbols(reader *r, const entry *e, const cot_tensor *tensor)
{
    const char *cursor;
    int axis = 0, named_axes;
    if (skip_ellipsis(e->dims, &cursor, &named_axes)) {
        axis = tensor->rank > named_axes ? tensor->rank - named_axes : 0;
        if (r->ellipsis_input == NULL) {
            r->ellipsis_input = tensor;
            r->ellipsis_axes = axis;
        }
    }
    for (; axis < tensor->rank && cursor < e->dims.text + e->dims.length; axis++) {
        int64_t number;
        const slice name = split_term(take_until(&cursor, ",]"), &number);
        cursor++;
        if (memchr(name.text, '|', (size_t)name.length) != NULL || name.text[name.length] == '/' ||
            find_symbol(r, name) != NULL || r->symbol_count == MAX_SYMBOLS)
            continue;
        r->symbols[r->symbol_count++] = (symbol){name, tensor->shape[axis] - number};
    }
}

/* Computes "K-1", "N|B" or "4". Returns false if none of its symbols has a value. */
static bool evaluate(const reader *r, slice term, int64_t *value)
{
    int64_t number;
    const slice names = split_term(term, &number);
    if (names.text[0] >= '0' && names.text[0] <= '9') {
        *value = strtoll(names.text, NULL, 10) + number;
        return true;
    }
    for (const char *cursor = names.text; cursor < names.text + names.length; cursor++) {
        const symbol *known = find_symbol(r, take_until(&cursor, "|+-/,]"));
        if (known != NULL) {
            *value = cot_add(known->value, number);
            if (names.text[names.length] == '/') {
                const int64_t divisor = strtoll(names.text + names.length + 1, NULL, 10);
                *value = cot_ceil_div(known->value, divisor);
            }
            return true;
        }
    }
    return false;
}

static cot_dtype output_dtype(const reader *r, slice name)
{
    const cot_tensor *first = cot_field_tensor(&r->direction->fields[0], r->args);
    if (name.length == 0)
        return first->dtype;
    for (int dtype = COT_F32; dtype <= COT_U8; dtype++)
        if (slice_equals(name, cot_dtype_name((cot_dtype)dtype)))
            return dtype == COT_F32 && first->dtype == COT_F64 ? COT_F64 : (cot_dtype)dtype;
    const cot_tensor *like = field_tensor(r, name);
    return like != NULL && cot_is_present(like) ? like->dtype : first->dtype;
}

static const char *shape_output(const reader *r, const char *name, const entry *e, cot_tensor *out, char *why,
                                size_t size)
{
    if (e->like.length > 0) {
        const cot_tensor *like = field_tensor(r, e->like);
        if (like == NULL || !cot_is_present(like)) {
            snprintf(why, size, "%s has the shape of %.*s, which is missing", name, e->like.length, e->like.text);
            return why;
        }
        *out = *like;
        out->data = NULL;
        out->dtype = e->dtype.length > 0 ? output_dtype(r, e->dtype) : like->dtype;
        return NULL;
    }
    int64_t shape[COT_MAX_RANK] = {0};
    int rank = 0, named_axes;
    const char *cursor;
    if (skip_ellipsis(e->dims, &cursor, &named_axes)) {
        if (r->ellipsis_input == NULL || r->ellipsis_axes + named_axes > COT_MAX_RANK) {
            snprintf(why, size, "%s has the axes of an input that is missing", name);
            return why;
        }
        rank = r->ellipsis_axes;
        memcpy(shape, r->ellipsis_input->shape, (size_t)rank * sizeof *shape);
    }
    for (; rank < COT_MAX_RANK && cursor < e->dims.text + e->dims.length; rank++) {
        const slice term = take_until(&cursor, ",]");
        cursor++;
        if (!evaluate(r, term, &shape[rank])) {
            snprintf(why, size, "%s has a size %.*s, which no input gives", name, term.length, term.text);
            return why;
        }
    }
    *out = cot_tensor_contiguous(NULL, output_dtype(r, e->dtype), rank, shape);
    return NULL;
}

const char *shape_outputs(const cot_direction *direction, void *args, uint32_t output_mask, char *why, size_t size)
{
    reader r = {.direction = direction, .args = args, .cursor = direction->signature};
    entry entries[COT_MAX_FIELDS];
    snprintf(why, size, "%s has no signature that matches its fields", direction->call);
    if (direction->signature == NULL)
        return why;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (!next_entry(&r, direction->fields[f].name, &entries[f]))
            return why;
        if (cot_is_present(tensor) && direction->fields[f].role != COT_OUTPUT && entries[f].like.length == 0)
            bind_symbols(&r, &entries[f], tensor);
    }
    if (*r.cursor != '\0')
        return why;
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (direction->fields[f].role == COT_OUTPUT && (output_mask >> f & 1) != 0 && !cot_is_present(tensor) &&
            shape_output(&r, direction->fields[f].name, &entries[f], tensor, why, size) != NULL)
            return why;
    }
    return NULL;
}

/* Returns whether the first of these axes is `batch`: either "B", or one of the alternatives as in "N|B,D". */
static bool begins_with(slice dims, slice batch)
{
    for (const char *cursor = dims.text; cursor < dims.text + dims.length; cursor++) {
        const slice name = take_until(&cursor, "|,]");
        if (name.length == batch.length && strncmp(name.text, batch.text, (size_t)name.length) == 0)
            return true;
        if (*cursor != '|')
            return false;
    }
    return false;
}

uint32_t batch_fields(const cot_direction *direction, const void *args, int64_t *items)
{
    reader r = {.direction = direction, .args = (void *)args, .cursor = direction->signature};
    entry entries[COT_MAX_FIELDS];
    uint32_t mask = 0;
    slice batch = {0};
    *items = 0;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], r.args);
        const char *cursor;
        int named_axes;
        if (!next_entry(&r, direction->fields[f].name, &entries[f]))
            return 0;
        for (int like = 0; like < f && entries[f].like.length > 0; like++)
            if (slice_equals(entries[f].like, direction->fields[like].name))
                entries[f].dims = entries[like].dims;
        const bool has_ellipsis = skip_ellipsis(entries[f].dims, &cursor, &named_axes);
        if (f == 0) {
            batch = (slice){entries[0].dims.text, (int)strcspn(entries[0].dims.text, ",]")};
            *items = cot_is_present(tensor) && tensor->rank > 0 ? tensor->shape[0] : 0;
        }
        /* "..." counts only if it represents an axis of this tensor */
        if (cot_is_present(tensor) && tensor->rank > 0 && tensor->shape[0] == *items &&
            begins_with(entries[f].dims, batch) && (!has_ellipsis || tensor->rank > named_axes))
            mask |= 1u << f;
    }
    return (mask & 1) != 0 ? mask : 0;
}

int call_sizes(const cot_direction *direction, const void *args, call_size sizes[MAX_CALL_SIZES])
{
    reader r = {.direction = direction, .args = (void *)args, .cursor = direction->signature};
    int count = 0;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], r.args);
        entry e;
        if (!next_entry(&r, direction->fields[f].name, &e))
            return 0;
        if (cot_is_present(tensor) && direction->fields[f].role != COT_OUTPUT && e.like.length == 0)
            bind_symbols(&r, &e, tensor);
    }
    for (int axis = 0; r.ellipsis_input != NULL && axis < r.ellipsis_axes; axis++, count++) {
        snprintf(sizes[count].name, sizeof sizes[count].name, "%d", axis);
        sizes[count].value = r.ellipsis_input->shape[axis];
    }
    for (int i = 0; i < r.symbol_count && count < MAX_CALL_SIZES; i++, count++) {
        snprintf(sizes[count].name, sizeof sizes[count].name, "%.*s", r.symbols[i].name.length, r.symbols[i].name.text);
        sizes[count].value = r.symbols[i].value;
    }
    return count;
}

/* Sets the sizes that the call's sizes determine. The other axes keep their sizes. */
static void resize_tensor(const reader *r, const entry *e, cot_tensor *tensor, const call_size *sizes, int count)
{
    const char *cursor;
    int axis = 0, named_axes;
    if (skip_ellipsis(e->dims, &cursor, &named_axes)) {
        const int ellipsis_axes = tensor->rank > named_axes ? tensor->rank - named_axes : 0;
        for (; axis < ellipsis_axes; axis++)
            for (int i = 0; i < count; i++)
                if (sizes[i].name[0] == '0' + axis)
                    tensor->shape[axis] = sizes[i].value;
    }
    for (; axis < tensor->rank && cursor < e->dims.text + e->dims.length; axis++) {
        const slice term = take_until(&cursor, ",]");
        cursor++;
        evaluate(r, term, &tensor->shape[axis]);
    }
}

void resize_call(const cot_direction *direction, void *args, const call_size *sizes, int count, bool broadcast_inputs)
{
    reader r = {.direction = direction, .args = args, .cursor = direction->signature};
    entry entries[COT_MAX_FIELDS];
    for (int i = 0; i < count && r.symbol_count < MAX_SYMBOLS; i++)
        r.symbols[r.symbol_count++] = (symbol){{sizes[i].name, (int)strlen(sizes[i].name)}, sizes[i].value};
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (!next_entry(&r, direction->fields[f].name, &entries[f]))
            return;
        for (int like = 0; like < f && entries[f].like.length > 0; like++)
            if (slice_equals(entries[f].like, direction->fields[like].name))
                entries[f].dims = entries[like].dims;
        if (!cot_is_present(tensor))
            continue;
        resize_tensor(&r, &entries[f], tensor, sizes, count);
        *tensor = cot_tensor_contiguous(NULL, tensor->dtype, tensor->rank, tensor->shape);
        if (broadcast_inputs && direction->fields[f].role == COT_INPUT)
            memset(tensor->stride, 0, sizeof tensor->stride);
    }
}
