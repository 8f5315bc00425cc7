/* SPDX-License-Identifier: Apache-2.0
 *
 * execute.c: the instructions of the kernels, as the documents "CDNA3 Instruction Set Architecture" and "CDNA2" define
 * them, the waves of a block, and the checks of emulator.h. */
#include "emulator.h"

#include "core/float16.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef const emu_instruction instruction;
typedef uint32_t lanes32[EMU_LANES];

/* ---- stops ----------------------------------------------------------------------------------------- */

__attribute__((noreturn, format(printf, 4, 5))) static void stop(emu_wave *w, const emu_instruction *i, int lane,
                                                                 const char *format, ...)
{
    emu_block *b = w->block;
    char what[200], place[32] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    if (lane >= 0)
        snprintf(place, sizeof place, ", lane %d", lane);
    snprintf(b->message, sizeof b->message, "%s stopped at 0x%llx, block %u,%u,%u, wave %d%s: %s: %s", b->kernel->name,
             (unsigned long long)i->address, b->number[0], b->number[1], b->number[2], w->number, place, i->text, what);
    longjmp(b->stop, 1);
}

/* ---- registers ------------------------------------------------------------------------------------- */

static uint64_t scalar_pair(const emu_wave *w, int index)
{
    return w->s[index] | (uint64_t)w->s[index + 1] << 32;
}

static void set_scalar_pair(emu_wave *w, int index, uint64_t value)
{
    w->s[index] = (uint32_t)value;
    w->s[index + 1] = (uint32_t)(value >> 32);
}

static uint64_t exec_mask(const emu_wave *w)
{
    return scalar_pair(w, EMU_EXEC);
}

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A subnormal becomes a zero of the same sign. */
static float flush(float value)
{
    return fpclassify(value) == FP_SUBNORMAL ? copysignf(0.0f, value) : value;
}

static uint32_t scalar_source(emu_wave *w, instruction *i, int k)
{
    const emu_operand *o = &i->operand[k];
    if (o->kind == EMU_SCALAR)
        return w->s[o->index];
    if (o->kind != EMU_CONSTANT)
        stop(w, i, -1, "operand %d is not scalar", k);
    return (uint32_t)o->value;
}

static uint64_t scalar_source_pair(emu_wave *w, instruction *i, int k)
{
    const emu_operand *o = &i->operand[k];
    if (o->kind == EMU_SCALAR)
        return scalar_pair(w, o->index);
    if (o->kind != EMU_CONSTANT || o->decimal)
        stop(w, i, -1, "operand %d is not a scalar pair", k);
    return o->value;
}

/* The values of a source in all lanes: a vector register itself, or `copy` filled with a scalar. part 1: the upper 32
 * bits of a pair. */
static const uint32_t *source_part(emu_wave *w, instruction *i, int k, int part, lanes32 copy)
{
    const emu_operand *o = &i->operand[k];
    uint32_t value;
    if (o->kind == EMU_VECTOR)
        return w->v[o->index + part];
    if (o->kind == EMU_SCALAR)
        value = w->s[o->index + part];
    else if (o->kind == EMU_CONSTANT)
        value = (uint32_t)(o->value >> 32 * part);
    else
        stop(w, i, -1, "operand %d has no value", k);
    for (int l = 0; l < EMU_LANES; l++)
        copy[l] = value;
    return copy;
}

static const uint32_t *source(emu_wave *w, instruction *i, int k, lanes32 copy)
{
    if (i->operand[k].negated || i->operand[k].absolute)
        stop(w, i, -1, "operand %d has a sign modifier", k);
    return source_part(w, i, k, 0, copy);
}

/* A source of float32, with its modifiers. */
static const uint32_t *float_source(emu_wave *w, instruction *i, int k, lanes32 copy)
{
    const emu_operand *o = &i->operand[k];
    const uint32_t *values = source_part(w, i, k, 0, copy);
    if (!o->negated && !o->absolute)
        return values;
    for (int l = 0; l < EMU_LANES; l++)
        copy[l] = (o->absolute ? values[l] & 0x7fffffffu : values[l]) ^ (o->negated ? 0x80000000u : 0u);
    return copy;
}

static uint32_t *target(emu_wave *w, instruction *i, int part)
{
    if (i->operand[0].kind != EMU_VECTOR)
        stop(w, i, -1, "the result is not a vector register");
    return w->v[i->operand[0].index + part];
}

#define HANDLER(name) static void do_##name(emu_wave *w, instruction *i)
#define EACH_LANE(...)                       \
    do {                                     \
        const uint64_t exec_ = exec_mask(w); \
        for (int l = 0; l < EMU_LANES; l++)  \
            if (exec_ >> l & 1)              \
                __VA_ARGS__;                 \
    } while (0)

/* ---- vector arithmetic ----------------------------------------------------------------------------- */

#define A (a[l])
#define B (b[l])
#define C (c[l])
#define UNARY(name, expression)                      \
    HANDLER(name)                                    \
    {                                                \
        lanes32 copy_a;                              \
        const uint32_t *a = source(w, i, 1, copy_a); \
        uint32_t *d = target(w, i, 0);               \
        EACH_LANE(d[l] = (expression));              \
    }
#define BINARY(name, expression)                                                   \
    HANDLER(name)                                                                  \
    {                                                                              \
        lanes32 copy_a, copy_b;                                                    \
        const uint32_t *a = source(w, i, 1, copy_a), *b = source(w, i, 2, copy_b); \
        uint32_t *d = target(w, i, 0);                                             \
        EACH_LANE(d[l] = (expression));                                            \
    }
#define TERNARY(name, expression)                                                                                \
    HANDLER(name)                                                                                                \
    {                                                                                                            \
        lanes32 copy_a, copy_b, copy_c;                                                                          \
        const uint32_t *a = source(w, i, 1, copy_a), *b = source(w, i, 2, copy_b), *c = source(w, i, 3, copy_c); \
        uint32_t *d = target(w, i, 0);                                                                           \
        EACH_LANE(d[l] = (expression));                                                                          \
    }

/* v_perm_b32: byte n of a:b, of which b has the bytes 0 to 3; 12 is 0, from 13 on 0xff. */
static uint32_t permuted_byte(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)a << 32 | b;
    if (selector < 8)
        return (uint32_t)(bytes >> 8 * selector) & 0xffu;
    if (selector < 12) /* the sign of a half */
        return bytes >> (16 * (selector - 8) + 15) & 1 ? 0xffu : 0u;
    return selector == 12 ? 0u : 0xffu;
}

static uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors)
{
    uint32_t result = 0;
    for (int k = 0; k < 4; k++)
        result |= permuted_byte(a, b, selectors >> 8 * k & 0xffu) << 8 * k;
    return result;
}

static uint32_t reversed_bits(uint32_t a)
{
    uint32_t result = 0;
    for (int k = 0; k < 32; k++)
        result |= (a >> k & 1u) << (31 - k);
    return result;
}

static uint32_t bit_field(uint32_t a, uint32_t offset, uint32_t width)
{
    width &= 31u;
    return width == 0 ? 0 : a >> (offset & 31u) & ((1u << width) - 1u);
}

static uint32_t lanes_below(int lane)
{
    return lane >= 32 ? ~0u : (1u << lane) - 1u;
}

static int32_t signed24(uint32_t a)
{
    return (int32_t)(a << 8) >> 8;
}

static uint32_t float_to_unsigned(float value)
{
    return !(value > 0.0f) ? 0u : value >= 4294967296.0f ? ~0u : (uint32_t)value;
}

static uint32_t float_to_signed(float value)
{
    return value != value           ? 0u
           : value >= 2147483648.0f ? 0x7fffffffu
           : value < -2147483648.0f ? 0x80000000u
                                    : (uint32_t)(int32_t)value;
}

