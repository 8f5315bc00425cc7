/* SPDX-License-Identifier: Apache-2.0 */
#include "npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAGIC_SIZE = 6, MAX_HEADER = 1 << 16, MAX_DESCR = 16, ALIGNMENT = 64 };

static const unsigned char MAGIC[MAGIC_SIZE] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

/* descr without its byte order, and the dtype of its view */
static const struct {
    const char *descr;
    size_t item_size;
    cot_dtype dtype;
} DTYPES[] = {{"f4", 4, COT_F32}, {"f2", 2, COT_F16}, {"V2", 2, COT_BF16}, {"f8", 8, COT_F64},
              {"i4", 4, COT_I32}, {"i8", 8, COT_I32}, {"u1", 1, COT_U8},   {"b1", 1, COT_U8}};

/* ---- the header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } --------------------------- */

typedef struct parser {
    const char *path;
    io_error *error;
    const char *cursor, *end;
    io_array array;
    bool has_descr, has_order, has_shape, is_fortran;
} parser;

static void skip_space(parser *p)
{
    while (p->cursor < p->end && (*p->cursor == ' ' || *p->cursor == '\n' || *p->cursor == '\t'))
        p->cursor++;
}

/* Skips this character if it is next. */
static bool accept_char(parser *p, char c)
{
    skip_space(p);
    if (p->cursor == p->end || *p->cursor != c)
        return false;
    p->cursor++;
    return true;
}

/* The next character for messages, or '?' if it is not printable. */
static char printable_next(const parser *p)
{
    return p->cursor<p->end && * p->cursor> ' ' && *p->cursor < 0x7f ? *p->cursor : '?';
}

static bool expect_char(parser *p, char c)
{
    if (accept_char(p, c))
        return true;
    if (p->cursor == p->end)
        return io_fail(p->error, p->path, "the header ends where '%c' was expected", c);
    return io_fail(p->error, p->path, "the header has '%c' where '%c' was expected", printable_next(p), c);
}

/* Parses 'text' or "text". */
static bool parse_string(parser *p, const char **text, int *length)
{
    skip_space(p);
    const char quote = p->cursor < p->end ? *p->cursor : '\0';
    if (quote != '\'' && quote != '"')
        return expect_char(p, '\'');
    *text = ++p->cursor;
    while (p->cursor < p->end && *p->cursor != quote)
        p->cursor++;
    *length = (int)(p->cursor - *text);
    return expect_char(p, quote);
}

static bool parse_descr(parser *p)
{
    const char *text;
    int length;
    skip_space(p);
    if (p->cursor < p->end && (*p->cursor == '[' || *p->cursor == '('))
        return io_fail(p->error, p->path, "holds records (a structured dtype), expected one number an element");
    if (!parse_string(p, &text, &length))
        return false;
    for (size_t i = 0; length == 3 && i < sizeof DTYPES / sizeof *DTYPES; i++) {
        const bool is_big_endian = text[0] == '>';
        if (strchr("<=|>", text[0]) == NULL || strncmp(text + 1, DTYPES[i].descr, 2) != 0)
            continue;
        if (is_big_endian && DTYPES[i].dtype == COT_BF16)
            break; /* void bytes have no byte order */
        p->array.stored.dtype = DTYPES[i].dtype;
        p->array.item_size = DTYPES[i].item_size;
        p->array.is_big_endian = is_big_endian;
        return true;
    }
    return io_fail(p->error, p->path, "has dtype '%.*s', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1",
                   length < MAX_DESCR ? length : MAX_DESCR, text);
}

static bool parse_order(parser *p)
{
    static const char *const words[] = {"False", "True"};
    skip_space(p);
    for (int value = 0; value < 2; value++) {
        const size_t length = strlen(words[value]);
        if ((size_t)(p->end - p->cursor) >= length && memcmp(p->cursor, words[value], length) == 0) {
            p->cursor += length;
            p->is_fortran = value;
            return true;
        }
    }
    return io_fail(p->error, p->path, "fortran_order is neither True nor False");
}

