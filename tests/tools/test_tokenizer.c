/* SPDX-License-Identifier: Apache-2.0
 * test_tokenizer.c: the parts of the trainer's tokenizer: UTF-8, the names of bytes, words, merges, training. */
#include "../../examples/train_lm/byte_map.h"
#include "../../examples/train_lm/tokenizer_train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void expect_repaired(const char *text, const char *expected)
{
    const char *repaired;
    size_t bytes;
    assert_true(utf8_repair(text, strlen(text), &repaired, &bytes));
    assert_int_equal(bytes, strlen(expected));
    assert_memory_equal(repaired, expected, bytes);
    if (repaired != text)
        free((void *)(uintptr_t)repaired);
}

#define FFFD "\xef\xbf\xbd"

/* The replaced sequences are those of table 3-8 of the Unicode standard. */
static void test_utf8(void **state)
{
    (void)state;
    expect_repaired("a\u00e9\u65e5\U0001f642", "a\u00e9\u65e5\U0001f642");
    expect_repaired("\x80"
                    "b\xff",
                    FFFD "b" FFFD);
    expect_repaired("\xe6\x97"
                    "b",
                    FFFD "b");
    expect_repaired("\xe6\x97", FFFD);
    expect_repaired("\xc0\xaf", FFFD FFFD);
    expect_repaired("\xe0\x80\xaf", FFFD FFFD FFFD);
    expect_repaired("\xed\xa0\x80", FFFD FFFD FFFD);
    expect_repaired("\xf4\x91\x92\x93", FFFD FFFD FFFD FFFD);
    expect_repaired("\xf0\x9f\x99"
                    "a",
                    FFFD "a");
}

static void test_names(void **state)
{
    (void)state;
    char name[513], bytes[257], all[256];
    token_name("a \n\x7f\xad\xff", 6, name);
    assert_string_equal(name, "a\u0120\u010a\u0121\u0143\u00ff");
    for (int i = 0; i < 256; i++)
        all[i] = (char)i;
    token_name(all, 256, name);
    assert_int_equal(token_bytes(name, bytes), 256);
    assert_memory_equal(bytes, all, 256);
    assert_int_equal(token_bytes("a b", bytes), -1);
    assert_int_equal(token_bytes("\u0144", bytes), -1);
    assert_int_equal(token_bytes("\u65e5", bytes), -1);
}

static bool join(void *context, const char *word, size_t bytes)
{
    char *joined = context;
    sprintf(joined + strlen(joined), "[%.*s]", (int)bytes, word);
    return true;
}

static void test_words(void **state)
{
    (void)state;
    static const char TEXT[] = "I'll  see 12 \u65e5\u672c!!\n\n x\u00a0 '";
    char joined[200] = "";
    io_error error;
    word_splitter *s = word_splitter_create(WORDS_OF_GPT2, "test", &error);
    assert_non_null(s);
    assert_true(word_splitter_each(s, "test", TEXT, strlen(TEXT), join, joined, &error));
    assert_string_equal(joined, "[I]['ll][ ][ see][ 12][ \u65e5\u672c][!!][\n\n][ x][\u00a0][ ']");
    word_splitter_destroy(s);
    s = word_splitter_create("b\\s", "test", &error); /* text between matches is a word; U+180E is no space */
    joined[0] = '\0';
    assert_true(word_splitter_each(s, "test", "ab cb\u180e", 9 - 1, join, joined, &error));
    assert_string_equal(joined, "[a][b ][cb\u180e]");
    word_splitter_destroy(s);
    assert_null(word_splitter_create("(", "test", &error));
}

static void test_byte_map(void **state)
{
    (void)state;
    byte_map map = {0};
    char key[16];
    assert_null(byte_map_find(&map, "a", 1));
    for (int i = 0; i < 10000; i++) {
        const int length = sprintf(key, "%d", i);
        *byte_map_add(&map, key, (size_t)length, -1) += i;
    }
    assert_int_equal(map.count, 10000);
    for (int i = 0; i < 10000; i++) {
        const int length = sprintf(key, "%d", i);
        assert_int_equal(*byte_map_find(&map, key, (size_t)length), i - 1);
    }
    assert_int_equal(*byte_map_add(&map, "7", 1, 0), 6);
    byte_map_clear(&map);
    assert_null(byte_map_find(&map, "7", 1));
    byte_map_free(&map);
}

/* Words: "ab" 3 times, "abc" twice, "bc" 5 times, "yx", "xy". Pairs: ab 5, bc 7. After the merge of bc: ab 3, a+bc 2. Of xy and yx,
 * which occur once each, xy has the smaller ids. */
static void test_training(void **state)
{
    (void)state;
    static const char TEXT[] = "yx\nxy\nab\nab\nab\nabc\nabc\nbc\nbc\nbc\nbc\nbc<end>";
    char folder[] = "/tmp/test_tokenizer_XXXXXX", path[64];
    io_error error;
    io_writer writer;
    byte_map counts = {0};
    token_ids ids = {0};
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    word_splitter *s = word_splitter_create(WORDS_OF_GPT2, "test", &error);
    assert_true(count_words(&counts, s, "test", TEXT, strlen(TEXT) - 5, &error));
    assert_true(io_open(&writer, path, &error));
    assert_true(tokenizer_train(&counts, 261, "<end>", path, &writer, &error));
    assert_true(io_publish(&writer, 1, &error));
    word_splitter_destroy(s);
    byte_map_free(&counts);

    tokenizer *t = tokenizer_open(path, &error);
    assert_non_null(t);
    assert_int_equal(tokenizer_size(t), 261);
    assert_int_equal(tokenizer_find(t, "<end>"), 0);
    assert_int_equal(tokenizer_find(t, "!"), 1);
    assert_int_equal(tokenizer_find(t, "bc"), 257);
    assert_int_equal(tokenizer_find(t, "ab"), 258);
    assert_int_equal(tokenizer_find(t, "abc"), 259);
    assert_int_equal(tokenizer_find(t, "xy"), 260);
    for (int repeat = 0; repeat < 2; repeat++) { /* the second time from the cache */
        ids.count = 0;
        assert_true(tokenizer_encode(t, "test", "abcab<end>bcc", 13, &ids, &error));
        assert_int_equal(ids.count, 5);
        assert_memory_equal(ids.ids, ((int32_t[]){259, 258, 0, 257, tokenizer_find(t, "c")}), 5 * sizeof(int32_t));
    }
    size_t bytes;
    assert_memory_equal(tokenizer_bytes(t, 259, &bytes), "abc", 3);
    assert_int_equal(bytes, 3);
    tokenizer_bytes(t, 261, &bytes);
    assert_int_equal(bytes, 0);
    tokenizer_close(t);
    free(ids.ids);
    unlink(path);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),     cmocka_unit_test(test_names),    cmocka_unit_test(test_words),
        cmocka_unit_test(test_byte_map), cmocka_unit_test(test_training),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
