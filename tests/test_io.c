/* SPDX-License-Identifier: Apache-2.0
 *
 * test_io.c: the readers and writers of src/io: what is served, what is refused and how, that a file is written whole
 * or not at all. tests/test_run.py holds the same readers against files that NumPy wrote. */
#include "support.h"

#include "io/npy.h"
#include "io/safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a folder of their own ------------------------------------------------------------------------------ */

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/cotangent-io-XXXXXX");
    return mkdtemp(folder) == NULL;
}

/* The names in the folder but "." and "..", and a line of them. */
static int list_folder(char *names, size_t size)
{
    DIR *directory = opendir(folder);
    int count = 0;
    names[0] = '\0';
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        if (count++ > 0)
            strncat(names, " ", size - strlen(names) - 1);
        strncat(names, entry->d_name, size - strlen(names) - 1);
    }
    closedir(directory);
    return count;
}

static const char *in_folder(const char *name)
{
    static char paths[4][160];
    static int next;
    next = (next + 1) % 4;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

static int empty_folder(void **state)
{
    (void)state;
    DIR *directory = opendir(folder);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (entry->d_name[0] != '.' && unlinkat(dirfd(directory), entry->d_name, 0) != 0)
            unlinkat(dirfd(directory), entry->d_name, AT_REMOVEDIR);
    return closedir(directory);
}

static int remove_folder(void **state)
{
    empty_folder(state);
    return rmdir(folder);
}

static void write_bytes(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static size_t read_bytes(const char *path, void *bytes, size_t size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    const size_t got = fread(bytes, 1, size, file);
    fclose(file);
    return got;
}

/* ---- .npy ------------------------------------------------------------------------------------------------ */

/* A file in memory of its own, so that the sanitizer sees a read behind its end. */
typedef struct image {
    unsigned char *bytes;
    size_t size;
} image;

static image npy_image(int version, const char *header, const void *data, size_t size)
{
    const size_t length = strlen(header), prefix = version == 1 ? 10 : 12;
    image i = {malloc(prefix + length + size), prefix + length + size};
    memcpy(i.bytes, "\x93NUMPY", 6);
    i.bytes[6] = (unsigned char)version;
    i.bytes[7] = 0;
    for (size_t b = 8; b < prefix; b++)
        i.bytes[b] = (unsigned char)(length >> (8 * (b - 8)));
    memcpy(i.bytes + prefix, header, length);
    if (size > 0)
        memcpy(i.bytes + prefix + length, data, size);
    return i;
}

static void npy_refuses(image i, const char *message)
{
    npy_file file;
    io_error error;
    if (npy_parse(&file, "f", i.bytes, i.size, &error))
        fail_msg("served, expected \"%s\"", message);
    assert_string_equal(error.text, message);
    free(i.bytes);
}

#define HEADER(descr, order, shape) "{'descr': " descr ", 'fortran_order': " order ", 'shape': " shape ", }"

static void npy_serves_every_dtype(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        unsigned char data[8];
        cot_dtype dtype;
        unsigned char served[8];
    } all[] = {
        {HEADER("'<f4'", "False", "()"), {1, 2, 3, 4}, COT_F32, {1, 2, 3, 4}},
        {HEADER("'=f4'", "False", "()"), {1, 2, 3, 4}, COT_F32, {1, 2, 3, 4}},
        {HEADER("'>f4'", "False", "()"), {1, 2, 3, 4}, COT_F32, {4, 3, 2, 1}},
        {HEADER("'<f2'", "False", "()"), {1, 2}, COT_F16, {1, 2}},
        {HEADER("'>f2'", "False", "()"), {1, 2}, COT_F16, {2, 1}},
        {HEADER("'<V2'", "False", "()"), {1, 2}, COT_BF16, {1, 2}},
        {HEADER("'|V2'", "False", "()"), {1, 2}, COT_BF16, {1, 2}},
        {HEADER("'<f8'", "False", "()"), {1, 2, 3, 4, 5, 6, 7, 8}, COT_F64, {1, 2, 3, 4, 5, 6, 7, 8}},
        {HEADER("'>f8'", "False", "()"), {1, 2, 3, 4, 5, 6, 7, 8}, COT_F64, {8, 7, 6, 5, 4, 3, 2, 1}},
        {HEADER("'<i4'", "False", "()"), {1, 2, 3, 4}, COT_I32, {1, 2, 3, 4}},
        {HEADER("'>i4'", "False", "()"), {1, 2, 3, 4}, COT_I32, {4, 3, 2, 1}},
        {HEADER("'<i8'", "False", "()"), {1, 2, 3, 4}, COT_I32, {1, 2, 3, 4}},
        {HEADER("'<i8'", "False", "()"), {1, 2, 3, 0xff, 255, 255, 255, 255}, COT_I32, {1, 2, 3, 0xff}},
        {HEADER("'>i8'", "False", "()"), {0, 0, 0, 0, 1, 2, 3, 4}, COT_I32, {4, 3, 2, 1}},
        {HEADER("'|u1'", "False", "()"), {7}, COT_U8, {7}},
        {HEADER("'|b1'", "False", "()"), {1}, COT_U8, {1}},
    };
    for (size_t k = 0; k < COUNT(all); k++) {
        const size_t size = strstr(all[k].header, "8'") != NULL ? 8 : cot_dtype_size(all[k].dtype);
        image i = npy_image(1, all[k].header, all[k].data, size);
        npy_file file;
        io_error error;
        if (!npy_parse(&file, "f", i.bytes, i.size, &error))
            fail_msg("%s", error.text);
        assert_int_equal(file.tensor.dtype, all[k].dtype);
        assert_int_equal(file.tensor.rank, 0);
        assert_memory_equal(file.tensor.data, all[k].served, cot_dtype_size(all[k].dtype));
        assert_int_equal((uintptr_t)file.tensor.data % cot_dtype_size(all[k].dtype), 0);
        npy_close(&file);
        free(i.bytes);
    }
}

static void npy_serves_shapes_versions_and_spellings(void **state)
{
    (void)state;
    static const struct {
        int version;
        const char *header;
        int rank;
        int64_t shape[COT_MAX_RANK], stride[COT_MAX_RANK];
    } all[] = {
        {1, HEADER("'<f4'", "False", "(2, 3)"), 2, {2, 3}, {3, 1}},
        {2, HEADER("'<f4'", "False", "(2, 3)"), 2, {2, 3}, {3, 1}},
        {3, HEADER("'<f4'", "False", "(2, 3)"), 2, {2, 3}, {3, 1}},
        {1, HEADER("'<f4'", "True", "(2, 3)"), 2, {2, 3}, {1, 2}},
        {1, HEADER("'>f4'", "True", "(2, 3)"), 2, {2, 3}, {1, 2}},
        {1, HEADER("'<f4'", "True", "(3, 1, 2)"), 3, {3, 1, 2}, {1, 3, 3}},
        {1, HEADER("'<f4'", "False", "(6,)"), 1, {6}, {1}},
        {1, HEADER("'<f4'", "False", "(1, 1, 1, 2, 3, 1)"), 6, {1, 1, 1, 2, 3, 1}, {6, 6, 6, 3, 1, 1}},
        {1, HEADER("'<f4'", "False", "(2, 0, 3)"), 3, {2, 0, 3}, {3, 3, 1}},
        {1, HEADER("'<f4'", "True", "(2, 0, 3)"), 3, {2, 0, 3}, {1, 2, 2}},
        {1, "{\"shape\":(2,3),\"fortran_order\":False,\"descr\":\"<f4\"}   \n", 2, {2, 3}, {3, 1}},
        {1, " {'shape': (2, 3,), 'fortran_order': False, 'descr': '<f4' , }\n", 2, {2, 3}, {3, 1}},
    };
    static const float data[6] = {1, 2, 3, 4, 5, 6};
    for (size_t k = 0; k < COUNT(all); k++) {
        const bool is_empty = all[k].shape[1] == 0 && all[k].rank > 1;
        image i = npy_image(all[k].version, all[k].header, data, is_empty ? 0 : sizeof data);
        npy_file file;
        io_error error;
        if (!npy_parse(&file, "f", i.bytes, i.size, &error))
            fail_msg("%s: %s", all[k].header, error.text);
        assert_int_equal(file.tensor.rank, all[k].rank);
        assert_memory_equal(file.tensor.shape, all[k].shape, sizeof all[k].shape);
        assert_memory_equal(file.tensor.stride, all[k].stride, sizeof all[k].stride);
        npy_close(&file);
        free(i.bytes);
    }
}

static void npy_refuses_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *header, *message;
    } all[] = {
        {"", "f: the header ends where '{' was expected"},
        {"{", "f: the header ends where ''' was expected"},
        {"[1]", "f: the header has '[' where '{' was expected"},
        {"{}", "f: the header has no descr"},
        {"{'descr': '<f4'}", "f: the header has no fortran_order"},
        {"{'descr': '<f4', 'fortran_order': False}", "f: the header has no shape"},
        {"{'descr': '<f4', 'descr': '<f4'}", "f: the header has descr twice"},
        {"{'descr' '<f4'}", "f: the header has ''' where ':' was expected"},
        {"{'descr': '<f4", "f: the header ends where ''' was expected"},
        {"{'descr': '<f4' 'shape': ()}", "f: the header has ''' where '}' was expected"},
        {"{'descr': 4}", "f: the header has '4' where ''' was expected"},
        {"{'what': 4}", "f: the header has an entry 'what', expected descr, fortran_order and shape"},
        {"{'fortran_order': Maybe}", "f: fortran_order is neither True nor False"},
        {HEADER("'<f4'", "False", "()") "x", "f: the header goes on after its end with 'x'"},
        {HEADER("'<f4'", "False", "()") "\1", "f: the header goes on after its end with '?'"},
        {HEADER("'<c8'", "False", "()"), "f: has dtype '<c8', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1"},
        {HEADER("'<u8'", "False", "()"), "f: has dtype '<u8', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1"},
        {HEADER("'|O'", "False", "()"), "f: has dtype '|O', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1"},
        {HEADER("'>V2'", "False", "()"), "f: has dtype '>V2', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1"},
        {HEADER("'<f4\n\33[2J'", "False", "()"),
         "f: has dtype '<f4??[2J', expected one of f4 f8 f2 V2 (bf16) i4 i8 u1 b1"},
        {HEADER("[('a', '<f4')]", "False", "()"),
         "f: holds records (a structured dtype), expected one number an element"},
        {HEADER("'<f4'", "False", "(-1,)"), "f: shape has '-' where a size was expected"},
        {HEADER("'<f4'", "False", "(,)"), "f: shape has ',' where a size was expected"},
        {HEADER("'<f4'", "False", "(1.5,)"), "f: the header has '.' where ')' was expected"},
        {HEADER("'<f4'", "False", "5"), "f: the header has '5' where '(' was expected"},
        {HEADER("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1)"), "f: has more than 6 axes"},
        {HEADER("'<f4'", "False", "(9223372036854775808,)"), "f: shape has a size beyond 2^63"},
        {HEADER("'<f4'", "False", "(9223372036854775807,)"), "f: has a shape of more than 2^56 bytes"},
        {HEADER("'<f4'", "False", "(18014398509481984,)"), "f: has a shape of more than 2^56 bytes"},
        {HEADER("'<f4'", "False", "(4294967296, 4294967296)"), "f: has a shape of more than 2^56 bytes"},
        {HEADER("'<f4'", "False", "(0, 4294967296, 4294967296)"), "f: has a shape of more than 2^56 bytes"},
        {HEADER("'<f4'", "False", "(3,)"), "f: has a shape of 12 bytes, but 8 bytes of data"},
        {HEADER("'<f4'", "False", "(1000000000,)"), "f: has a shape of 4000000000 bytes, but 8 bytes of data"},
        {HEADER("'<f4'", "False", "()"), "f: has a shape of 4 bytes, but 8 bytes of data"},
        {HEADER("'<f4'", "False", "(0,)"), "f: has a shape of 0 bytes, but 8 bytes of data"},
        {HEADER("'<i8'", "False", "()"), "f: it holds the int64 2147483648 (element 0), which no i32 can be"},
    };
    static const unsigned char data[8] = {0, 0, 0, 0x80};
    for (size_t k = 0; k < COUNT(all); k++)
        npy_refuses(npy_image(1, all[k].header, data, sizeof data), all[k].message);
    static const unsigned char low[8] = {255, 255, 255, 0x7f, 255, 255, 255, 255};
    npy_refuses(npy_image(1, HEADER("'<i8'", "False", "()"), low, sizeof low),
                "f: it holds the int64 -2147483649 (element 0), which no i32 can be");
}