UNARY(v_mov_b32, A)
UNARY(v_not_b32, ~A)
UNARY(v_bfrev_b32, reversed_bits(A))
UNARY(v_cvt_f32_u32, as_bits((float)A))
UNARY(v_cvt_f32_i32, as_bits((float)(int32_t)A))
BINARY(v_add_u32, A + B)
BINARY(v_sub_u32, A - B)
BINARY(v_subrev_u32, B - A)
BINARY(v_mul_lo_u32, A *B)
BINARY(v_mul_hi_u32, (uint32_t)((uint64_t)A *B >> 32))
BINARY(v_mul_u32_u24, (A & 0xffffffu) * (B & 0xffffffu))
BINARY(v_and_b32, A &B)
BINARY(v_or_b32, A | B)
BINARY(v_xor_b32, A ^ B)
BINARY(v_lshlrev_b32, B << (A & 31u))
BINARY(v_lshrrev_b32, B >> (A & 31u))
BINARY(v_ashrrev_i32, (uint32_t)((int32_t)B >> (A & 31u)))
BINARY(v_min_i32, (int32_t)A < (int32_t)B ? A : B)
BINARY(v_max_i32, (int32_t)A > (int32_t)B ? A : B)
BINARY(v_min_u32, A < B ? A : B)
BINARY(v_max_u32, A > B ? A : B)
BINARY(v_add_u16, (A + B) & 0xffffu)
BINARY(v_sub_u16, (A - B) & 0xffffu)
BINARY(v_mul_lo_u16, (A & 0xffffu) * (B & 0xffffu) & 0xffffu)
BINARY(v_lshlrev_b16, B << (A & 15u) & 0xffffu)
BINARY(v_mbcnt_lo_u32_b32, (uint32_t)__builtin_popcount(A &lanes_below(l)) + B)
BINARY(v_mbcnt_hi_u32_b32, (uint32_t)__builtin_popcount(l < 32 ? 0u : A & lanes_below(l - 32)) + B)
TERNARY(v_add3_u32, A + B + C)
TERNARY(v_lshl_add_u32, (A << (B & 31u)) + C)
TERNARY(v_add_lshl_u32, (A + B) << (C & 31u))
TERNARY(v_lshl_or_b32, A << (B & 31u) | C)
TERNARY(v_and_or_b32, (A & B) | C)
TERNARY(v_or3_b32, A | B | C)
TERNARY(v_bfe_u32, bit_field(A, B, C))
TERNARY(v_alignbit_b32, (uint32_t)(((uint64_t)A << 32 | B) >> (C & 31u)))
TERNARY(v_perm_b32, permute(A, B, C))
TERNARY(v_mad_u32_u24, (A & 0xffffffu) * (B & 0xffffffu) + C)
TERNARY(v_mad_i32_i24, (uint32_t)((int64_t)signed24(A) * signed24(B)) + C)

HANDLER(v_pack_b32_f16)
{
    lanes32 copy_a, copy_b;
    if (i->select != 0)
        stop(w, i, -1, "op_sel");
    const uint32_t *a = source(w, i, 1, copy_a), *b = source(w, i, 2, copy_b);
    uint32_t *d = target(w, i, 0);
    EACH_LANE(d[l] = (A & 0xffffu) | B << 16);
}

#define FLOAT_UNARY(name, expression)                           \
    HANDLER(name)                                               \
    {                                                           \
        lanes32 copy_a;                                         \
        const uint32_t *bits_a = float_source(w, i, 1, copy_a); \
        uint32_t *d = target(w, i, 0);                          \
        EACH_LANE({                                             \
            const float x = as_float(bits_a[l]);                \
            d[l] = (expression);                                \
        });                                                     \
    }
#define FLOAT_BINARY(name, expression)                                                                   \
    HANDLER(name)                                                                                        \
    {                                                                                                    \
        lanes32 copy_a, copy_b;                                                                          \
        const uint32_t *bits_a = float_source(w, i, 1, copy_a), *bits_b = float_source(w, i, 2, copy_b); \
        uint32_t *d = target(w, i, 0);                                                                   \
        EACH_LANE({                                                                                      \
            const float x = as_float(bits_a[l]), y = as_float(bits_b[l]);                                \
            d[l] = as_bits(expression);                                                                  \
        });                                                                                              \
    }
#define FLOAT_TERNARY(name, expression)                                                                  \
    HANDLER(name)                                                                                        \
    {                                                                                                    \
        lanes32 copy_a, copy_b, copy_c;                                                                  \
        const uint32_t *bits_a = float_source(w, i, 1, copy_a), *bits_b = float_source(w, i, 2, copy_b), \
                       *bits_c = float_source(w, i, 3, copy_c);                                          \
        uint32_t *d = target(w, i, 0);                                                                   \
        EACH_LANE({                                                                                      \
            const float x = as_float(bits_a[l]), y = as_float(bits_b[l]), z = as_float(bits_c[l]);       \
            d[l] = as_bits(expression);                                                                  \
        });                                                                                              \
    }
/* The result is the third source too. */
#define FLOAT_ACCUMULATE(name, expression)                                                               \
    HANDLER(name)                                                                                        \
    {                                                                                                    \
        lanes32 copy_a, copy_b;                                                                          \
        const uint32_t *bits_a = float_source(w, i, 1, copy_a), *bits_b = float_source(w, i, 2, copy_b); \
        uint32_t *d = target(w, i, 0);                                                                   \
        EACH_LANE({                                                                                      \
            const float x = as_float(bits_a[l]), y = as_float(bits_b[l]), z = as_float(d[l]);            \
            d[l] = as_bits(expression);                                                                  \
        });                                                                                              \
    }

/* The greater number; the other one if one is NaN; +0 is greater than -0. */
static float maximum(float x, float y)
{
    if (x == 0.0f && y == 0.0f)
        return signbit(x) ? y : x;
    return fmaxf(x, y);
}

static float minimum(float x, float y)
{
    if (x == 0.0f && y == 0.0f)
        return signbit(x) ? x : y;
    return fminf(x, y);
}

FLOAT_UNARY(v_rcp_f32, as_bits(flush(1.0f / flush(x))))
FLOAT_UNARY(v_exp_f32, as_bits(flush(exp2f(flush(x)))))
FLOAT_UNARY(v_trunc_f32, as_bits(truncf(x)))
FLOAT_UNARY(v_cvt_u32_f32, float_to_unsigned(x))
FLOAT_UNARY(v_cvt_i32_f32, float_to_signed(x))
FLOAT_UNARY(v_cvt_f16_f32, cot_f32_to_f16(x))
FLOAT_BINARY(v_add_f32, x + y)
FLOAT_BINARY(v_sub_f32, x - y)
FLOAT_BINARY(v_subrev_f32, y - x)
FLOAT_BINARY(v_mul_f32, x *y)
FLOAT_BINARY(v_max_f32, maximum(x, y))
FLOAT_BINARY(v_min_f32, minimum(x, y))
FLOAT_TERNARY(v_max3_f32, maximum(maximum(x, y), z))
FLOAT_TERNARY(v_fma_f32, fmaf(x, y, z))
FLOAT_TERNARY(v_fmamk_f32, fmaf(x, y, z)) /* the constant is the second source */
FLOAT_TERNARY(v_fmaak_f32, fmaf(x, y, z)) /* and here the third */
FLOAT_TERNARY(v_madmk_f32, flush(flush(flush(x) * flush(y)) + flush(z)))
FLOAT_ACCUMULATE(v_fmac_f32, fmaf(x, y, z))
FLOAT_ACCUMULATE(v_mac_f32, flush(flush(flush(x) * flush(y)) + flush(z)))

HANDLER(v_cvt_f32_f16)
{
    lanes32 copy_a;
    const uint32_t *a = source(w, i, 1, copy_a);
    uint32_t *d = target(w, i, 0);
    if (i->operand[1].decimal)
        stop(w, i, -1, "a constant of float16");
    EACH_LANE(d[l] = as_bits(cot_f16_to_f32((uint16_t)A)));
}

/* ---- pairs of float32 ------------------------------------------------------------------------------- */

/* Half `high` of the result takes the half of source k that op_sel or op_sel_hi names. */
static const uint32_t *packed_source(emu_wave *w, instruction *i, int k, bool high, lanes32 copy)
{
    const unsigned part = (high ? i->select_high : i->select) >> (k - 1) & 1u;
    const unsigned negated = (high ? i->negated_high : i->negated_low) >> (k - 1) & 1u;
    if (i->operand[k].kind == EMU_CONSTANT && part != 0)
        stop(w, i, -1, "the upper half of a constant");
    const uint32_t *values = source_part(w, i, k, (int)part, copy);
    if (negated == 0)
        return values;
    for (int l = 0; l < EMU_LANES; l++)
        copy[l] = values[l] ^ 0x80000000u;
    return copy;
}

#define PACKED(name, sources, expression)                                 \
    HANDLER(name)                                                         \
    {                                                                     \
        lanes32 copies[3], result[2];                                     \
        for (int half = 0; half < 2; half++) {                            \
            const uint32_t *s[3] = {0};                                   \
            for (int k = 0; k < (sources); k++)                           \
                s[k] = packed_source(w, i, k + 1, half != 0, copies[k]);  \
            for (int l = 0; l < EMU_LANES; l++) {                         \
                const float x = as_float(s[0][l]), y = as_float(s[1][l]); \
                const float z = (sources) > 2 ? as_float(s[2][l]) : 0.0f; \
                (void)z;                                                  \
                result[half][l] = as_bits(expression);                    \
            }                                                             \
        }                                                                 \
        uint32_t *low = target(w, i, 0), *high = target(w, i, 1);         \
        EACH_LANE((low[l] = result[0][l], high[l] = result[1][l]));       \
    }
PACKED(v_pk_fma_f32, 3, fmaf(x, y, z))
PACKED(v_pk_mul_f32, 2, x *y)
PACKED(v_pk_add_f32, 2, x + y)

