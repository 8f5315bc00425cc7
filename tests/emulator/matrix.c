/* SPDX-License-Identifier: Apache-2.0
 *
 * matrix.c: mma and wgmma.
 *
 * Products of 16-bit floats are exact in float. The emulator accumulates them in the order of k, with one fma each. A
 * GPU adds several products at once and truncates, so the last bits differ. A wgmma completes when it is issued. */
#include "emulator.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum emu_step step;
enum { BF16, F16 };

static float to_float(int type, uint32_t half)
{
    return type == F16 ? emu_from_f16(half & 0xffff) : emu_from_bf16(half & 0xffff);
}

/* C[16][n] += A[16][k] B[k][n] */
static void multiply(float *c, const float *a, const float *b, int k, int n)
{
    for (int row = 0; row < 16; row++)
        for (int inner = 0; inner < k; inner++) {
            const float x = a[row * k + inner];
            float *out = c + row * n;
            const float *in = b + inner * n;
            for (int column = 0; column < n; column++)
                out[column] = fmaf(x, in[column], out[column]);
        }
}

/* Loads A [16][k] from the registers o[0..]. src/cuda/device/mma.cuh defines the fragment layout. */
static void load_a(emu_warp *w, const int32_t *o, int type, int k, float *a)
{
    for (int r = 0; r < k / 4; r++) {
        const uint32_t *row = emu_register(w, o[r]);
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++)
                a[(l / 4 + 8 * (r & 1)) * k + 2 * (l % 4) + 8 * (r >> 1) + h] = to_float(type, row[l] >> 16 * h);
    }
}

/* Accumulators [16][n]: register 4 j + e of lane 4 g + q is row g + 8 (e / 2), column 8 j + 2 q + e % 2. */
static void load_c(emu_warp *w, const int32_t *o, int n, float *c)
{
    for (int r = 0; r < n / 2; r++) {
        const float *row = emu_register(w, o[r]);
        for (int l = 0; l < LANES; l++)
            c[(l / 4 + 8 * (r >> 1 & 1)) * n + 8 * (r / 4) + 2 * (l % 4) + (r & 1)] = row[l];
    }
}

static void store_c(emu_warp *w, const int32_t *o, int n, const float *c)
{
    for (int r = 0; r < n / 2; r++) {
        float *row = emu_register(w, o[r]);
        for (int l = 0; l < LANES; l++)
            row[l] = c[(l / 4 + 8 * (r >> 1 & 1)) * n + 8 * (r / 4) + 2 * (l % 4) + (r & 1)];
    }
}

/* mma d, a, b, c. i->size: k. i->variant: type */
static step run_mma(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    const int k = i->size;
    const int32_t *oa = i->o + 4, *ob = oa + k / 4, *oc = ob + k / 8;
    float a[16 * 16], b[16 * 8], c[16 * 8];
    load_a(w, oa, i->variant, k, a);
    for (int r = 0; r < k / 8; r++) {
        const uint32_t *row = emu_register(w, ob[r]);
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++)
                b[(2 * (l % 4) + 8 * r + h) * 8 + l / 4] = to_float(i->variant, row[l] >> 16 * h);
    }
    load_c(w, oc, 8, c);
    multiply(c, a, b, k, 8);
    store_c(w, i->o, 8, c);
    return NEXT;
}

/* ---- wgmma -------------------------------------------------------------------------------------------------------- */

typedef struct descriptor {
    uint32_t start, leading, stride, swizzle; /* bytes */
} descriptor;

static descriptor decode_descriptor(emu_warp *w, const emu_ins *i, uint64_t bits)
{
    static const uint32_t swizzles[] = {0, 128, 64, 32};
    if (bits >> 49 & 7)
        emu_fault(w, i, 1, "a descriptor with a base offset, which the emulator does not support");
    return (descriptor){(uint32_t)(bits & 0x3fff) << 4, (uint32_t)(bits >> 16 & 0x3fff) << 4,
                        (uint32_t)(bits >> 32 & 0x3fff) << 4, swizzles[bits >> 62]};
}

/* Loads `count` rows of the outer axis from `first` on and 16 elements of the inner axis into out[16][count], 16
 * bytes at a time. */