static void npy_refuses_files_that_are_none(void **state)
{
    (void)state;
    const char *const good = HEADER("'<f4'", "False", "()");
    image i = {malloc(1), 0};
    npy_refuses(i, "f: is no .npy file");
    i = npy_image(1, good, NULL, 0);
    i.bytes[3] = 'm';
    npy_refuses(i, "f: is no .npy file");
    i = npy_image(4, good, NULL, 0);
    npy_refuses(i, "f: has version 4.0, expected 1.0, 2.0 or 3.0");
    i = npy_image(1, good, NULL, 0);
    i.bytes[7] = 1;
    npy_refuses(i, "f: has version 1.1, expected 1.0, 2.0 or 3.0");
    i = npy_image(2, good, NULL, 0);
    i.bytes[11] = 1;
    npy_refuses(i, "f: has a header of 16777271 bytes, expected at most 65536");
    i = npy_image(1, good, NULL, 0);
    i.bytes[9] = 255;
    npy_refuses(i, "f: is cut off in its header of 65335 bytes");
}

/* Cut anywhere: refused. Any byte changed to anything: refused or served, within its memory. */
static void npy_survives_every_cut_and_change(void **state)
{
    (void)state;
    static const float data[6] = {1, 2, 3, 4, 5, 6};
    const image whole = npy_image(1, HEADER("'<f4'", "False", "(2, 3)"), data, sizeof data);
    npy_file file;
    io_error error;
    for (size_t size = 0; size < whole.size; size++) {
        unsigned char *cut = malloc(size + 1);
        memcpy(cut, whole.bytes, size);
        cut = realloc(cut, size > 0 ? size : 1);
        assert_false(npy_parse(&file, "f", cut, size, &error));
        assert_true(strlen(error.text) > 3 && strchr(error.text, '\n') == NULL);
        free(cut);
    }
    for (size_t at = 0; at < whole.size - sizeof data; at++) {
        for (int value = 0; value < 256; value++) {
            const unsigned char before = whole.bytes[at];
            whole.bytes[at] = (unsigned char)value;
            if (npy_parse(&file, "f", whole.bytes, whole.size, &error))
                npy_close(&file);
            else
                assert_true(strlen(error.text) > 3 && strchr(error.text, '\n') == NULL);
            whole.bytes[at] = before;
        }
    }
    free(whole.bytes);
}