/* The lower half comes from the first source, the upper one from the second; op_sel names their halves. */
HANDLER(v_pk_mov_b32)
{
    lanes32 copy_a, copy_b, low, high;
    const uint32_t *a = source_part(w, i, 1, (int)(i->select & 1u), copy_a);
    const uint32_t *b = source_part(w, i, 2, (int)(i->select >> 1 & 1u), copy_b);
    memcpy(low, a, sizeof low);
    memcpy(high, b, sizeof high);
    uint32_t *to = target(w, i, 0), *to_high = target(w, i, 1);
    EACH_LANE((to[l] = low[l], to_high[l] = high[l]));
}

/* ---- 64 bits ---------------------------------------------------------------------------------------- */

typedef struct wide {
    lanes32 copy_low, copy_high;
    const uint32_t *low, *high;
} wide;

static void read_wide(emu_wave *w, instruction *i, int k, wide *source)
{
    source->low = source_part(w, i, k, 0, source->copy_low);
    source->high = source_part(w, i, k, 1, source->copy_high);
}

static uint64_t wide_lane(const wide *source, int lane)
{
    return source->low[lane] | (uint64_t)source->high[lane] << 32;
}

static void set_wide(uint32_t *low, uint32_t *high, int lane, uint64_t value)
{
    low[lane] = (uint32_t)value;
    high[lane] = (uint32_t)(value >> 32);
}

/* `count` is 32 bits, `value` is 64 bits. */
#define SHIFT64(name, expression)                                 \
    HANDLER(name)                                                 \
    {                                                             \
        lanes32 copy_a;                                           \
        wide b;                                                   \
        const uint32_t *a = source(w, i, 1, copy_a);              \
        read_wide(w, i, 2, &b);                                   \
        uint32_t *low = target(w, i, 0), *high = target(w, i, 1); \
        EACH_LANE({                                               \
            const uint64_t value = wide_lane(&b, l);              \
            const unsigned count = A & 63u;                       \
            set_wide(low, high, l, (uint64_t)(expression));       \
        });                                                       \
    }
SHIFT64(v_lshlrev_b64, value << count)
SHIFT64(v_lshrrev_b64, value >> count)
SHIFT64(v_ashrrev_i64, (int64_t)value >> count)

HANDLER(v_lshl_add_u64)
{
    lanes32 copy_b;
    wide a, c;
    read_wide(w, i, 1, &a);
    read_wide(w, i, 3, &c);
    const uint32_t *b = source(w, i, 2, copy_b);
    uint32_t *low = target(w, i, 0), *high = target(w, i, 1);
    EACH_LANE(set_wide(low, high, l, (wide_lane(&a, l) << (B & 7u)) + wide_lane(&c, l)));
}

HANDLER(v_mov_b64)
{
    wide a;
    read_wide(w, i, 1, &a);
    uint32_t *low = target(w, i, 0), *high = target(w, i, 1);
    EACH_LANE(set_wide(low, high, l, wide_lane(&a, l)));
}

/* A result per lane in a pair of scalar registers. Lanes without exec get 0. */
static void set_mask(emu_wave *w, instruction *i, int k, uint64_t mask)
{
    if (i->operand[k].kind != EMU_SCALAR)
        stop(w, i, -1, "operand %d is not a scalar pair", k);
    set_scalar_pair(w, i->operand[k].index, mask);
}

/* operands: result, carry, two factors, addend */
HANDLER(v_mad_u64_u32)
{
    lanes32 copy_a, copy_b;
    wide c;
    const uint32_t *a = source(w, i, 2, copy_a), *b = source(w, i, 3, copy_b);
    read_wide(w, i, 4, &c);
    uint32_t *low = target(w, i, 0), *high = target(w, i, 1);
    uint64_t carries = 0;
    EACH_LANE({
        const uint64_t product = (uint64_t)A * B, sum = product + wide_lane(&c, l);
        carries |= (uint64_t)(sum < product) << l;
        set_wide(low, high, l, sum);
    });
    set_mask(w, i, 1, carries);
}

/* ---- carries ---------------------------------------------------------------------------------------- */

/* operands: result, carry out, two sources, and carry in. `sum` has the carry in bit 32. */
static void add_carry(emu_wave *w, instruction *i, bool has_carry_in, uint64_t (*sum)(uint64_t, uint64_t, uint64_t))
{
    lanes32 copy_a, copy_b;
    const uint32_t *a = source(w, i, 2, copy_a), *b = source(w, i, 3, copy_b);
    const uint64_t carry_in = has_carry_in ? scalar_source_pair(w, i, 4) : 0;
    uint32_t *d = target(w, i, 0);
    uint64_t carries = 0;
    EACH_LANE({
        const uint64_t result = sum(A, B, carry_in >> l & 1);
        d[l] = (uint32_t)result;
        carries |= (result >> 32 & 1) << l;
    });
    set_mask(w, i, 1, carries);
}

static uint64_t sum_add(uint64_t a, uint64_t b, uint64_t carry)
{
    return a + b + carry;
}

static uint64_t sum_sub(uint64_t a, uint64_t b, uint64_t borrow)
{
    return a - b - borrow;
}

static uint64_t sum_subrev(uint64_t a, uint64_t b, uint64_t borrow)
{
    return b - a - borrow;
}

#define CARRY(name, has_carry_in, sum)      \
    HANDLER(name)                           \
    {                                       \
        add_carry(w, i, has_carry_in, sum); \
    }
CARRY(v_add_co_u32, false, sum_add)
CARRY(v_addc_co_u32, true, sum_add)
CARRY(v_sub_co_u32, false, sum_sub)
CARRY(v_subb_co_u32, true, sum_sub)
CARRY(v_subrev_co_u32, false, sum_subrev)
CARRY(v_subbrev_co_u32, true, sum_subrev)

/* ---- comparisons and selection ------------------------------------------------------------------------ */

#define COMPARE32(name, read, type, convert, expression)                       \
    HANDLER(name)                                                              \
    {                                                                          \
        lanes32 copy_a, copy_b;                                                \
        const uint32_t *a = read(w, i, 1, copy_a), *b = read(w, i, 2, copy_b); \
        uint64_t mask = 0;                                                     \
        EACH_LANE({                                                            \
            const type x = convert(A), y = convert(B);                         \
            mask |= (uint64_t)(expression) << l;                               \
        });                                                                    \
        set_mask(w, i, 0, mask);                                               \
    }
#define COMPARE64(name, type, expression)                                      \
    HANDLER(name)                                                              \
    {                                                                          \
        wide a, b;                                                             \
        read_wide(w, i, 1, &a);                                                \
        read_wide(w, i, 2, &b);                                                \
        uint64_t mask = 0;                                                     \
        EACH_LANE({                                                            \
            const type x = (type)wide_lane(&a, l), y = (type)wide_lane(&b, l); \
            mask |= (uint64_t)(expression) << l;                               \
        });                                                                    \
        set_mask(w, i, 0, mask);                                               \
    }
