/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include "json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* jansson uses up to about 50 bytes for each byte of a header, so this also bounds the memory. */
enum { LENGTH_SIZE = 8, MAX_HEADER = 16 << 20, MAX_PRINTED_NAME = 80 };

static const char METADATA[] = "__metadata__";

static const struct {
    const char *name;
    size_t item_size;
    cot_dtype dtype;
} DTYPES[] = {{"F32", 4, COT_F32}, {"F16", 2, COT_F16}, {"BF16", 2, COT_BF16}, {"F64", 8, COT_F64},
              {"I32", 4, COT_I32}, {"I64", 8, COT_I32}, {"U8", 1, COT_U8},     {"BOOL", 1, COT_U8}};

/* ---- the header --------------------------------------------------------------------------------------- */

/* A tensor's name in messages, cut to MAX_PRINTED_NAME bytes. */
#define TENSOR_FORMAT "tensor \"%.*s\""
#define TENSOR_NAME(name) MAX_PRINTED_NAME, name

static bool read_shape(const char *path, safetensors_entry *entry, const json_t *shape, io_error *error)
{
    cot_tensor *stored = &entry->array.stored;
    int64_t sizes[COT_MAX_RANK] = {0};
    if (!json_is_array(shape))
        return io_fail(error, path, TENSOR_FORMAT " has no shape", TENSOR_NAME(entry->name));
    const size_t rank = json_array_size(shape);
    for (size_t axis = 0; axis < rank; axis++) {
        const json_t *size = json_array_get(shape, axis);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return io_fail(error, path, TENSOR_FORMAT " has a shape that is not of whole numbers >= 0",
                           TENSOR_NAME(entry->name));
        if (axis < COT_MAX_RANK)
            sizes[axis] = json_integer_value(size);
    }
    if (rank > COT_MAX_RANK) {
        entry->refusal = "has too many axes";
        return true;
    }
    *stored = cot_tensor_contiguous(NULL, stored->dtype, (int)rank, sizes);
    return true;
}

static bool read_offsets(const char *path, safetensors_entry *entry, const json_t *offsets, size_t data_size,
                         io_error *error)
{
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return io_fail(error, path, TENSOR_FORMAT " has no data_offsets of two whole numbers",
                       TENSOR_NAME(entry->name));
    const json_int_t first = json_integer_value(begin), last = json_integer_value(end);
    if (first < 0 || last < first || (uint64_t)last > data_size)
        return io_fail(error, path,
                       TENSOR_FORMAT " has data_offsets %" PRId64 " to %" PRId64 ", but there are %zu bytes of data",
                       TENSOR_NAME(entry->name), (int64_t)first, (int64_t)last, data_size);
    entry->begin = (size_t)first;
    entry->end = (size_t)last;
    return true;
}

/* The bytes of the shape must be the bytes between the offsets. */
static bool check_bytes(const char *path, safetensors_entry *entry, io_error *error)
{
    size_t needed;
    if (entry->refusal != NULL)
        return true;
    if (!io_array_bytes(&entry->array, &needed))
        return io_fail(error, path, TENSOR_FORMAT " has a shape of more than 2^56 bytes", TENSOR_NAME(entry->name));
    if (needed != entry->end - entry->begin)
        return io_fail(error, path, TENSOR_FORMAT " has a shape of %zu bytes, but data_offsets of %zu",
                       TENSOR_NAME(entry->name), needed, entry->end - entry->begin);
    return true;
}

static bool read_entry(const char *path, safetensors_entry *entry, const json_t *value, size_t data_size,
                       io_error *error)
{
    entry->dtype = json_string_value(json_object_get(value, "dtype"));
    if (entry->dtype == NULL)
        return io_fail(error, path, TENSOR_FORMAT " has no dtype", TENSOR_NAME(entry->name));
    entry->refusal = "has a dtype that this program has not";
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++) {
        if (strcmp(DTYPES[i].name, entry->dtype) != 0)
            continue;
        entry->array.stored.dtype = DTYPES[i].dtype;
        entry->array.item_size = DTYPES[i].item_size;
        entry->refusal = NULL;
    }
    return read_shape(path, entry, json_object_get(value, "shape"), error) &&
           read_offsets(path, entry, json_object_get(value, "data_offsets"), data_size, error) &&
           check_bytes(path, entry, error);
}

static bool check_metadata(const char *path, json_t *metadata, io_error *error)
{
    const char *key;
    json_t *value;
    if (metadata != NULL && !json_is_object(metadata))
        return io_fail(error, path, "__metadata__ is no object");
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return io_fail(error, path, "__metadata__ \"%.*s\" is no text", TENSOR_NAME(key));
    }
    return true;
}

static int compare_offsets(const void *a, const void *b)
{
    const safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end != y->end ? (x->end < y->end ? -1 : 1) : strcmp(x->name, y->name);
}