static void npy_writes_what_it_reads(void **state)
{
    (void)state;
    static const cot_dtype dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64, COT_I32, COT_U8};
    unsigned char data[24 * 8];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(7 * i + 3);
    for (size_t d = 0; d < COUNT(dtypes); d++) {
        const size_t size = cot_dtype_size(dtypes[d]);
        for (int rank = 0; rank <= 4; rank++) {
            const int64_t shape[4] = {2, 3, 1, 4};
            cot_tensor tensor = cot_tensor_contiguous(data, dtypes[d], rank, shape), reversed = tensor;
            int64_t elements = 1;
            for (int axis = 0; axis < rank; axis++) {
                reversed.stride[axis] = elements; /* Fortran order */
                elements *= shape[axis];
            }
            io_error error;
            npy_file file;
            if (!npy_write(in_folder("a.npy"), &tensor, &error) || !npy_open(&file, in_folder("a.npy"), &error))
                fail_msg("%s", error.text);
            assert_int_equal(file.tensor.dtype, dtypes[d]);
            assert_int_equal(file.tensor.rank, rank);
            assert_memory_equal(file.tensor.shape, tensor.shape, sizeof tensor.shape);
            assert_memory_equal(file.tensor.data, data, (size_t)elements * size);
            assert_null(file.owned); /* the file's own bytes */
            assert_int_equal((uintptr_t)file.tensor.data % 64, 0);
            npy_close(&file);
            assert_true(npy_write(in_folder("a.npy"), &reversed, &error) &&
                        npy_open(&file, in_folder("a.npy"), &error));
            for (int64_t n = 0; n < elements; n++) {
                int64_t position = 0, rest = n;
                for (int axis = rank - 1; axis >= 0; axis--) {
                    position += rest % shape[axis] * reversed.stride[axis];
                    rest /= shape[axis];
                }
                assert_memory_equal((char *)file.tensor.data + (size_t)n * size, data + (size_t)position * size, size);
            }
            npy_close(&file);
        }
    }
    char names[256];
    list_folder(names, sizeof names);
    assert_string_equal(names, "a.npy");
}