#define SIX(compare, suffix, ...)                                                                      \
    compare(v_cmp_eq_##suffix, __VA_ARGS__, x == y) compare(v_cmp_ne_##suffix, __VA_ARGS__, x != y)    \
        compare(v_cmp_lt_##suffix, __VA_ARGS__, x < y) compare(v_cmp_le_##suffix, __VA_ARGS__, x <= y) \
            compare(v_cmp_gt_##suffix, __VA_ARGS__, x > y) compare(v_cmp_ge_##suffix, __VA_ARGS__, x >= y)
SIX(COMPARE32, u32, source, uint32_t, (uint32_t))
SIX(COMPARE32, i32, source, int32_t, (int32_t))
SIX(COMPARE32, u16, source, uint16_t, (uint16_t))
SIX(COMPARE64, u64, uint64_t)
SIX(COMPARE64, i64, int64_t)
#define COMPARE_FLOAT(name, expression) COMPARE32(v_cmp_##name##_f32, float_source, float, as_float, expression)
COMPARE_FLOAT(eq, x == y)
COMPARE_FLOAT(lt, x < y)
COMPARE_FLOAT(le, x <= y)
COMPARE_FLOAT(gt, x > y)
COMPARE_FLOAT(ge, x >= y)
COMPARE_FLOAT(lg, x<y || x> y)
COMPARE_FLOAT(o, x == x && y == y)
COMPARE_FLOAT(u, x != x || y != y)
COMPARE_FLOAT(neq, !(x == y))
COMPARE_FLOAT(nlt, !(x < y))
COMPARE_FLOAT(nle, !(x <= y))
COMPARE_FLOAT(ngt, !(x > y))
COMPARE_FLOAT(nge, !(x >= y))
COMPARE_FLOAT(nlg, !(x < y || x > y))

HANDLER(v_cndmask_b32)
{
    lanes32 copy_a, copy_b;
    const uint32_t *a = float_source(w, i, 1, copy_a), *b = float_source(w, i, 2, copy_b);
    const uint64_t mask = scalar_source_pair(w, i, 3);
    uint32_t *d = target(w, i, 0);
    EACH_LANE(d[l] = mask >> l & 1 ? B : A);
}

/* ---- between lanes ------------------------------------------------------------------------------------ */

static void set_scalar(emu_wave *w, instruction *i, uint32_t value)
{
    if (i->operand[0].kind != EMU_SCALAR)
        stop(w, i, -1, "the result is not a scalar register");
    w->s[i->operand[0].index] = value;
}

static const uint32_t *vector_source(emu_wave *w, instruction *i, int k)
{
    if (i->operand[k].kind != EMU_VECTOR)
        stop(w, i, -1, "operand %d is not a vector register", k);
    return w->v[i->operand[k].index];
}

HANDLER(v_readlane_b32)
{
    set_scalar(w, i, vector_source(w, i, 1)[scalar_source(w, i, 2) & 63u]);
}

HANDLER(v_readfirstlane_b32)
{
    const uint64_t exec = exec_mask(w);
    set_scalar(w, i, vector_source(w, i, 1)[exec != 0 ? __builtin_ctzll(exec) : 0]);
}

HANDLER(v_writelane_b32)
{
    target(w, i, 0)[scalar_source(w, i, 2) & 63u] = scalar_source(w, i, 1);
}

/* ---- matrix products (MFMA) ----------------------------------------------------------------------------- */

/* D = A B + C for one square block of side M: 32 or 16. Lane l has row l % M of A and column l % M of B, and of the
 * inner axis the terms of group l / M: four terms of 16 bits in two registers, or one float32. Register r of C and D
 * has column l % M and row 256 / M * (r / 4) + 4 * (l / M) + r % 4. */
typedef enum matrix_type { MATRIX_F32, MATRIX_F16, MATRIX_BF16 } matrix_type;

enum { MAX_SIDE = 32, MAX_TERMS = 16 };

static float matrix_element(uint32_t word, int half, matrix_type type)
{
    const uint16_t bits = (uint16_t)(word >> 16 * half);
    return type == MATRIX_F32   ? as_float(word)
           : type == MATRIX_F16 ? cot_f16_to_f32(bits)
                                : as_float((uint32_t)bits << 16);
}

/* MI200 flushes subnormal inputs of 16 bits, and subnormal results. */
static float matrix_input(uint32_t word, int half, matrix_type type, bool flushes)
{
    const float value = matrix_element(word, half, type);
    const float smallest = type == MATRIX_F16 ? 0x1p-14f : 0x1p-126f;
    return flushes && fabsf(value) < smallest ? copysignf(0.0f, value) : value;
}

/* Adds the terms in the order of the inner axis, and rounds after each. AMD does not document the order within an
 * instruction. */
#if defined(__x86_64__)
__attribute__((target_clones("arch=haswell", "default")))
#endif
static void
add_products(int side, int terms, const float (*a)[MAX_SIDE], const float (*b)[MAX_SIDE], float (*d)[MAX_SIDE])
{
    for (int k = 0; k < terms; k++)
        for (int row = 0; row < side; row++)
            for (int column = 0; column < side; column++)
                d[row][column] = __builtin_fmaf(a[k][row], b[k][column], d[row][column]);
}

static void multiply_matrices(emu_wave *w, instruction *i, int side, matrix_type type, bool flushes)
{
    const int terms_per_lane = type == MATRIX_F32 ? 1 : 4, terms = terms_per_lane * EMU_LANES / side;
    const int words = type == MATRIX_F32 ? 1 : 2, registers = side * side / EMU_LANES;
    float a[MAX_TERMS][MAX_SIDE], b[MAX_TERMS][MAX_SIDE], d[MAX_SIDE][MAX_SIDE];
    if (exec_mask(w) != ~0ull)
        stop(w, i, -1, "exec is not full, which MFMA ignores");
    if (i->operand[0].count != registers || i->operand[1].count != words || i->operand[2].count != words)
        stop(w, i, -1, "an operand has another number of registers");
    target(w, i, 0);
    vector_source(w, i, 1);
    vector_source(w, i, 2);
    for (int l = 0; l < EMU_LANES; l++)
        for (int n = 0; n < terms_per_lane; n++) {
            const int k = l / side * terms_per_lane + n;
            a[k][l % side] = matrix_input(w->v[i->operand[1].index + n / 2][l], n % 2, type, flushes);
            b[k][l % side] = matrix_input(w->v[i->operand[2].index + n / 2][l], n % 2, type, flushes);
        }
    for (int r = 0; r < registers; r++) {
        lanes32 copy;
        const uint32_t *c =
            i->operand[3].kind == EMU_CONSTANT ? source_part(w, i, 3, 0, copy) : w->v[i->operand[3].index + r];
        for (int l = 0; l < EMU_LANES; l++)
            d[256 / side * (r / 4) + 4 * (l / side) + r % 4][l % side] = as_float(c[l]);
    }
    add_products(side, terms, a, b, d);
    for (int r = 0; r < registers; r++)
        for (int l = 0; l < EMU_LANES; l++) {
            const float value = d[256 / side * (r / 4) + 4 * (l / side) + r % 4][l % side];
            w->v[i->operand[0].index + r][l] = as_bits(flushes ? flush(value) : value);
        }
}

/* Names without a second underscore, or with _1k, are those of gfx90a. */
#define MFMA(name, side, type, flushes)               \
    HANDLER(name)                                     \
    {                                                 \
        multiply_matrices(w, i, side, type, flushes); \
    }
MFMA(v_mfma_f32_32x32x8f16, 32, MATRIX_F16, true)
MFMA(v_mfma_f32_32x32x8_f16, 32, MATRIX_F16, false)
MFMA(v_mfma_f32_32x32x8bf16_1k, 32, MATRIX_BF16, true)
MFMA(v_mfma_f32_32x32x8_bf16, 32, MATRIX_BF16, false)
MFMA(v_mfma_f32_16x16x16f16, 16, MATRIX_F16, true)
MFMA(v_mfma_f32_16x16x16_f16, 16, MATRIX_F16, false)
MFMA(v_mfma_f32_16x16x16bf16_1k, 16, MATRIX_BF16, true)
MFMA(v_mfma_f32_16x16x16_bf16, 16, MATRIX_BF16, false)
MFMA(v_mfma_f32_32x32x2_f32, 32, MATRIX_F32, false)
MFMA(v_mfma_f32_16x16x4_f32, 16, MATRIX_F32, false)

/* ---- scalar arithmetic ---------------------------------------------------------------------------------- */

#define SCALAR(name, ...)                                                      \
    HANDLER(name)                                                              \
    {                                                                          \
        const uint32_t a = scalar_source(w, i, 1), b = scalar_source(w, i, 2); \
        uint32_t d = 0;                                                        \
        __VA_ARGS__;                                                           \
        set_scalar(w, i, d);                                                   \
    }
/* The result is a source, the other one is a constant of 16 bits with a sign, which the disassembly shows without. */
#define SCALAR_SHORT(name, ...)                                            \
    HANDLER(name)                                                          \
    {                                                                      \
        const uint32_t a = scalar_source(w, i, 0), b = short_source(w, i); \
        uint32_t d = 0;                                                    \
        __VA_ARGS__;                                                       \
        set_scalar(w, i, d);                                               \
    }
#define SCALAR64(name, ...)                                                              \
    HANDLER(name)                                                                        \
    {                                                                                    \
        const uint64_t a = scalar_source_pair(w, i, 1), b = scalar_source_pair(w, i, 2); \
        uint64_t d = 0;                                                                  \
        __VA_ARGS__;                                                                     \
        set_mask(w, i, 0, d);                                                            \
    }

static uint32_t short_source(emu_wave *w, instruction *i)
{
    return (uint32_t)(int16_t)scalar_source(w, i, 1);
}

static bool overflows(uint32_t a, uint32_t b, bool subtract)
{
    const int64_t exact = subtract ? (int64_t)(int32_t)a - (int32_t)b : (int64_t)(int32_t)a + (int32_t)b;
    return exact != (int32_t)exact;
}

SCALAR(s_add_u32, (d = a + b, w->scc = d < a))
SCALAR(s_sub_u32, (d = a - b, w->scc = a < b))
SCALAR(s_add_i32, (d = a + b, w->scc = overflows(a, b, false)))
SCALAR(s_sub_i32, (d = a - b, w->scc = overflows(a, b, true)))
SCALAR(s_addc_u32, const uint64_t sum = (uint64_t)a + b + w->scc; d = (uint32_t)sum; w->scc = sum >> 32 != 0)
SCALAR(s_subb_u32, const uint64_t sum = (uint64_t)a - b - w->scc; d = (uint32_t)sum; w->scc = sum >> 32 != 0)
SCALAR(s_mul_i32, d = a * b)
SCALAR(s_mul_hi_u32, d = (uint32_t)((uint64_t)a * b >> 32))
SCALAR(s_and_b32, (d = a & b, w->scc = d != 0))
SCALAR(s_or_b32, (d = a | b, w->scc = d != 0))
SCALAR(s_xor_b32, (d = a ^ b, w->scc = d != 0))
SCALAR(s_andn2_b32, (d = a & ~b, w->scc = d != 0))
SCALAR(s_lshl_b32, (d = a << (b & 31u), w->scc = d != 0))
SCALAR(s_lshr_b32, (d = a >> (b & 31u), w->scc = d != 0))
SCALAR(s_ashr_i32, (d = (uint32_t)((int32_t)a >> (b & 31u)), w->scc = d != 0))
SCALAR(s_min_i32, (w->scc = (int32_t)a < (int32_t)b, d = w->scc ? a : b))
SCALAR(s_max_i32, (w->scc = (int32_t)a > (int32_t)b, d = w->scc ? a : b))
SCALAR(s_min_u32, (w->scc = a < b, d = w->scc ? a : b))
SCALAR(s_max_u32, (w->scc = a > b, d = w->scc ? a : b))
SCALAR(s_bfe_u32, const unsigned width = b >> 16 & 0x7fu;
       d = width == 0 ? 0 : (uint32_t)((uint64_t)(a >> (b & 31u)) & ((1ull << width) - 1)); w->scc = d != 0)
SCALAR(s_cselect_b32, d = w->scc ? a : b)
SCALAR_SHORT(s_movk_i32, ((void)a, d = b))
SCALAR_SHORT(s_addk_i32, (d = a + b, w->scc = overflows(a, b, false)))
SCALAR_SHORT(s_mulk_i32, d = a * b)
SCALAR64(s_and_b64, (d = a & b, w->scc = d != 0))
SCALAR64(s_or_b64, (d = a | b, w->scc = d != 0))
SCALAR64(s_xor_b64, (d = a ^ b, w->scc = d != 0))
SCALAR64(s_andn2_b64, (d = a & ~b, w->scc = d != 0))
SCALAR64(s_orn2_b64, (d = a | ~b, w->scc = d != 0))
SCALAR64(s_cselect_b64, d = w->scc ? a : b)

/* The count of a shift of 64 bits is 32 bits. */
HANDLER(s_lshl_b64)
{
    const uint64_t d = scalar_source_pair(w, i, 1) << (scalar_source(w, i, 2) & 63u);
    w->scc = d != 0;
    set_mask(w, i, 0, d);
}

HANDLER(s_lshr_b64)
{
    const uint64_t d = scalar_source_pair(w, i, 1) >> (scalar_source(w, i, 2) & 63u);
    w->scc = d != 0;
    set_mask(w, i, 0, d);
}

HANDLER(s_ashr_i64)
{
    const uint64_t d = (uint64_t)((int64_t)scalar_source_pair(w, i, 1) >> (scalar_source(w, i, 2) & 63u));
    w->scc = d != 0;
    set_mask(w, i, 0, d);
}

HANDLER(s_mov_b32)
{
    set_scalar(w, i, scalar_source(w, i, 1));
}

HANDLER(s_mov_b64)
{
    set_mask(w, i, 0, scalar_source_pair(w, i, 1));
}

HANDLER(s_brev_b32)
{
    set_scalar(w, i, reversed_bits(scalar_source(w, i, 1)));
}

HANDLER(s_not_b64)
{
    const uint64_t d = ~scalar_source_pair(w, i, 1);
    w->scc = d != 0;
    set_mask(w, i, 0, d);
}

#define SAVE_EXEC(name, expression)                                                                 \
    HANDLER(name)                                                                                   \
    {                                                                                               \
        const uint64_t a = scalar_source_pair(w, i, 1), exec = exec_mask(w), result = (expression); \
        set_mask(w, i, 0, exec);                                                                    \
        set_scalar_pair(w, EMU_EXEC, result);                                                       \
        w->scc = result != 0;                                                                       \
    }
SAVE_EXEC(s_and_saveexec_b64, a &exec)
SAVE_EXEC(s_or_saveexec_b64, a | exec)
SAVE_EXEC(s_andn2_saveexec_b64, a & ~exec)

#define SCALAR_COMPARE(name, type, read, expression)                 \
    HANDLER(name)                                                    \
    {                                                                \
        const type x = (type)read(w, i, 0), y = (type)read(w, i, 1); \
        w->scc = (expression);                                       \
    }
/* A constant of 16 bits without a sign. */
HANDLER(s_cmpk_lt_u32)
{
    w->scc = scalar_source(w, i, 0) < (uint16_t)scalar_source(w, i, 1);
}

#define SCALAR_COMPARES(suffix, type)                              \
    SCALAR_COMPARE(s_cmp_eq_##suffix, type, scalar_source, x == y) \
    SCALAR_COMPARE(s_cmp_lg_##suffix, type, scalar_source, x != y) \
    SCALAR_COMPARE(s_cmp_lt_##suffix, type, scalar_source, x < y)  \
    SCALAR_COMPARE(s_cmp_le_##suffix, type, scalar_source, x <= y) \
    SCALAR_COMPARE(s_cmp_gt_##suffix, type, scalar_source, x > y)  \
    SCALAR_COMPARE(s_cmp_ge_##suffix, type, scalar_source, x >= y)
SCALAR_COMPARES(u32, uint32_t)
SCALAR_COMPARES(i32, int32_t)
SCALAR_COMPARE(s_cmp_eq_u64, uint64_t, scalar_source_pair, x == y)
SCALAR_COMPARE(s_cmp_lg_u64, uint64_t, scalar_source_pair, x != y)
SCALAR_COMPARE(s_bitcmp0_b32, uint32_t, scalar_source, (x >> (y & 31u) & 1u) == 0)
SCALAR_COMPARE(s_bitcmp1_b32, uint32_t, scalar_source, (x >> (y & 31u) & 1u) == 1)

/* ---- control ------------------------------------------------------------------------------------------- */

static void jump(emu_wave *w, instruction *i, bool taken)
{
    if (taken && i->target < 0)
        stop(w, i, -1, "the branch has no target");
    if (taken)
        w->next = i->target;
}

#define BRANCH(name, condition) \
    HANDLER(name)               \
    {                           \
        jump(w, i, condition);  \
    }
BRANCH(s_branch, true)
BRANCH(s_cbranch_scc0, !w->scc)
BRANCH(s_cbranch_scc1, w->scc)
BRANCH(s_cbranch_vccz, scalar_pair(w, EMU_VCC) == 0)
BRANCH(s_cbranch_vccnz, scalar_pair(w, EMU_VCC) != 0)
BRANCH(s_cbranch_execz, exec_mask(w) == 0)
BRANCH(s_cbranch_execnz, exec_mask(w) != 0)

HANDLER(s_nop)
{
    (void)w, (void)i;
}

HANDLER(s_endpgm)
{
    (void)i;
    w->done = true;
}

HANDLER(s_barrier)
{
    for (int k = 0; k < w->scalar_queue.count; k++)
        if (w->scalar_queue.access[k].lds_write)
            stop(w, i, -1, "an LDS write is under way: s_waitcnt lgkmcnt is missing");
    w->at_barrier = true;
}

/* ---- accesses under way ---------------------------------------------------------------------------------- */

static void mark(emu_wave *w, const emu_access *a, int change)
{
    uint8_t *pending = a->vector ? w->pending_v[a->lds_load] : w->pending_s;
    for (int k = 0; k < a->count; k++)
        pending[a->first + k] = (uint8_t)(pending[a->first + k] + change);
    w->pending += a->count > 0 ? change : 0;
}

static void finish_first(emu_wave *w, emu_queue *q)
{
    mark(w, &q->access[0], -1);
    memmove(q->access, q->access + 1, (size_t)--q->count * sizeof *q->access);
}

/* Whether the queue has no scalar loads, which complete in any order. */
static bool is_in_order(const emu_queue *q)
{
    for (int k = 0; k < q->count; k++)
        if (q->access[k].scalar_load)
            return false;
    return true;
}

/* The counters of s_waitcnt have a maximum: a further access begins when the first one is complete. */
static void begin_access(emu_wave *w, instruction *i, emu_queue *q, emu_access access)
{
    const int maximum = q == &w->vector_queue ? 63 : 15;
    if (q->count >= maximum && is_in_order(q))
        finish_first(w, q);
    if (q->count == 256)
        stop(w, i, -1, "more than 256 accesses are under way");
    q->access[q->count++] = access;
    mark(w, &access, 1);
}

/* Vector memory completes in order. LDS does too, but scalar loads complete in any order, also among LDS accesses. */
HANDLER(s_waitcnt)
{
    while (i->wait_vector >= 0 && w->vector_queue.count > i->wait_vector)
        finish_first(w, &w->vector_queue);
    if (i->wait_scalar > 0 && !is_in_order(&w->scalar_queue))
        return;
    while (i->wait_scalar >= 0 && w->scalar_queue.count > i->wait_scalar)
        finish_first(w, &w->scalar_queue);
}

/* A load may replace the result of an earlier load that is under way, if both are from LDS or both from global memory:
 * these complete in order. */
static void check_registers(emu_wave *w, instruction *i)
{
    for (int k = 0; k < i->operands; k++) {
        const emu_operand *o = &i->operand[k];
        const bool global = k > 0 || i->order != EMU_GLOBAL_LOAD, lds = k > 0 || i->order != EMU_LDS_LOAD;
        for (int n = 0; n < o->count; n++)
            if (o->kind == EMU_VECTOR
                    ? (global && w->pending_v[0][o->index + n] != 0) || (lds && w->pending_v[1][o->index + n] != 0)
                    : o->kind == EMU_SCALAR && w->pending_s[o->index + n] != 0)
                stop(w, i, -1, "%c%d is used before its load is complete: s_waitcnt is missing",
                     o->kind == EMU_VECTOR ? 'v' : 's', o->index + n);
    }
}

/* ---- scalar loads ---------------------------------------------------------------------------------------- */

HANDLER(s_load)
{
    const uint64_t address = (scalar_source_pair(w, i, 1) + scalar_source(w, i, 2) + (uint64_t)i->offset) & ~3ull;
    const emu_operand *to = &i->operand[0];
    if (!emu_is_allocated(address, i->width))
        stop(w, i, -1, "%u bytes at 0x%llx are outside of every allocation", i->width, (unsigned long long)address);
    memcpy(&w->s[to->index], (const void *)(uintptr_t)address, i->width);
    begin_access(w, i, &w->scalar_queue,
                 (emu_access){.first = (uint16_t)to->index, .count = (uint16_t)to->count, .scalar_load = true});
}

/* ---- global memory ----------------------------------------------------------------------------------------- */

/* The address of a lane: a pair of vector registers, or a scalar pair plus a vector register. Any alignment: ROCm runs
 * kernels in the mode for unaligned accesses, of LDS too. */
static uint64_t global_address(emu_wave *w, instruction *i, int k, int base, int lane)
{
    const uint32_t *low = vector_source(w, i, k);
    uint64_t address = low[lane];
    if (i->operand[base].kind == EMU_OFF)
        address |= (uint64_t)w->v[i->operand[k].index + 1][lane] << 32;
    else
        address += scalar_source_pair(w, i, base);
    address += (uint64_t)i->offset;
    if (!emu_is_allocated(address, i->width))
        stop(w, i, lane, "%u bytes at 0x%llx are outside of every allocation", i->width, (unsigned long long)address);
    return address;
}

HANDLER(global_load)
{
    const int first = i->operand[0].index;
    target(w, i, 0);
    EACH_LANE({
        const uint64_t address = global_address(w, i, 1, 2, l);
        uint32_t words[4] = {0};
        memcpy(words, (const void *)(uintptr_t)address, i->width);
        for (unsigned k = 0; k < (i->width + 3) / 4; k++)
            w->v[first + (int)k][l] = words[k];
    });
    begin_access(w, i, &w->vector_queue,
                 (emu_access){.first = (uint16_t)first, .count = (uint16_t)i->operand[0].count, .vector = true});
}

static void store_global(emu_wave *w, instruction *i, int shift)
{
    vector_source(w, i, 1);
    EACH_LANE({
        const uint64_t address = global_address(w, i, 0, 2, l);
        uint32_t words[4];
        for (unsigned k = 0; k < (i->width + 3) / 4; k++)
            words[k] = w->v[i->operand[1].index + (int)k][l] >> shift;
        memcpy((void *)(uintptr_t)address, words, i->width);
    });
    begin_access(w, i, &w->vector_queue, (emu_access){.vector = true});
}

HANDLER(global_store)
{
    store_global(w, i, 0);
}

HANDLER(global_store_d16_hi)
{
    store_global(w, i, 16);
}

/* Four data registers: the new value, then the expected one. The old value is returned with sc0 (gfx90a: glc). */
HANDLER(global_atomic_cmpswap_x2)
{
    const int address = i->returns ? 1 : 0, data = i->operand[address + 1].index;
    vector_source(w, i, address + 1);
    EACH_LANE({
        uint64_t *const word = (uint64_t *)(uintptr_t)global_address(w, i, address, address + 2, l);
        const uint64_t old = *word, desired = w->v[data][l] | (uint64_t)w->v[data + 1][l] << 32;
        if (old == (w->v[data + 2][l] | (uint64_t)w->v[data + 3][l] << 32))
            *word = desired;
        if (i->returns)
            set_wide(target(w, i, 0), target(w, i, 1), l, old);
    });
    begin_access(w, i, &w->vector_queue,
                 i->returns ? (emu_access){.first = (uint16_t)i->operand[0].index, .count = 2, .vector = true}
                            : (emu_access){.vector = true});
}

/* ---- LDS ------------------------------------------------------------------------------------------------------ */

static unsigned char *lds(emu_wave *w, instruction *i, int lane, uint32_t address, int64_t offset)
{
    const uint32_t at = address + (uint32_t)offset; /* the sum has 32 bits: the compiler uses negative addresses */
    if (at > w->block->lds_bytes || i->width > w->block->lds_bytes - at)
        stop(w, i, lane, "%u bytes at %u are outside of the %u bytes of LDS", i->width, at, w->block->lds_bytes);
    return w->block->lds + at;
}

static void load_lds(emu_wave *w, instruction *i, int accesses, const int64_t offsets[2])
{
    const int first = i->operand[0].index, words = (int)(i->width + 3) / 4;
    lanes32 address;
    target(w, i, 0);
    memcpy(address, vector_source(w, i, 1), sizeof address); /* the result may replace it */
    EACH_LANE(for (int n = 0; n < accesses; n++) {
        uint32_t values[4] = {0};
        memcpy(values, lds(w, i, l, address[l], offsets[n]), i->width);
        for (int k = 0; k < words; k++)
            w->v[first + n * words + k][l] = values[k];
    });
    begin_access(
        w, i, &w->scalar_queue,
        (emu_access){
            .first = (uint16_t)first, .count = (uint16_t)i->operand[0].count, .vector = true, .lds_load = true});
}

static void store_lds(emu_wave *w, instruction *i, int accesses, const int64_t offsets[2], int shift)
{
    const uint32_t *address = vector_source(w, i, 0);
    EACH_LANE(for (int n = 0; n < accesses; n++) {
        uint32_t values[4];
        vector_source(w, i, 1 + n);
        for (int k = 0; k < (int)(i->width + 3) / 4; k++)
            values[k] = w->v[i->operand[1 + n].index + k][l] >> shift;
        memcpy(lds(w, i, l, address[l], offsets[n]), values, i->width);
    });
    begin_access(w, i, &w->scalar_queue, (emu_access){.vector = true, .lds_write = true});
}

HANDLER(ds_read)
{
    load_lds(w, i, 1, (const int64_t[2]){i->offset, 0});
}

HANDLER(ds_write)
{
    store_lds(w, i, 1, (const int64_t[2]){i->offset, 0}, 0);
}

HANDLER(ds_write_d16_hi)
{
    store_lds(w, i, 1, (const int64_t[2]){i->offset, 0}, 16);
}

HANDLER(ds_read2)
{
    load_lds(w, i, 2, (const int64_t[2]){i->offset0 * i->width, i->offset1 * i->width});
}

HANDLER(ds_write2)
{
    store_lds(w, i, 2, (const int64_t[2]){i->offset0 * i->width, i->offset1 * i->width}, 0);
}

HANDLER(ds_read2st64)
{
    load_lds(w, i, 2, (const int64_t[2]){i->offset0 * 64 * i->width, i->offset1 * 64 * i->width});
}

HANDLER(ds_write2st64)
{
    store_lds(w, i, 2, (const int64_t[2]){i->offset0 * 64 * i->width, i->offset1 * 64 * i->width}, 0);
}

/* A lane reads the value of the lane that its address names. Lanes without exec give 0. */
HANDLER(ds_bpermute_b32)
{
    lanes32 address, values;
    const uint64_t exec = exec_mask(w);
    memcpy(address, vector_source(w, i, 1), sizeof address);
    memcpy(values, vector_source(w, i, 2), sizeof values);
    uint32_t *d = target(w, i, 0);
    EACH_LANE({
        const unsigned from = (address[l] + (uint32_t)i->offset) / 4 % EMU_LANES;
        d[l] = exec >> from & 1 ? values[from] : 0u;
    });
    begin_access(w, i, &w->scalar_queue,
                 (emu_access){.first = (uint16_t)i->operand[0].index, .count = 1, .vector = true, .lds_load = true});
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

#define ENTRY(name) {#name, do_##name},
#define ALIAS(mnemonic, name) {#mnemonic, do_##name},
#define SIX_ENTRIES(type)  \
    ENTRY(v_cmp_eq_##type) \
    ENTRY(v_cmp_ne_##type) ENTRY(v_cmp_lt_##type) ENTRY(v_cmp_le_##type) ENTRY(v_cmp_gt_##type) ENTRY(v_cmp_ge_##type)
#define SCALAR_COMPARE_ENTRIES(type) \
    ENTRY(s_cmp_eq_##type)           \
    ENTRY(s_cmp_lg_##type) ENTRY(s_cmp_lt_##type) ENTRY(s_cmp_le_##type) ENTRY(s_cmp_gt_##type) ENTRY(s_cmp_ge_##type)

/* clang-format off */
static const struct {
    const char *mnemonic;
    emu_handler *run;
} handlers[] = {
    ENTRY(v_mov_b32) ENTRY(v_not_b32) ENTRY(v_bfrev_b32) ENTRY(v_cvt_f32_u32) ENTRY(v_cvt_f32_i32) ENTRY(v_add_u32)
    ENTRY(v_sub_u32) ENTRY(v_subrev_u32) ENTRY(v_mul_lo_u32) ENTRY(v_mul_hi_u32) ENTRY(v_mul_u32_u24) ENTRY(v_and_b32)
    ENTRY(v_or_b32) ENTRY(v_xor_b32) ENTRY(v_lshlrev_b32) ENTRY(v_lshrrev_b32) ENTRY(v_ashrrev_i32) ENTRY(v_min_i32)
    ENTRY(v_max_i32) ENTRY(v_min_u32) ENTRY(v_max_u32) ENTRY(v_add_u16) ENTRY(v_lshlrev_b16) ENTRY(v_mbcnt_lo_u32_b32)
    ENTRY(v_mbcnt_hi_u32_b32) ENTRY(v_add3_u32) ENTRY(v_lshl_add_u32) ENTRY(v_add_lshl_u32) ENTRY(v_lshl_or_b32) ENTRY(v_and_or_b32)
    ENTRY(v_or3_b32) ENTRY(v_bfe_u32) ENTRY(v_alignbit_b32) ENTRY(v_perm_b32) ENTRY(v_mad_u32_u24) ENTRY(v_mad_i32_i24)
    ENTRY(v_pack_b32_f16) ENTRY(v_rcp_f32) ALIAS(v_rcp_iflag_f32, v_rcp_f32) ENTRY(v_exp_f32) ENTRY(v_trunc_f32)
    ENTRY(v_cvt_u32_f32) ENTRY(v_cvt_i32_f32) ENTRY(v_cvt_f16_f32) ENTRY(v_cvt_f32_f16) ENTRY(v_add_f32) ENTRY(v_sub_f32)
    ENTRY(v_subrev_f32) ENTRY(v_mul_f32) ENTRY(v_max_f32) ENTRY(v_min_f32) ENTRY(v_fma_f32) ENTRY(v_fmamk_f32)
    ENTRY(v_fmaak_f32) ENTRY(v_madmk_f32) ENTRY(v_fmac_f32) ENTRY(v_mac_f32) ENTRY(v_pk_fma_f32) ENTRY(v_pk_mul_f32)
    ENTRY(v_pk_add_f32) ENTRY(v_pk_mov_b32) ENTRY(v_lshlrev_b64) ENTRY(v_lshrrev_b64) ENTRY(v_ashrrev_i64)
    ENTRY(v_lshl_add_u64) ENTRY(v_mov_b64) ENTRY(v_mad_u64_u32) ENTRY(v_add_co_u32) ENTRY(v_addc_co_u32)
    ENTRY(v_sub_co_u32) ENTRY(v_subb_co_u32) ENTRY(v_subrev_co_u32) ENTRY(v_subbrev_co_u32) SIX_ENTRIES(u32)
    SIX_ENTRIES(i32) SIX_ENTRIES(u16) SIX_ENTRIES(u64) SIX_ENTRIES(i64) ENTRY(v_cmp_eq_f32) ENTRY(v_cmp_lt_f32)
    ENTRY(v_cmp_le_f32) ENTRY(v_cmp_gt_f32) ENTRY(v_cmp_ge_f32) ENTRY(v_cmp_lg_f32) ENTRY(v_cmp_o_f32)
    ENTRY(v_cmp_u_f32) ENTRY(v_cmp_neq_f32) ENTRY(v_cmp_nlt_f32) ENTRY(v_cmp_nle_f32) ENTRY(v_cmp_ngt_f32)
    ENTRY(v_cmp_nge_f32) ENTRY(v_cmp_nlg_f32) ENTRY(v_cndmask_b32) ENTRY(v_readlane_b32) ENTRY(v_readfirstlane_b32)
    ENTRY(v_writelane_b32) ALIAS(v_accvgpr_read_b32, v_mov_b32) ALIAS(v_accvgpr_write_b32, v_mov_b32) ENTRY(s_add_u32)
    ENTRY(s_sub_u32) ENTRY(s_add_i32) ENTRY(s_sub_i32) ENTRY(s_addc_u32) ENTRY(s_subb_u32) ENTRY(s_mul_i32)
    ENTRY(s_mul_hi_u32) ENTRY(s_and_b32) ENTRY(s_or_b32) ENTRY(s_xor_b32) ENTRY(s_andn2_b32) ENTRY(s_lshl_b32)
    ENTRY(s_lshr_b32) ENTRY(s_ashr_i32) ENTRY(s_min_i32) ENTRY(s_max_i32) ENTRY(s_min_u32) ENTRY(s_max_u32)
    ENTRY(s_bfe_u32) ENTRY(s_cselect_b32) ENTRY(s_addk_i32) ENTRY(s_mulk_i32) ENTRY(s_and_b64) ENTRY(s_or_b64)
    ENTRY(s_xor_b64) ENTRY(s_andn2_b64) ENTRY(s_orn2_b64) ENTRY(s_cselect_b64) ENTRY(s_lshl_b64) ENTRY(s_lshr_b64) ENTRY(s_ashr_i64)
    ENTRY(s_mov_b32) ENTRY(s_movk_i32) ENTRY(s_mov_b64) ENTRY(s_brev_b32) ENTRY(s_not_b64)
    ENTRY(s_and_saveexec_b64) ENTRY(s_or_saveexec_b64) ENTRY(s_andn2_saveexec_b64) SCALAR_COMPARE_ENTRIES(u32)
    SCALAR_COMPARE_ENTRIES(i32) ENTRY(s_cmp_eq_u64) ENTRY(s_cmp_lg_u64) ENTRY(s_bitcmp0_b32) ENTRY(s_bitcmp1_b32)
    ENTRY(s_branch) ENTRY(s_cbranch_scc0) ENTRY(s_cbranch_scc1) ENTRY(s_cbranch_vccz) ENTRY(s_cbranch_vccnz)
    ENTRY(s_cbranch_execz) ENTRY(s_cbranch_execnz) ENTRY(s_nop) ENTRY(s_endpgm) ENTRY(s_barrier) ENTRY(s_waitcnt)
    ALIAS(s_load_dword, s_load) ALIAS(s_load_dwordx2, s_load) ALIAS(s_load_dwordx4, s_load) ALIAS(s_load_dwordx8, s_load)
    ALIAS(s_load_dwordx16, s_load) ALIAS(global_load_ubyte, global_load) ALIAS(global_load_ushort, global_load)
    ALIAS(global_load_dword, global_load) ALIAS(global_load_dwordx2, global_load) ALIAS(global_load_dwordx3, global_load)
    ALIAS(global_load_dwordx4, global_load)
    ENTRY(global_atomic_cmpswap_x2) ALIAS(global_store_byte, global_store) ALIAS(global_store_short, global_store) ALIAS(global_store_dword, global_store)
    ALIAS(global_store_dwordx2, global_store) ALIAS(global_store_dwordx4, global_store)
    ALIAS(global_store_short_d16_hi, global_store_d16_hi) ALIAS(global_store_byte_d16_hi, global_store_d16_hi)
    ALIAS(ds_read_b32, ds_read) ALIAS(ds_read_b64, ds_read) ALIAS(ds_read_b128, ds_read) ALIAS(ds_read_u8, ds_read)
    ALIAS(ds_read_u16, ds_read) ALIAS(ds_write_b8, ds_write) ALIAS(ds_write_b16, ds_write) ALIAS(ds_write_b32, ds_write)
    ALIAS(ds_write_b64, ds_write) ALIAS(ds_write_b128, ds_write) ALIAS(ds_read2_b32, ds_read2)
    ALIAS(ds_read2_b64, ds_read2) ALIAS(ds_write2_b32, ds_write2) ALIAS(ds_write2_b64, ds_write2)
    ALIAS(ds_read2st64_b32, ds_read2st64) ALIAS(ds_read2st64_b64, ds_read2st64) ALIAS(ds_write2st64_b32, ds_write2st64)
    ALIAS(ds_write2st64_b64, ds_write2st64) ENTRY(ds_bpermute_b32) ENTRY(v_mfma_f32_32x32x8f16)
    ENTRY(v_sub_u16) ENTRY(v_mul_lo_u16) ENTRY(v_max3_f32) ENTRY(s_cmpk_lt_u32) ALIAS(v_accvgpr_mov_b32, v_mov_b32)
    ALIAS(ds_write_b16_d16_hi, ds_write_d16_hi) ALIAS(ds_write_b8_d16_hi, ds_write_d16_hi)
    ENTRY(v_mfma_f32_32x32x8_f16) ENTRY(v_mfma_f32_32x32x8bf16_1k) ENTRY(v_mfma_f32_32x32x8_bf16)
    ENTRY(v_mfma_f32_16x16x16f16) ENTRY(v_mfma_f32_16x16x16_f16) ENTRY(v_mfma_f32_16x16x16bf16_1k)
    ENTRY(v_mfma_f32_16x16x16_bf16) ENTRY(v_mfma_f32_32x32x2_f32) ENTRY(v_mfma_f32_16x16x4_f32)
    ALIAS(v_mfma_f32_32x32x2f32, v_mfma_f32_32x32x2_f32) ALIAS(v_mfma_f32_16x16x4f32, v_mfma_f32_16x16x4_f32)
};
/* clang-format on */

emu_handler *emu_find_handler(const char *mnemonic)
{
    for (size_t k = 0; k < sizeof handlers / sizeof *handlers; k++)
        if (strcmp(mnemonic, handlers[k].mnemonic) == 0)
            return handlers[k].run;
    return NULL;
}

/* ---- waves and blocks -------------------------------------------------------------------------------------------- */

/* The dispatch packet, with the members that kernels read. */
typedef struct packet {
    uint16_t header, setup, threads[3], reserved;
    uint32_t grid[3], private_bytes, lds_bytes;
    uint64_t kernel, arguments, reserved_also, signal;
} packet;

static uint32_t random_number(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* The first scalar registers of a wave, in the order of AMDGPUUsage.html, "initial kernel execution state". Bits of
 * `properties` say which of them the kernel has. */
static bool set_scalars(emu_wave *w, const packet *dispatch)
{
    enum {
        PRIVATE_BUFFER = 1,
        DISPATCH = 2,
        QUEUE = 4,
        ARGUMENTS = 8,
        DISPATCH_ID = 16,
        FLAT_SCRATCH = 32,
        PRIVATE_SIZE = 64
    };
    const emu_kernel *kernel = w->block->kernel;
    int next = 0;
    next += kernel->properties & PRIVATE_BUFFER ? 4 : 0;
    if (kernel->properties & DISPATCH) {
        set_scalar_pair(w, next, (uint64_t)(uintptr_t)dispatch);
        next += 2;
    }
    next += kernel->properties & QUEUE ? 2 : 0;
    if (kernel->properties & ARGUMENTS) {
        set_scalar_pair(w, next, dispatch->arguments);
        next += 2;
    }
    next += kernel->properties & DISPATCH_ID ? 2 : 0;
    next += kernel->properties & FLAT_SCRATCH ? 2 : 0;
    next += kernel->properties & PRIVATE_SIZE ? 1 : 0;
    if (next != (int)(kernel->registers >> 1 & 31u))
        return false;
    for (int axis = 0; axis < 3; axis++)
        if (kernel->registers >> (7 + axis) & 1u)
            w->s[next++] = w->block->number[axis];
    return true;
}

static void start_wave(emu_wave *w, emu_block *b, int number, uint32_t threads)
{
    memset(w, 0, sizeof *w);
    for (int r = 0; r < EMU_VECTORS; r++)
        for (int l = 0; l < EMU_LANES; l++)
            w->v[r][l] = 0x7fc0deadu; /* NaN: a register that the kernel has not written */
    w->block = b;
    w->number = number;
    w->next = b->kernel->entry;
    const uint32_t left = threads - (uint32_t)number * EMU_LANES;
    set_scalar_pair(w, EMU_EXEC, left >= EMU_LANES ? ~0ull : (1ull << left) - 1);
    for (uint32_t l = 0; l < EMU_LANES; l++) /* x in 10 bits, then y and z, which are 0 */
        w->v[0][l] = (uint32_t)number * EMU_LANES + l;
}

static void step(emu_wave *w)
{
    const emu_instruction *i = &w->block->code->instructions[w->next++];
    if (i->run == NULL)
        stop(w, i, -1, "the emulator lacks this instruction");
    if (w->pending > 0 && i->run != do_s_waitcnt)
        check_registers(w, i);
    i->run(w, i);
}

/* Runs a wave up to a barrier or its end, or for `steps` instructions. */
static void run_wave(emu_wave *w, uint32_t steps)
{
    while (steps-- > 0 && !w->done && !w->at_barrier)
        step(w);
}

/* A barrier opens when all waves that have not ended wait at it. */
static void open_barrier(emu_wave *waves, int count)
{
    for (int k = 0; k < count; k++)
        if (!waves[k].done && !waves[k].at_barrier)
            return;
    for (int k = 0; k < count; k++)
        waves[k].at_barrier = false;
}

/* Without a seed, each wave runs to its barrier, in the order of their numbers. With one, a block draws one of two
 * orders: waves that change after at most 200 instructions, or waves that run to their barriers. The wave that begins
 * and the direction are drawn anew each time that all waves have had a turn. */
static void run_block(emu_block *b, emu_wave *waves, uint64_t *random)
{
    const bool drawn = *random != 0, interleaved = drawn && random_number(random) % 2 != 0;
    for (int left = b->waves; left > 0;) {
        const int first = drawn ? (int)(random_number(random) % (unsigned)b->waves) : 0;
        const bool downward = drawn && random_number(random) % 2 != 0;
        for (int k = 0; k < b->waves; k++)
            run_wave(&waves[(first + (downward ? b->waves - k : k)) % b->waves],
                     interleaved ? 1 + random_number(random) % 200 : UINT32_MAX);
        left = 0;
        for (int k = 0; k < b->waves; k++)
            left += !waves[k].done;
        open_barrier(waves, b->waves);
    }
}

bool emu_run(const emu_code *code, const emu_kernel *kernel, const uint32_t blocks[3], uint32_t threads,
             const void *arguments, unsigned seed, char *message, size_t size)
{
    emu_block *const b = calloc(1, sizeof *b);
    const int waves = (int)((threads + EMU_LANES - 1) / EMU_LANES);
    emu_wave *const wave = calloc((size_t)waves, sizeof *wave);
    packet *const dispatch = calloc(1, sizeof *dispatch);
    char *const copy = malloc(kernel->argument_bytes + 1);
    volatile bool ran = true;
    memcpy(copy, arguments, kernel->argument_bytes);
    *dispatch = (packet){.threads = {(uint16_t)threads, 1, 1},
                         .grid = {blocks[0] * threads, blocks[1], blocks[2]},
                         .lds_bytes = kernel->lds_bytes,
                         .arguments = (uint64_t)(uintptr_t)copy};
    emu_add_allocation(dispatch, sizeof *dispatch);
    emu_add_allocation(copy, kernel->argument_bytes);
    b->code = code;
    b->kernel = kernel;
    b->waves = waves;
    b->lds_bytes = kernel->lds_bytes;
    volatile uint64_t random_state = seed;
    if (kernel->private_bytes > 0 || kernel->entry < 0 || kernel->lds_bytes > EMU_MAX_LDS) {
        snprintf(message, size, "%s: the emulator runs no kernel with private memory", kernel->name);
        ran = false;
    }
    if (ran && setjmp(b->stop) != 0) {
        snprintf(message, size, "%s", b->message);
        ran = false;
    }
    const uint64_t count = (uint64_t)blocks[0] * blocks[1] * blocks[2];
    static _Thread_local uint64_t number; /* keeps its value over longjmp */
    for (number = 0; ran && number < count; number++) {
        uint64_t random = random_state;
        b->number[0] = (uint32_t)(number % blocks[0]);
        b->number[1] = (uint32_t)(number / blocks[0] % blocks[1]);
        b->number[2] = (uint32_t)(number / blocks[0] / blocks[1]);
        memset(b->lds, 0xff, b->lds_bytes);
        for (int k = 0; ran && k < waves; k++) {
            start_wave(&wave[k], b, k, threads);
            if (!set_scalars(&wave[k], dispatch)) {
                snprintf(message, size, "%s: the emulator lacks one of its first registers", kernel->name);
                ran = false;
            }
        }
        if (ran)
            run_block(b, wave, &random);
        random_state = random;
    }
    emu_remove_allocation(dispatch);
    emu_remove_allocation(copy);
    free(dispatch);
    free(copy);
    free(wave);
    free(b);
    return ran;
}