/* The tensors must follow each other without gaps, from the first byte to the last. */
static bool check_offsets(const safetensors_file *file, size_t data_size, io_error *error)
{
    size_t next = 0;
    for (int i = 0; i < file->count; i++) {
        const safetensors_entry *entry = &file->entries[i];
        if (entry->begin < next)
            return io_fail(error, file->path, TENSOR_FORMAT " overlaps the one before it", TENSOR_NAME(entry->name));
        if (entry->begin > next)
            return io_fail(error, file->path, "%zu bytes before " TENSOR_FORMAT " belong to no tensor",
                           entry->begin - next, TENSOR_NAME(entry->name));
        next = entry->end;
    }
    return next == data_size || io_fail(error, file->path, "the last %zu bytes belong to no tensor", data_size - next);
}

static bool read_header(safetensors_file *file, const char *text, size_t length, const unsigned char *data,
                        size_t data_size, io_error *error)
{
    const char *name;
    json_t *value;
    if (length == 0 || text[0] != '{')
        return io_fail(error, file->path, "is no .safetensors file: its header does not begin with '{'");
    file->header = io_read_json(text, length, file->path, "its header", error);
    if (file->header == NULL)
        return false;
    if (!check_metadata(file->path, json_object_get(file->header, METADATA), error))
        return false;
    file->entries = calloc(json_object_size(file->header) + 1, sizeof *file->entries);
    if (file->entries == NULL)
        return io_no_memory(error, file->path, "for its header");
    json_object_foreach(file->header, name, value)
    {
        if (strcmp(name, METADATA) == 0)
            continue;
        safetensors_entry *entry = &file->entries[file->count++];
        entry->name = name;
        if (!read_entry(file->path, entry, value, data_size, error))
            return false;
        entry->array.stored.data = (unsigned char *)data + entry->begin;
    }
    qsort(file->entries, (size_t)file->count, sizeof *file->entries, compare_offsets);
    return check_offsets(file, data_size, error);
}

/* ---- the file ----------------------------------------------------------------------------------------- */

bool safetensors_parse(safetensors_file *file, const char *name, const void *bytes, size_t size, io_error *error)
{
    *file = (safetensors_file){.path = strdup(name)};
    const unsigned char *file_bytes = bytes;
    uint64_t length = 0;
    if (file->path == NULL)
        return io_no_memory(error, name, "for its name");
    bool good = size >= LENGTH_SIZE || io_fail(error, name, "is cut off within the first %d bytes", LENGTH_SIZE);
    for (int i = 0; good && i < LENGTH_SIZE; i++)
        length |= (uint64_t)file_bytes[i] << (8 * i);
    if (good && length > MAX_HEADER)
        good = io_fail(error, name, "has a header of %" PRIu64 " bytes, expected at most %d", length, MAX_HEADER);
    if (good && length > size - LENGTH_SIZE)
        good = io_fail(error, name, "is cut off in its header of %" PRIu64 " bytes", length);
    good = good && read_header(file, (const char *)file_bytes + LENGTH_SIZE, length, file_bytes + LENGTH_SIZE + length,
                               size - LENGTH_SIZE - length, error);
    if (!good)
        safetensors_close(file);
    return good;
}

bool safetensors_open(safetensors_file *file, const char *path, io_error *error)
{
    io_mapping mapping;
    *file = (safetensors_file){0};
    if (!io_map(&mapping, path, error))
        return false;
    const bool good = safetensors_parse(file, path, mapping.bytes, mapping.size, error);
    file->mapping = mapping;
    if (!good)
        safetensors_close(file);
    return good;
}

void safetensors_close(safetensors_file *file)
{
    for (int i = 0; i < file->count; i++)
        free(file->entries[i].owned);
    free(file->entries);
    json_decref(file->header);
    free(file->path);
    io_unmap(&file->mapping);
    *file = (safetensors_file){0};
}

int safetensors_find(const safetensors_file *file, const char *name)
{
    for (int i = 0; i < file->count; i++)
        if (strcmp(file->entries[i].name, name) == 0)
            return i;
    return -1;
}

bool safetensors_get(safetensors_file *file, int number, cot_tensor *view, io_error *error)
{
    safetensors_entry *entry = &file->entries[number];
    char what[MAX_PRINTED_NAME + 16];
    snprintf(what, sizeof what, TENSOR_FORMAT, TENSOR_NAME(entry->name));
    if (entry->refusal != NULL)
        return io_fail(error, file->path, "%s (%.*s) %s", what, MAX_PRINTED_NAME, entry->dtype, entry->refusal);
    if (entry->view.dtype == COT_DTYPE_NONE &&
        !io_view_array(&entry->array, file->path, what, &entry->view, &entry->owned, error)) {
        entry->view = (cot_tensor){0};
        return false;
    }
    *view = entry->view;
    return true;
}