static void load_tile(emu_warp *w, const emu_ins *i, uint64_t bits, int type, bool mn_major, int first, int count,
                      float *out)
{
    const descriptor d = decode_descriptor(w, i, bits);
    const int width = d.swizzle == 0 ? 16 : (int)d.swizzle; /* bytes per row of the swizzle pattern */
    for (int u = 0; u < 2 * count; u++) {
        const int outer = mn_major ? first + u % (count / 8) * 8 : first + u / 2;
        const int inner = mn_major ? u / (count / 8) : u % 2 * 8;
        uint32_t at = d.start;
        if (mn_major && d.swizzle != 0)
            at += (uint32_t)(outer / (width / 2)) * d.leading + (uint32_t)(inner / 8) * d.stride +
                  (uint32_t)(inner % 8 * width + outer % (width / 2) * 2);
        else if (mn_major)
            at += (uint32_t)(outer / 8) * d.stride + (uint32_t)(inner / 8) * d.leading + (uint32_t)(inner % 8 * 16);
        else
            at += (uint32_t)(outer / 8) * d.stride + (uint32_t)(outer % 8 * width) +
                  (d.swizzle != 0 ? (uint32_t)inner * 2 : (uint32_t)(inner / 8) * d.leading);
        if (d.swizzle != 0)
            at ^= (at >> 7 & (d.swizzle / 16 - 1)) << 4;
        const uint16_t *unit = (const uint16_t *)emu_shared(w, i, 1, at, 16, 16);
        for (int e = 0; e < 8; e++) {
            const int n = outer - first + (mn_major ? e : 0), k = inner + (mn_major ? 0 : e);
            out[k * count + n] = to_float(type, unit[e]);
        }
    }
}

/* wgmma d, a, b, p, scale a, scale b {, a is MN-major} {, b is MN-major}: computes this warp's 16 rows of the 64.
 * i->size: n / 8 */
static step run_wgmma(emu_warp *w, const emu_ins *i, uint32_t m)
{
    const step s = emu_converge(w, i, m, ~0u);
    if (s != NEXT)
        return s;
    const int n = 8 * i->size;
    const int32_t *a = i->o + n / 2, *rest = a + (i->wide_data ? 1 : 4);
    const bool a_mn = i->wide_data && emu_scalar(w, rest[4], false, 0) != 0;
    const bool b_mn = emu_scalar(w, rest[i->wide_data ? 5 : 4], false, 0) != 0;
    static float c[16 * 256], x[16 * 16], y[16 * 16], b[16 * 256];
    if (emu_scalar(w, rest[2], false, 0) != 1 || emu_scalar(w, rest[3], false, 0) != 1)
        emu_fault(w, i, m, "wgmma that negates, which the emulator does not support");
    if (i->wide_data) {
        load_tile(w, i, emu_scalar(w, *a, true, 0), i->variant, a_mn, 16 * (w->number % 4), 16, y);
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++)
                x[16 * r + k] = y[16 * k + r];
    } else
        load_a(w, a, i->variant, 16, x);
    load_tile(w, i, emu_scalar(w, rest[0], true, 0), i->variant, b_mn, 0, n, b);
    if (*(const uint32_t *)emu_register(w, rest[1]) & 1)
        load_c(w, i->o, n, c);
    else
        memset(c, 0, sizeof *c * 16 * (size_t)n);
    multiply(c, x, b, 16, n);
    store_c(w, i->o, n, c);
    return NEXT;
}

static step run_wgmma_sync(emu_warp *w, const emu_ins *i, uint32_t m)
{
    return emu_converge(w, i, m, ~0u);
}

const char *emu_find_matrix(const char *o, emu_ins *i)
{
    i->variant = emu_has(o, ".f16") ? F16 : BF16;
    if (strncmp(o, "mma.sync.aligned.m16n8k", 23) == 0) {
        i->run = run_mma;
        i->size = emu_has(o, ".m16n8k16") ? 16 : 8;
        const char *types = strstr(o, ".row.col.");
        return types != NULL && (strcmp(types, ".row.col.f32.bf16.bf16.f32") == 0 ||
                                 strcmp(types, ".row.col.f32.f16.f16.f32") == 0)
                   ? "Wwww"
                   : NULL;
    }
    if (strncmp(o, "wgmma.mma_async.sync.aligned.m64n", 33) == 0) {
        char *end;
        i->run = run_wgmma;
        i->size = (uint8_t)(strtol(o + 33, &end, 10) / 8);
        return strcmp(end, "k16.f32.bf16.bf16") == 0 || strcmp(end, "k16.f32.f16.f16") == 0 ? "Bxlpww?ww" : NULL;
    }
    i->run = run_wgmma_sync;
    if (strcmp(o, "wgmma.fence.sync.aligned") == 0 || strcmp(o, "wgmma.commit_group.sync.aligned") == 0)
        return "";
    if (strcmp(o, "wgmma.wait_group.sync.aligned") == 0)
        return "w";
    i->run = NULL;
    return NULL;
}
