/* SPDX-License-Identifier: Apache-2.0
 * test_philox.c: compares core/philox.h with the known answers of Philox's authors and with their library. Compares the
 * draws of dropout with the rule in cotangent/dropout.h. */
#include "support.h"

#include "core/philox.h"

#include <Random123/philox.h>

static void known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < COUNT(known); i++) {
        uint32_t out[4];
        cot_philox4x32_10(known[i].counter, known[i].key, out);
        assert_memory_equal(out, known[i].answer, sizeof out);
    }
}

static philox4x32_ctr_t random123(uint64_t key, uint64_t low, uint64_t high)
{
    const philox4x32_ctr_t counter = {{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)}};
    const philox4x32_key_t k = {{(uint32_t)key, (uint32_t)(key >> 32)}};
    return philox4x32(counter, k);
}

static void agrees_with_random123(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int i = 0; i < 100000; i++) {
        const uint64_t low = cot_draw(&seed), high = cot_draw(&seed), key_bits = cot_draw(&seed);
        const uint32_t counter[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
        const uint32_t key[2] = {(uint32_t)key_bits, (uint32_t)(key_bits >> 32)};
        const philox4x32_ctr_t theirs = random123(key_bits, low, high);
        uint32_t ours[4];
        cot_philox4x32_10(counter, key, ours);
        for (int word = 0; word < 4; word++)
            assert_int_equal(ours[word], theirs.v[word]);
    }
}

/* The rule of the header, computed from the words of Random123. */
static void groups_take_halves_in_order(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int round = 0; round < 2000; round++) {
        const uint64_t key = cot_draw(&seed), offset = cot_draw(&seed), i = cot_draw(&seed);
        const uint32_t threshold = (uint32_t)random_int(&seed, 1, 65535);
        const philox4x32_ctr_t w = random123(key, offset, i);
        const uint32_t keep = cot_dropout_keep(key, offset, i, threshold);
        for (int column = 0; column < 8; column++) {
            const uint32_t draw = column % 2 == 0 ? w.v[column / 2] & 0xffff : w.v[column / 2] >> 16;
            assert_int_equal(keep >> column & 1, draw >= threshold);
        }
        assert_true(keep < 256);
    }
}

static void thresholds_round(void **state)
{
    (void)state;
    assert_int_equal(cot_dropout_threshold(0), 0);
    assert_int_equal(cot_dropout_threshold(1), 65536);
    assert_int_equal(cot_dropout_threshold(0.5), 32768);
    assert_int_equal(cot_dropout_threshold(0.1), 6554); /* 6553.6 */
    assert_int_equal(cot_dropout_threshold(0.4 / 65536), 0);
    assert_int_equal(cot_dropout_threshold(0.6 / 65536), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(agrees_with_random123),
        cmocka_unit_test(groups_take_halves_in_order),
        cmocka_unit_test(thresholds_round),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