/* Rows whose strides leave gaps, and more elements than the writer's buffer holds. */
static void npy_gathers_large_strided_tensors(void **state)
{
    (void)state;
    enum { ROWS = 301, COLUMNS = 127, PITCH = 130 };
    float *data = malloc(ROWS * PITCH * sizeof *data);
    for (int i = 0; i < ROWS * PITCH; i++)
        data[i] = (float)i;
    cot_tensor tensor = cot_tensor_contiguous(data + 1, COT_F32, 2, SHAPE(ROWS, COLUMNS));
    tensor.stride[0] = PITCH;
    io_error error;
    npy_file file;
    assert_true(npy_write(in_folder("a.npy"), &tensor, &error) && npy_open(&file, in_folder("a.npy"), &error));
    for (int row = 0; row < ROWS; row++)
        assert_memory_equal((float *)file.tensor.data + row * COLUMNS, data + 1 + row * PITCH, COLUMNS * sizeof *data);
    npy_close(&file);
    free(data);
}

/* ---- .safetensors -------------------------------------------------------------------------------------------- */

static image safetensors_image(const char *header, const void *data, size_t size)
{
    const size_t length = strlen(header);
    image i = {malloc(8 + length + size), 8 + length + size};
    for (size_t b = 0; b < 8; b++)
        i.bytes[b] = (unsigned char)((uint64_t)length >> (8 * b));
    memcpy(i.bytes + 8, header, length);
    if (size > 0)
        memcpy(i.bytes + 8 + length, data, size);
    return i;
}

static void safetensors_refuses(image i, const char *message)
{
    safetensors_file file;
    io_error error;
    if (safetensors_parse(&file, "f", i.bytes, i.size, &error))
        fail_msg("served, expected \"%s\"", message);
    assert_string_equal(error.text, message);
    free(i.bytes);
}

