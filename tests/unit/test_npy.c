/* SPDX-License-Identifier: Apache-2.0
 *
 * test_npy.c: tests the reader and the writer of .npy files, on valid and invalid files. tests/tools/test_run.py tests
 * the same reader with files that NumPy wrote. */
#include "io_folder.h"

#include "io/npy.h"

static image npy_image(int version, const char *header, const void *data, size_t size)
{
    image i = image_of(8, version == 1 ? 2 : 4, header, data, size);
    memcpy(i.bytes, "\x93NUMPY", 6);
    i.bytes[6] = (unsigned char)version;
    i.bytes[7] = 0;
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

static void npy_reads_every_dtype(void **state)
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

static void npy_reads_shapes_versions_and_spellings(void **state)
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

/* A file that is cut at any byte is refused. A file with any byte changed is refused or read, without an access
 * outside of its memory. */
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
            assert_null(file.owned); /* a view of the file's bytes */
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

/* Rows with gaps between them, and more elements than the writer's buffer holds. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(npy_reads_every_dtype),
        cmocka_unit_test(npy_reads_shapes_versions_and_spellings),
        cmocka_unit_test(npy_refuses_by_name),
        cmocka_unit_test(npy_refuses_files_that_are_none),
        cmocka_unit_test(npy_survives_every_cut_and_change),
        IN_FOLDER(npy_writes_what_it_reads),
        IN_FOLDER(npy_gathers_large_strided_tensors),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
