/* SPDX-License-Identifier: Apache-2.0
 *
 * test_safetensors.c: tests the reader and the writer of .safetensors files, on valid and invalid files. */
#include "io_folder.h"

#include "io/safetensors.h"

static image safetensors_image(const char *header, const void *data, size_t size)
{
    return image_of(0, 8, header, data, size);
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
    /* Nesting as deep as the length limit of a header allows. */
    enum { DEPTH = 1 << 20 };
    char *deep = malloc(5 + DEPTH + 1);
    memcpy(deep, "{\"a\":", 5);
    memset(deep + 5, '[', DEPTH);
    deep[5 + DEPTH] = '\0';
    safetensors_refuses(safetensors_image(deep, NULL, 0),
                        "f: its header is no JSON that can be read: maximum parsing depth reached near '['");
    free(deep);
}

static void safetensors_reads_valid_files(void **state)
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_refuses_by_name),   cmocka_unit_test(safetensors_refuses_files_that_are_none),
        cmocka_unit_test(safetensors_reads_valid_files), cmocka_unit_test(safetensors_survives_every_cut_and_change),
        IN_FOLDER(safetensors_writes_what_it_reads),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