#define TENSOR(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void safetensors_refuses_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *header, *message;
    } all[] = {
        {"", "f: is no .safetensors file: its header does not begin with '{'"},
        {"[]", "f: is no .safetensors file: its header does not begin with '{'"},
        {"{", "f: its header is no JSON that can be read: string or '}' expected near end of file"},
        {"{}x", "f: its header is no JSON that can be read: end of file expected near 'x'"},
        {"{}", "f: the last 8 bytes belong to no tensor"},
        {"{\"a\":1}", "f: tensor \"a\" has no dtype"},
        {"{\"a\":{}}", "f: tensor \"a\" has no dtype"},
        {"{\"a\":{\"dtype\":\"F32\"}}", "f: tensor \"a\" has no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", "f: tensor \"a\" has no data_offsets of two whole numbers"},
        {"{" TENSOR("a", "F32", "[1.5]", 0, 8) "}", "f: tensor \"a\" has a shape that is not of whole numbers >= 0"},
        {"{" TENSOR("a", "F32", "[-2]", 0, 8) "}", "f: tensor \"a\" has a shape that is not of whole numbers >= 0"},
        {"{" TENSOR("a", "F32", "[2]", 0, 9) "}",
         "f: tensor \"a\" has data_offsets 0 to 9, but there are 8 bytes of data"},
        {"{" TENSOR("a", "F32", "[2]", -1, 8) "}",
         "f: tensor \"a\" has data_offsets -1 to 8, but there are 8 bytes of data"},
        {"{" TENSOR("a", "F32", "[2]", 8, 0) "}",
         "f: tensor \"a\" has data_offsets 8 to 0, but there are 8 bytes of data"},
        {"{" TENSOR("a", "F32", "[2]", 0, 9223372036854775807) "}",
         "f: tensor \"a\" has data_offsets 0 to 9223372036854775807, but there are 8 bytes of data"},
        {"{" TENSOR("a", "F32", "[2]", 0, 9223372036854775808) "}",
         "f: its header is no JSON that can be read: too big integer near '9223372036854775808'"},
        {"{" TENSOR("a", "F32", "[1]", 0, 8) "}", "f: tensor \"a\" has a shape of 4 bytes, but data_offsets of 8"},
        {"{" TENSOR("a", "F32", "[1000000]", 0, 8) "}",
         "f: tensor \"a\" has a shape of 4000000 bytes, but data_offsets of 8"},
        {"{" TENSOR("a", "F32", "[4294967296,4294967296]", 0, 8) "}",
         "f: tensor \"a\" has a shape of more than 2^56 bytes"},
        {"{" TENSOR("a", "F32", "[1]", 0, 4) "}", "f: the last 4 bytes belong to no tensor"},
        {"{" TENSOR("a", "F32", "[1]", 4, 8) "}", "f: 4 bytes before tensor \"a\" belong to no tensor"},
        {"{" TENSOR("a", "F32", "[2]", 0, 8) "," TENSOR("b", "F32", "[1]", 4, 8) "}",
         "f: tensor \"b\" overlaps the one before it"},
        {"{" TENSOR("a", "F32", "[1]", 0, 4) "," TENSOR("a", "F32", "[1]", 4, 8) "}",
         "f: its header is no JSON that can be read: duplicate object key near '\"a\"'"},
        {"{" TENSOR("a", "F32", "[2]", 0, 8) ",\"__metadata__\":3}", "f: __metadata__ is no object"},
        {"{" TENSOR("a", "F32", "[2]", 0, 8) ",\"__metadata__\":{\"k\":3}}", "f: __metadata__ \"k\" is no text"},
        {"{" TENSOR("a\\n\\u001b[2J", "F32", "[1]", 0, 8) "}",
         "f: tensor \"a??[2J\" has a shape of 4 bytes, but data_offsets of 8"},
        {"{\"\xff\":1}", "f: its header is no JSON that can be read: unable to decode byte 0xff near '\"'"},
        {"{\"\\u0000\":1}",
         "f: its header is no JSON that can be read: NUL byte in object key not supported near '\"\\u0000\"'"},
    };
    static const unsigned char data[8] = {0};
    for (size_t k = 0; k < COUNT(all); k++)
        safetensors_refuses(safetensors_image(all[k].header, data, sizeof data), all[k].message);
}

static void safetensors_refuses_files_that_are_none(void **state)
{
    (void)state;
    image i = {malloc(1), 0};
    safetensors_refuses(i, "f: is cut off within the first 8 bytes");
    i = safetensors_image("{}", NULL, 0);
    i.bytes[0] = 3;
    safetensors_refuses(i, "f: is cut off in its header of 3 bytes");
    i = safetensors_image("{}", NULL, 0);
    i.bytes[7] = 255;
    safetensors_refuses(i, "f: has a header of 18374686479671623682 bytes, expected at most 16777216");
    /* As deep as a header may be long. */
    enum { DEPTH = 1 << 20 };
    char *deep = malloc(5 + DEPTH + 1);
    memcpy(deep, "{\"a\":", 5);
    memset(deep + 5, '[', DEPTH);
    deep[5 + DEPTH] = '\0';
    safetensors_refuses(safetensors_image(deep, NULL, 0),
                        "f: its header is no JSON that can be read: maximum parsing depth reached near '['");
    free(deep);
}

static void safetensors_serves_what_it_can(void **state)
{
    (void)state;
    const char *const header = "{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("wide", "I64", "[2]", 3, 19) "," TENSOR(
        "b", "U8", "[3]", 0,
        3) "," TENSOR("odd", "F32", "[]", 19,
                      23) "," TENSOR("empty", "BF16", "[2,0]", 23,
                                     23) "," TENSOR("big", "I64", "[1]", 23,
                                                    31) "," TENSOR("f8", "F8_E4M3", "[9]", 31,
                                                                   32) "," TENSOR("deep", "U8", "[1,1,1,1,1,1,1]", 32,
                                                                                  33) "," TENSOR("flag", "BOOL", "[1]",
                                                                                                 33, 34) "}";
    unsigned char data[34] = {1,   2,   3,   5,   0,   0,   0,   0, 0, 0,    0,   254,
                              255, 255, 255, 255, 255, 255, 255, 0, 0, 0x80, 0x3f};
    data[30] = 1;
    data[33] = 1;
    image i = safetensors_image(header, data, sizeof data);
    safetensors_file file;
    io_error error;
    if (!safetensors_parse(&file, "f", i.bytes, i.size, &error))
        fail_msg("%s", error.text);
    cot_tensor t;
    assert_int_equal(file.count, 8);
    assert_string_equal(file.entries[0].name, "b");
    assert_string_equal(safetensors_metadata(&file, "format"), "pt");
    assert_null(safetensors_metadata(&file, "other"));
    assert_int_equal(safetensors_find(&file, "__metadata__"), -1);
    assert_true(safetensors_get_named(&file, "wide", &t, &error));
    assert_int_equal(t.dtype, COT_I32);
    assert_memory_equal(t.data, ((int32_t[]){5, -2}), 8);
    cot_tensor again;
    assert_true(safetensors_get_named(&file, "wide", &again, &error));
    assert_ptr_equal(t.data, again.data);
    assert_true(safetensors_get_named(&file, "odd", &t, &error)); /* misaligned, so copied */
    assert_int_equal((uintptr_t)t.data % 4, 0);
    assert_true(*(float *)t.data == 1.0f);
    assert_true(safetensors_get_named(&file, "empty", &t, &error));
    assert_int_equal(t.dtype, COT_BF16);
    assert_int_equal(t.shape[1], 0);
    assert_true(safetensors_get_named(&file, "flag", &t, &error));
    assert_int_equal(t.dtype, COT_U8);
    assert_false(safetensors_get_named(&file, "big", &t, &error));
    assert_string_equal(error.text,
                        "f: tensor \"big\" holds the int64 72057594037927936 (element 0), which no i32 can be");
    assert_false(safetensors_get_named(&file, "f8", &t, &error));
    assert_string_equal(error.text, "f: tensor \"f8\" (F8_E4M3) has a dtype that this program has not");
    assert_false(safetensors_get_named(&file, "deep", &t, &error));
    assert_string_equal(error.text, "f: tensor \"deep\" (U8) has too many axes");
    assert_false(safetensors_get_named(&file, "nope", &t, &error));
    assert_string_equal(error.text, "f: has no tensor \"nope\"");
    safetensors_close(&file);
    free(i.bytes);
}