static bool parse_size(parser *p, int64_t *size)
{
    const char *const first = p->cursor;
    *size = 0;
    for (; p->cursor < p->end && *p->cursor >= '0' && *p->cursor <= '9'; p->cursor++)
        if (__builtin_mul_overflow(*size, 10, size) || __builtin_add_overflow(*size, *p->cursor - '0', size))
            return io_fail(p->error, p->path, "shape has a size beyond 2^63");
    if (p->cursor > first)
        return true;
    return io_fail(p->error, p->path, "shape has '%c' where a size was expected", printable_next(p));
}

static bool parse_shape(parser *p)
{
    cot_tensor *stored = &p->array.stored;
    int64_t size;
    if (!expect_char(p, '('))
        return false;
    while (!accept_char(p, ')')) {
        if (!parse_size(p, &size))
            return false;
        if (stored->rank == COT_MAX_RANK)
            return io_fail(p->error, p->path, "has more than %d axes", COT_MAX_RANK);
        stored->shape[stored->rank++] = size;
        if (accept_char(p, ','))
            skip_space(p);
        else
            return expect_char(p, ')');
    }
    return true;
}

static bool parse_entry(parser *p)
{
    const struct {
        const char *name;
        bool *given;
        bool (*parse)(parser *);
    } entries[] = {{"descr", &p->has_descr, parse_descr},
                   {"fortran_order", &p->has_order, parse_order},
                   {"shape", &p->has_shape, parse_shape}};
    const char *text;
    int length;
    if (!parse_string(p, &text, &length) || !expect_char(p, ':'))
        return false;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if ((int)strlen(entries[i].name) != length || strncmp(entries[i].name, text, (size_t)length) != 0)
            continue;
        if (*entries[i].given)
            return io_fail(p->error, p->path, "the header has %s twice", entries[i].name);
        *entries[i].given = true;
        return entries[i].parse(p);
    }
    return io_fail(p->error, p->path, "the header has an entry '%.*s', expected descr, fortran_order and shape",
                   length < MAX_DESCR ? length : MAX_DESCR, text);
}

static bool parse_header(parser *p)
{
    if (!expect_char(p, '{'))
        return false;
    while (!accept_char(p, '}')) {
        if (!parse_entry(p))
            return false;
        if (!accept_char(p, ',')) {
            if (!expect_char(p, '}'))
                return false;
            break;
        }
    }
    skip_space(p);
    if (p->cursor < p->end)
        return io_fail(p->error, p->path, "the header goes on after its end with '%c'", printable_next(p));
    if (!p->has_descr || !p->has_order || !p->has_shape)
        return io_fail(p->error, p->path, "the header has no %s",
                       !p->has_descr   ? "descr"
                       : !p->has_order ? "fortran_order"
                                       : "shape");
    return true;
}

static void set_strides(parser *p)
{
    cot_tensor *stored = &p->array.stored;
    *stored = cot_tensor_contiguous(stored->data, stored->dtype, stored->rank, stored->shape);
    if (!p->is_fortran)
        return;
    int64_t stride = 1; /* the product fits: io_array_bytes has checked it */
    for (int axis = 0; axis < stored->rank; axis++) {
        stored->stride[axis] = stride;
        stride *= stored->shape[axis] > 1 ? stored->shape[axis] : 1;
    }
}

/* ---- the file ----------------------------------------------------------------------------------------- */