bool safetensors_get_named(safetensors_file *file, const char *name, cot_tensor *view, io_error *error)
{
    const int number = safetensors_find(file, name);
    if (number < 0)
        return io_fail(error, file->path, "has no " TENSOR_FORMAT, TENSOR_NAME(name));
    return safetensors_get(file, number, view, error);
}

const char *safetensors_metadata(const safetensors_file *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, METADATA), key));
}

/* ---- writing ------------------------------------------------------------------------------------------ */

static size_t tensor_bytes(const cot_tensor *tensor)
{
    size_t bytes = cot_dtype_size(tensor->dtype);
    for (int axis = 0; axis < tensor->rank; axis++)
        bytes *= (size_t)tensor->shape[axis];
    return bytes;
}

static const char *dtype_name(cot_dtype dtype)
{
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (DTYPES[i].dtype == dtype)
            return DTYPES[i].name;
    return "?";
}

/* Calls visit for every item, in order of falling element size. */
static bool each_item(const safetensors_item *items, int count, bool (*visit)(void *, const safetensors_item *),
                      void *context)
{
    for (size_t size = 8; size > 0; size /= 2)
        for (int i = 0; i < count; i++)
            if (cot_dtype_size(items[i].tensor.dtype) == size && !visit(context, &items[i]))
                return false;
    return true;
}

typedef struct header_builder {
    json_t *header;
    size_t end;
} header_builder;

static bool describe_item(void *context, const safetensors_item *item)
{
    header_builder *builder = context;
    const size_t begin = builder->end;
    if (strcmp(item->name, METADATA) == 0 || json_object_get(builder->header, item->name) != NULL)
        return false;
    json_t *shape = json_array();
    for (int axis = 0; axis < item->tensor.rank; axis++)
        json_array_append_new(shape, json_integer(item->tensor.shape[axis]));
    builder->end += tensor_bytes(&item->tensor);
    return json_object_set_new(builder->header, item->name,
                               json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtype_name(item->tensor.dtype), "shape", shape,
                                         "data_offsets", (json_int_t)begin, (json_int_t)builder->end)) == 0;
}

static char *make_header(const safetensors_item *items, int count, const char *const *metadata)
{
    header_builder builder = {.header = json_object()};
    bool good = builder.header != NULL;
    if (good && metadata != NULL && metadata[0] != NULL) {
        json_t *texts = json_object();
        for (const char *const *pair = metadata; good && pair[0] != NULL; pair += 2)
            good = json_object_set_new(texts, pair[0], json_string(pair[1])) == 0;
        good = json_object_set_new(builder.header, METADATA, texts) == 0 && good;
    }
    good = good && each_item(items, count, describe_item, &builder);
    char *text = good ? json_dumps(builder.header, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(builder.header);
    return text;
}

static bool write_length_and_header(io_writer *writer, const char *header, io_error *error)
{
    static const char spaces[LENGTH_SIZE + 1] = "        ";
    const size_t length = strlen(header), padding = (LENGTH_SIZE - length % LENGTH_SIZE) % LENGTH_SIZE;
    unsigned char prefix[LENGTH_SIZE];
    for (int i = 0; i < LENGTH_SIZE; i++)
        prefix[i] = (unsigned char)((uint64_t)(length + padding) >> (8 * i));
    return io_write(writer, prefix, sizeof prefix, error) && io_write(writer, header, length, error) &&
           io_write(writer, spaces, padding, error);
}

typedef struct item_writer {
    io_writer *writer;
    io_error *error;
} item_writer;

static bool write_item(void *context, const safetensors_item *item)
{
    const item_writer *to = context;
    return io_write_tensor(to->writer, &item->tensor, to->error);
}

bool safetensors_prepare(io_writer *writer, const char *path, const safetensors_item *items, int count,
                         const char *const *metadata, io_error *error)
{
    io_json_begin();
    char *header = make_header(items, count, metadata);
    *writer = (io_writer){.fd = -1};
    if (!io_json_end()) {
        free(header);
        return io_no_memory(error, path, "for its header");
    }
    if (header == NULL)
        return io_fail(error, path,
                       "the names cannot be written: one of them comes twice, is __metadata__ or is no UTF-8");
    item_writer to = {writer, error};
    bool good = io_open(writer, path, error);
    if (good) {
        good = write_length_and_header(writer, header, error) && each_item(items, count, write_item, &to);
        if (!good)
            io_abandon(writer);
    }
    free(header);
    return good;
}

bool safetensors_write(const char *path, const safetensors_item *items, int count, const char *const *metadata,
                       io_error *error)
{
    io_writer writer;
    return safetensors_prepare(&writer, path, items, count, metadata, error) && io_publish(&writer, 1, error);
}