static void safetensors_survives_every_cut_and_change(void **state)
{
    (void)state;
    static const unsigned char data[12] = {1};
    const image whole = safetensors_image(
        "{\"__metadata__\":{\"k\":\"v\"}," TENSOR("a", "F32", "[2]", 0, 8) "," TENSOR("b", "F16", "[2,1]", 8, 12) "}",
        data, sizeof data);
    safetensors_file file;
    io_error error;
    for (size_t size = 0; size < whole.size; size++) {
        unsigned char *cut = malloc(size > 0 ? size : 1);
        memcpy(cut, whole.bytes, size);
        assert_false(safetensors_parse(&file, "f", cut, size, &error));
        assert_true(strlen(error.text) > 3 && strchr(error.text, '\n') == NULL);
        free(cut);
    }
    for (size_t at = 0; at < whole.size - sizeof data; at++) {
        for (int value = 0; value < 256; value++) {
            const unsigned char before = whole.bytes[at];
            whole.bytes[at] = (unsigned char)value;
            if (safetensors_parse(&file, "f", whole.bytes, whole.size, &error)) {
                cot_tensor t;
                for (int i = 0; i < file.count; i++)
                    safetensors_get(&file, i, &t, &error);
                safetensors_close(&file);
            } else {
                assert_true(strlen(error.text) > 3 && strchr(error.text, '\n') == NULL);
            }
            whole.bytes[at] = before;
        }
    }
    free(whole.bytes);
}