/* Checks the magic bytes and the version. Finds the header, and where the data begins in the file. */
static bool find_header(parser *p, const unsigned char *bytes, size_t size, size_t *data)
{
    if (size < MAGIC_SIZE || memcmp(bytes, MAGIC, MAGIC_SIZE) != 0)
        return io_fail(p->error, p->path, "is no .npy file");
    const size_t length_size = size > MAGIC_SIZE && bytes[MAGIC_SIZE] == 1 ? 2 : 4,
                 header_begin = MAGIC_SIZE + 2 + length_size;
    if (size < header_begin)
        return io_fail(p->error, p->path, "is cut off within the first %zu bytes", header_begin);
    const int major = bytes[MAGIC_SIZE], minor = bytes[MAGIC_SIZE + 1];
    if (major < 1 || major > 3 || minor != 0)
        return io_fail(p->error, p->path, "has version %d.%d, expected 1.0, 2.0 or 3.0", major, minor);
    size_t length = 0;
    for (size_t i = 0; i < length_size; i++)
        length |= (size_t)bytes[MAGIC_SIZE + 2 + i] << (8 * i);
    if (length > MAX_HEADER)
        return io_fail(p->error, p->path, "has a header of %zu bytes, expected at most %d", length, MAX_HEADER);
    if (length > size - header_begin)
        return io_fail(p->error, p->path, "is cut off in its header of %zu bytes", length);
    p->cursor = (const char *)bytes + header_begin;
    p->end = p->cursor + length;
    *data = header_begin + length;
    return true;
}

bool npy_parse(npy_file *file, const char *name, const void *bytes, size_t size, io_error *error)
{
    parser p = {.path = name, .error = error};
    size_t data = 0, needed;
    *file = (npy_file){0};
    if (!find_header(&p, bytes, size, &data) || !parse_header(&p))
        return false;
    if (!io_array_bytes(&p.array, &needed))
        return io_fail(error, name, "has a shape of more than 2^56 bytes");
    if (needed != size - data)
        return io_fail(error, name, "has a shape of %zu bytes, but %zu bytes of data", needed, size - data);
    p.array.stored.data = (unsigned char *)bytes + data;
    set_strides(&p);
    return io_view_array(&p.array, name, "it", &file->tensor, &file->owned, error);
}

bool npy_open(npy_file *file, const char *path, io_error *error)
{
    io_mapping mapping;
    *file = (npy_file){0};
    if (!io_map(&mapping, path, error))
        return false;
    const bool good = npy_parse(file, path, mapping.bytes, mapping.size, error);
    file->mapping = mapping;
    if (!good)
        npy_close(file);
    return good;
}

void npy_close(npy_file *file)
{
    free(file->owned);
    io_unmap(&file->mapping);
    *file = (npy_file){0};
}

/* ---- writing ------------------------------------------------------------------------------------------ */

static const char *descr_of(cot_dtype dtype)
{
    switch (dtype) {
    case COT_F32: return "<f4";
    case COT_F16: return "<f2";
    case COT_BF16: return "<V2";
    case COT_F64: return "<f8";
    case COT_I32: return "<i4";
    default: return "|u1";
    }
}

/* Writes version 1.0. Spaces before the final newline align the data to 64 bytes. */
static bool write_header(io_writer *writer, const cot_tensor *tensor, io_error *error)
{
    char header[4 * ALIGNMENT] = "";
    char shape[COT_MAX_RANK * 24] = "";
    const size_t first = MAGIC_SIZE + 4;
    for (int axis = 0; axis < tensor->rank; axis++)
        snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%" PRId64 "%s", axis > 0 ? " " : "",
                 tensor->shape[axis], axis + 1 < tensor->rank || tensor->rank == 1 ? "," : "");
    const size_t length = first + (size_t)snprintf(header + first, sizeof header - first,
                                                   "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }",
                                                   descr_of(tensor->dtype), shape);
    const size_t total = (length + 1 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memcpy(header, MAGIC, MAGIC_SIZE);
    header[MAGIC_SIZE] = 1;
    header[MAGIC_SIZE + 2] = (char)((total - first) & 0xff);
    header[MAGIC_SIZE + 3] = (char)((total - first) >> 8);
    memset(header + length, ' ', total - length - 1);
    header[total - 1] = '\n';
    return io_write(writer, header, total, error);
}

bool npy_prepare(io_writer *writer, const char *path, const cot_tensor *tensor, io_error *error)
{
    if (!io_open(writer, path, error))
        return false;
    if (write_header(writer, tensor, error) && io_write_tensor(writer, tensor, error))
        return true;
    io_abandon(writer);
    return false;
}

bool npy_write(const char *path, const cot_tensor *tensor, io_error *error)
{
    io_writer writer;
    return npy_prepare(&writer, path, tensor, error) && io_publish(&writer, 1, error);
}