static void safetensors_writes_what_it_reads(void **state)
{
    (void)state;
    static const unsigned char bytes[5] = {1, 2, 3, 4, 5};
    static const double wide[2] = {0.1, -2};
    static const uint16_t halves[6] = {1, 2, 3, 4, 5, 6};
    safetensors_item items[] = {
        {"bytes", cot_tensor_contiguous((void *)bytes, COT_U8, 1, SHAPE(5))},
        {"layer \"0\"/\xc3\xa9", cot_tensor_contiguous((void *)halves, COT_BF16, 2, SHAPE(2, 3))},
        {"wide", cot_tensor_contiguous((void *)wide, COT_F64, 1, SHAPE(2))},
        {"scalar", cot_tensor_contiguous((void *)wide, COT_F32, 0, NULL)},
        {"none", cot_tensor_contiguous(NULL, COT_F16, 2, SHAPE(0, 7))},
    };
    items[1].tensor.stride[0] = 1, items[1].tensor.stride[1] = 2;
    const char *const metadata[] = {"step", "12", "note", "two\nlines", NULL};
    safetensors_file file;
    io_error error;
    if (!safetensors_write(in_folder("a.safetensors"), items, COUNT(items), metadata, &error) ||
        !safetensors_open(&file, in_folder("a.safetensors"), &error))
        fail_msg("%s", error.text);
    assert_int_equal(file.count, COUNT(items));
    assert_string_equal(safetensors_metadata(&file, "step"), "12");
    assert_string_equal(safetensors_metadata(&file, "note"), "two\nlines");
    cot_tensor t;
    for (size_t k = 0; k < COUNT(items); k++) {
        assert_true(safetensors_get_named(&file, items[k].name, &t, &error));
        assert_int_equal(t.dtype, items[k].tensor.dtype);
        assert_int_equal(t.rank, items[k].tensor.rank);
        assert_memory_equal(t.shape, items[k].tensor.shape, sizeof t.shape);
        assert_null(file.entries[safetensors_find(&file, items[k].name)].owned); /* aligned: views of the file */
    }
    assert_true(safetensors_get_named(&file, "wide", &t, &error));
    assert_memory_equal(t.data, wide, sizeof wide);
    assert_true(safetensors_get_named(&file, items[1].name, &t, &error));
    assert_memory_equal(t.data, ((uint16_t[]){1, 3, 5, 2, 4, 6}), sizeof halves);
    safetensors_close(&file);

    static const char *const wrong[] = {"wide", "__metadata__", "\xff"};
    for (size_t k = 0; k < COUNT(wrong); k++) {
        items[0].name = wrong[k];
        assert_false(safetensors_write(in_folder("b.safetensors"), items, COUNT(items), metadata, &error));
        assert_non_null(strstr(error.text, "the names cannot be written"));
    }
    char names[256];
    list_folder(names, sizeof names);
    assert_string_equal(names, "a.safetensors");
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static void what_is_no_file_is_refused(void **state)
{
    (void)state;
    npy_file file;
    io_error error;
    assert_false(npy_open(&file, in_folder("missing"), &error));
    assert_non_null(strstr(error.text, "/missing: No such file or directory"));
    assert_false(npy_open(&file, folder, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file"));
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    assert_false(npy_open(&file, in_folder("pipe"), &error));
    assert_non_null(strstr(error.text, "/pipe: is a pipe, expected a regular file"));
    assert_false(npy_open(&file, "/dev/null", &error));
    assert_string_equal(error.text, "/dev/null: is a device, expected a regular file");
    write_bytes(in_folder("empty"), "", 0);
    assert_false(npy_open(&file, in_folder("empty"), &error));
    assert_non_null(strstr(error.text, "/empty: is no .npy file"));
    safetensors_file tensors;
    assert_false(safetensors_open(&tensors, folder, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file"));
    assert_false(safetensors_open(&tensors, in_folder("empty"), &error));
    assert_non_null(strstr(error.text, "/empty: is cut off within the first 8 bytes"));
}

static void names_in_messages_are_one_line(void **state)
{
    (void)state;
    npy_file file;
    io_error error;
    char path[1001];
    memset(path, 'p', 1000);
    path[1000] = '\0';
    assert_false(npy_open(&file, path, &error));
    assert_non_null(strstr(error.text, "ppp: File name too long"));
    assert_memory_equal(error.text, "...ppp", 6);
    assert_false(npy_open(&file, "a\nb\33[2J", &error));
    assert_string_equal(error.text, "a?b?[2J: No such file or directory");
}

static const float NEW[2] = {3, 4};

static cot_tensor two_floats(void)
{
    return cot_tensor_contiguous((void *)NEW, COT_F32, 1, SHAPE(2));
}

static void what_cannot_be_written_is_refused(void **state)
{
    (void)state;
    const cot_tensor t = two_floats();
    io_error error;
    char names[256];
    assert_false(npy_write("", &t, &error));
    assert_string_equal(error.text, "\"\": is no file name");
    assert_false(npy_write(folder, &t, &error));
    assert_non_null(strstr(error.text, ": is a directory, expected a regular file or none"));
    assert_false(npy_write("/dev/full", &t, &error));
    assert_string_equal(error.text, "/dev/full: is a device, expected a regular file or none");
    assert_false(npy_write(in_folder("missing/a.npy"), &t, &error));
    assert_non_null(strstr(error.text, "missing/a.npy: cannot be written: No such file or directory"));
    assert_int_equal(list_folder(names, sizeof names), 0);
    assert_int_equal(mkfifo(in_folder("a.npy.partial"), 0600), 0);
    assert_false(npy_write(in_folder("a.npy"), &t, &error));
    assert_non_null(strstr(error.text, "a.npy.partial: is in the way: it is a pipe"));
}

/* A partial file that somebody was killed over is written over; one that lives is left alone. */
static void partial_files_of_others(void **state)
{
    (void)state;
    const cot_tensor t = two_floats();
    io_error error;
    char names[256], text[64];
    write_bytes(in_folder("a.npy.partial"),
                "left behind, and longer than the file that comes after it is going to be: "
                "........................................................................",
                146);
    assert_true(npy_write(in_folder("a.npy"), &t, &error));
    npy_file file;
    assert_true(npy_open(&file, in_folder("a.npy"), &error));
    npy_close(&file);
    list_folder(names, sizeof names);
    assert_string_equal(names, "a.npy");

    write_bytes(in_folder("b.npy.partial"), "alive", 5);
    const int fd = open(in_folder("b.npy.partial"), O_RDWR);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_false(npy_write(in_folder("b.npy"), &t, &error));
    assert_non_null(strstr(error.text, "b.npy: another process is writing it"));
    close(fd);
    assert_int_equal(read_bytes(in_folder("b.npy.partial"), text, sizeof text), 5);
}

/* Runs out of room after `room` bytes, as on a full disk. */
static bool write_with_room(rlim_t room, bool (*write)(io_error *), io_error *error)
{
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){room, before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const bool good = write(error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    return good;
}

enum { LARGE = 100000 };

static cot_tensor large(void)
{
    static float data[LARGE];
    return cot_tensor_contiguous(data, COT_F32, 1, SHAPE(LARGE));
}

static bool write_large_npy(io_error *error)
{
    const cot_tensor t = large();
    return npy_write(in_folder("a"), &t, error);
}

static bool write_large_safetensors(io_error *error)
{
    const safetensors_item item = {"a", large()};
    return safetensors_write(in_folder("a"), &item, 1, NULL, error);
}

static void a_full_disk_leaves_the_old_file(void **state)
{
    (void)state;
    bool (*const writers[])(io_error *) = {write_large_npy, write_large_safetensors};
    static const rlim_t rooms[] = {0, 5, 64, 100, 4096, 399999};
    for (size_t w = 0; w < COUNT(writers); w++) {
        for (size_t r = 0; r < COUNT(rooms); r++) {
            io_error error;
            char names[256], text[16];
            write_bytes(in_folder("a"), "the old one", 11);
            assert_false(write_with_room(rooms[r], writers[w], &error));
            assert_non_null(strstr(error.text, "/a: cannot be written: File too large"));
            assert_int_equal(read_bytes(in_folder("a"), text, sizeof text), 11);
            assert_memory_equal(text, "the old one", 11);
            list_folder(names, sizeof names);
            assert_string_equal(names, "a");
        }
        io_error error;
        char text[16];
        assert_true(write_with_room(500000, writers[w], &error));
        assert_int_equal(read_bytes(in_folder("a"), text, sizeof text), sizeof text);
        assert_memory_not_equal(text, "the old one", 11);
    }
}

/* ---- several files at once ----------------------------------------------------------------------------------------- */

static void prepare_three(io_writer writers[3])
{
    const cot_tensor t = two_floats();
    io_error error;
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++)
        if (!npy_prepare(&writers[i], in_folder(names[i]), &t, &error))
            fail_msg("%s", error.text);
}

static void several_files_are_published_together(void **state)
{
    (void)state;
    io_writer writers[3];
    io_error error;
    npy_file file;
    char names[256], text[16];
    write_bytes(in_folder("b"), "old", 3);
    prepare_three(writers);
    assert_int_equal(read_bytes(in_folder("b"), text, sizeof text), 3);
    assert_int_equal(list_folder(names, sizeof names), 4); /* three partial ones and the old b */
    assert_true(io_publish(writers, 3, &error));
    assert_int_equal(list_folder(names, sizeof names), 3);
    assert_true(npy_open(&file, in_folder("b"), &error));
    assert_memory_equal(file.tensor.data, NEW, sizeof NEW);
    npy_close(&file);
}

static void or_none_of_them(void **state)
{
    (void)state;
    io_writer writers[3];
    io_error error;
    char names[256], text[16];
    write_bytes(in_folder("b"), "old", 3); /* a is new, b replaced, c cannot be put in place */
    prepare_three(writers);
    assert_int_equal(unlink(in_folder("c.partial")), 0);
    assert_false(io_publish(writers, 3, &error));
    assert_non_null(strstr(error.text, "/c: cannot be put in place: No such file or directory"));
    list_folder(names, sizeof names);
    assert_string_equal(names, "b");
    assert_int_equal(read_bytes(in_folder("b"), text, sizeof text), 3);
    assert_memory_equal(text, "old", 3);
}

static void abandoned_files_are_gone(void **state)
{
    (void)state;
    io_writer writers[3];
    char names[256];
    prepare_three(writers);
    for (int i = 0; i < 3; i++) {
        io_abandon(&writers[i]);
        io_abandon(&writers[i]); /* harmless */
    }
    assert_int_equal(list_folder(names, sizeof names), 0);
}

/* A file that is mapped stays readable while it is replaced. */
static void replacing_a_mapped_file(void **state)
{
    (void)state;
    static const float old[2] = {1, 2};
    const cot_tensor before = cot_tensor_contiguous((void *)old, COT_F32, 1, SHAPE(2)), after = two_floats();
    io_error error;
    npy_file file;
    assert_true(npy_write(in_folder("a"), &before, &error) && npy_open(&file, in_folder("a"), &error));
    assert_true(npy_write(in_folder("a"), &after, &error));
    assert_memory_equal(file.tensor.data, old, sizeof old);
    npy_close(&file);
}

#define IN_FOLDER(test) cmocka_unit_test_teardown(test, empty_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(npy_serves_every_dtype),
        cmocka_unit_test(npy_serves_shapes_versions_and_spellings),
        cmocka_unit_test(npy_refuses_by_name),
        cmocka_unit_test(npy_refuses_files_that_are_none),
        cmocka_unit_test(npy_survives_every_cut_and_change),
        IN_FOLDER(npy_writes_what_it_reads),
        IN_FOLDER(npy_gathers_large_strided_tensors),
        cmocka_unit_test(safetensors_refuses_by_name),
        cmocka_unit_test(safetensors_refuses_files_that_are_none),
        cmocka_unit_test(safetensors_serves_what_it_can),
        cmocka_unit_test(safetensors_survives_every_cut_and_change),
        IN_FOLDER(safetensors_writes_what_it_reads),
        IN_FOLDER(what_is_no_file_is_refused),
        cmocka_unit_test(names_in_messages_are_one_line),
        IN_FOLDER(what_cannot_be_written_is_refused),
        IN_FOLDER(partial_files_of_others),
        IN_FOLDER(a_full_disk_leaves_the_old_file),
        IN_FOLDER(several_files_are_published_together),
        IN_FOLDER(or_none_of_them),
        IN_FOLDER(abandoned_files_are_gone),
        IN_FOLDER(replacing_a_mapped_file),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
