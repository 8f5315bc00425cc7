/* SPDX-License-Identifier: Apache-2.0
 *
 * test_causal_conv1d_matrices.c: an independent float64 implementation of causal_conv1d as linear algebra, without
 * convolutions. For one channel of one batch row (or packed sequence), let xe be the column of its K-1 states and T
 * inputs. Then
 *
 *     z = A xe + bias          A [T, K-1+T] holds weight[k] at (t, t+k) where position t+k counts for token t
 *     F = P xe                 P [K-1, K-1+T] picks the last K-1 columns that belong to the last token's sequence
 *
 * and with g = dL/dz the gradients are:  dxe = A' g + P' dF,  dweight[k] = g' (dA/dweight[k]) xe,  dbias = g' 1.
 * The library's f64 kernels must agree up to 1e-12 times the sum of the absolute terms. */
#include "support.h"

#include <cotangent/causal_conv1d.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_B = 3, MAX_D = 4, MAX_T = 40, MAX_K = 9, MAX_N = 5, MAX_S = 14, MAX_P = MAX_K - 1 + MAX_T };

typedef enum packing { UNPACKED, SEQ_IDX, CU_SEQLENS } packing;

typedef struct problem {
    int B, D, T, K, N; /* N: rows of the states */
    packing packing;
    bool silu, bias, initial_state;
    int32_t seq_idx[MAX_B][MAX_T], cu_seqlens[MAX_N + 1];
} problem;

/* ---- arrays with a strided view for the library ------------------------------------------------------- */

/* An array with random strides. The view is element (i,j,k) of [n0,n1,n2], with a random order of the axes,
 * optionally reversed and with gaps. The gaps must not change. */
enum { MAX_ELEMENTS = 4096 };

typedef struct array {
    double data[MAX_ELEMENTS];
    cot_tensor view;
} array;

static const double gap = -777.25;

static void shape_array(array *a, uint64_t *seed, int rank, int n0, int n1, int n2)
{
    const int64_t shape[] = {n0, n1, n2};
    int order[] = {0, 1, 2};
    for (int i = rank - 1; i > 0; i--) {
        const int j = (int)random_int(seed, 0, i), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
    a->view = cot_tensor_contiguous(a->data, COT_F64, rank, shape);
    int64_t stride = random_int(seed, 0, 3) == 0 ? 2 : 1, start = 0;
    for (int i = rank - 1; i >= 0; i--) {
        const int axis = order[i];
        const bool reversed = random_int(seed, 0, 5) == 0;
        a->view.stride[axis] = reversed ? -stride : stride;
        start += reversed && shape[axis] > 0 ? (shape[axis] - 1) * stride : 0;
        stride *= shape[axis] > 0 ? shape[axis] : 1;
        stride += random_int(seed, 0, 4) == 0;
    }
    assert_true(stride <= MAX_ELEMENTS);
    a->view.data = a->data + start;
    for (int i = 0; i < MAX_ELEMENTS; i++)
        a->data[i] = gap;
}

static double *at(array *a, int i, int j, int k)
{
    const int64_t *stride = a->view.stride;
    return (double *)a->view.data + i * stride[0] + (a->view.rank > 1 ? j * stride[1] : 0) +
           (a->view.rank > 2 ? k * stride[2] : 0);
}

static void fill(array *a, uint64_t *seed)
{
    const int64_t *shape = a->view.shape;
    const int rank = a->view.rank;
    for (int i = 0; i < shape[0]; i++)
        for (int j = 0; j < (rank > 1 ? shape[1] : 1); j++)
            for (int k = 0; k < (rank > 2 ? shape[2] : 1); k++)
                *at(a, i, j, k) = 2 * random_real(seed);
}

/* Whether every array entry that is not an element still holds `gap`. */
static bool gaps_are_unchanged(array *a)
{
    static bool element[MAX_ELEMENTS];
    const int64_t *shape = a->view.shape;
    const int rank = a->view.rank;
    memset(element, 0, sizeof element);
    for (int i = 0; i < shape[0]; i++)
        for (int j = 0; j < (rank > 1 ? shape[1] : 1); j++)
            for (int k = 0; k < (rank > 2 ? shape[2] : 1); k++)
                element[at(a, i, j, k) - a->data] = true;
    for (int i = 0; i < MAX_ELEMENTS; i++)
        if (!element[i] && a->data[i] != gap)
            return false;
    return true;
}

static bool close_to(double value, double expected, double magnitude)
{
    return fabs(value - expected) <= 1e-12 * (1 + magnitude);
}

/* ---- matrices of one row ------------------------------------------------------------------------------ */

static double sigma(double z)
{
    return 1 / (1 + exp(-z));
}

static double silu(double z)
{
    return z * sigma(z);
}

static double silu_slope(double z)
{
    const double s = sigma(z);
    return s * (1 + z * (1 - s));
}

/* A segment of tokens that share states: a batch row, or a sequence of cu_seqlens. */
typedef struct segment {
    int b, first, length, state;
    int32_t sequence[MAX_P]; /* the sequence of each position of xe; negative: padding */
    int32_t last;            /* the sequence of the last token, or of the states if there is no token */
} segment;

static segment segment_of(const problem *p, int n)
{
    segment s = {.b = n, .first = 0, .length = p->T, .state = n};
    if (p->packing == CU_SEQLENS) {
        s.b = 0;
        s.first = p->cu_seqlens[n];
        s.length = p->cu_seqlens[n + 1] - p->cu_seqlens[n];
    }
    for (int t = 0; t < s.length; t++)
        s.sequence[p->K - 1 + t] = p->packing == SEQ_IDX ? p->seq_idx[s.b][t] : 0;
    for (int i = 0; i < p->K - 1; i++)
        s.sequence[i] = s.length > 0 ? s.sequence[p->K - 1] : 0;
    s.last = p->K - 1 + s.length > 0 ? s.sequence[p->K - 1 + s.length - 1] : -1;
    return s;
}

/* dA/dweight[k] at (t, q): 1 where token t multiplies column q of xe by weight[k] and both are of the same sequence. */
static double tap(const problem *p, const segment *s, int t, int q, int k)
{
    const int32_t own_sequence = s->sequence[p->K - 1 + t];
    return q == t + k && own_sequence >= 0 && s->sequence[q] == own_sequence;
}

static double pick(const problem *p, const segment *s, int i, int q)
{
    (void)p;
    return q == s->length + i && s->last >= 0 && s->sequence[q] == s->last;
}

/* ---- forward and backward ----------------------------------------------------------------------------- */

typedef struct tensors {
    array x, weight, bias, state, dy, dfinal, y, final, dx, dweight, dbias, dstate;
} tensors;

/* The expected values, and for each the sum of the absolute terms. */
typedef struct expected {
    double y[MAX_B][MAX_D][MAX_T], final[MAX_N][MAX_D][MAX_K], dx[MAX_B][MAX_D][MAX_T], dstate[MAX_N][MAX_D][MAX_K];
    double dweight[MAX_D][MAX_K], dbias[MAX_D], dweight_terms[MAX_D][MAX_K], dbias_terms[MAX_D];
} expected;

static void expect_segment(const problem *p, tensors *v, int n, int d, bool with_dfinal, expected *e)
{
    const segment s = segment_of(p, n);
    const int width = p->K - 1 + s.length;
    double xe[MAX_P], A[MAX_T][MAX_P], g[MAX_T];
    for (int q = 0; q < width; q++)
        xe[q] = q >= p->K - 1      ? *at(&v->x, s.b, d, s.first + q - (p->K - 1))
                : p->initial_state ? *at(&v->state, s.state, d, q)
                                   : 0;
    for (int t = 0; t < s.length; t++)
        for (int q = 0; q < width; q++) {
            A[t][q] = 0;
            for (int k = 0; k < p->K; k++)
                A[t][q] += *at(&v->weight, d, k, 0) * tap(p, &s, t, q, k);
        }
    for (int t = 0; t < s.length; t++) {
        const bool padding = s.sequence[p->K - 1 + t] < 0;
        double z = p->bias ? *at(&v->bias, d, 0, 0) : 0;
        for (int q = 0; q < width; q++)
            z += A[t][q] * xe[q];
        e->y[s.b][d][s.first + t] = padding ? 0 : p->silu ? silu(z) : z;
        g[t] = padding ? 0 : *at(&v->dy, s.b, d, s.first + t) * (p->silu ? silu_slope(z) : 1);
        e->dbias[d] += g[t];
        e->dbias_terms[d] += fabs(g[t]);
        for (int k = 0; k < p->K; k++)
            for (int q = 0; q < width; q++) {
                e->dweight[d][k] += g[t] * tap(p, &s, t, q, k) * xe[q];
                e->dweight_terms[d][k] += fabs(g[t] * tap(p, &s, t, q, k) * xe[q]);
            }
    }
    for (int i = 0; i < p->K - 1; i++)
        for (int q = 0; q < width; q++)
            e->final[s.state][d][i] += pick(p, &s, i, q) * xe[q];
    for (int q = 0; q < width; q++) {
        double dxe = 0;
        for (int t = 0; t < s.length; t++)
            dxe += A[t][q] * g[t];
        for (int i = 0; with_dfinal && i < p->K - 1; i++)
            dxe += pick(p, &s, i, q) * *at(&v->dfinal, s.state, d, i);
        if (q < p->K - 1)
            e->dstate[s.state][d][q] = dxe;
        else
            e->dx[s.b][d][s.first + q - (p->K - 1)] = dxe;
    }
}

static problem random_problem(uint64_t *seed)
{
    problem p = {.B = (int)random_int(seed, 0, MAX_B), .D = (int)random_int(seed, 1, MAX_D)};
    p.T = (int)(random_int(seed, 0, 1) ? random_int(seed, 0, MAX_T) : random_int(seed, 0, 6));
    p.K = (int)random_int(seed, 1, MAX_K);
    p.packing = (packing)random_int(seed, 0, 2);
    p.silu = random_int(seed, 0, 1);
    p.bias = random_int(seed, 0, 1);
    p.initial_state = random_int(seed, 0, 1);
    p.N = p.B;
    if (p.packing == CU_SEQLENS) {
        p.B = 1;
        p.N = (int)random_int(seed, 0, MAX_N);
        for (int n = 1; n <= p.N; n++) {
            const int left = p.T - p.cu_seqlens[n - 1];
            p.cu_seqlens[n] = p.cu_seqlens[n - 1] + (int32_t)random_int(seed, 0, left < 12 ? left : 12);
        }
    }
    /* Runs of sequence ids. An id may occur in several runs. Some runs are padding. */
    for (int b = 0; p.packing == SEQ_IDX && b < p.B; b++)
        for (int t = 0, id = (int)random_int(seed, -1, 2); t < p.T; t++) {
            if (random_int(seed, 0, 4) == 0)
                id = (int)random_int(seed, -2, 2);
            p.seq_idx[b][t] = id;
        }
    return p;
}

static void shape_tensors(const problem *p, tensors *v, uint64_t *seed)
{
    array *const like_x[] = {&v->x, &v->dy, &v->y, &v->dx}, *const like_state[] = {&v->state, &v->dfinal, &v->final,
                                                                                   &v->dstate};
    for (size_t i = 0; i < 4; i++) {
        shape_array(like_x[i], seed, 3, p->B, p->D, p->T);
        shape_array(like_state[i], seed, 3, p->N, p->D, p->K - 1);
    }
    shape_array(&v->weight, seed, 2, p->D, p->K, 0);
    shape_array(&v->dweight, seed, 2, p->D, p->K, 0);
    shape_array(&v->bias, seed, 1, p->D, 0, 0);
    shape_array(&v->dbias, seed, 1, p->D, 0, 0);
    array *const filled[] = {&v->x, &v->dy, &v->state, &v->dfinal, &v->weight, &v->bias, &v->dweight, &v->dbias};
    for (size_t i = 0; i < COUNT(filled); i++)
        fill(filled[i], seed);
}

static void describe(const problem *p, const char *what, int i, int j, int k, double value, double wanted)
{
    print_error("%s[%d,%d,%d] is %.17g, expected %.17g: B=%d D=%d T=%d K=%d N=%d packing %d silu %d bias %d state %d\n",
                what, i, j, k, value, wanted, p->B, p->D, p->T, p->K, p->N, (int)p->packing, p->silu, p->bias,
                p->initial_state);
    fail();
}

#define COMPARE(p, v, name, i, j, k, wanted, magnitude)                        \
    do {                                                                       \
        const double actual_ = *at(&(v)->name, i, j, k), expected_ = (wanted); \
        if (!close_to(actual_, expected_, magnitude))                          \
            describe(p, #name, i, j, k, actual_, expected_);                   \
    } while (0)

static void forward_and_backward(void **state)
{
    (void)state;
    static tensors v;
    static expected e;
    cot_queue *queues[2] = {make_queue(NULL, 1), make_queue(NULL, 2)};
    uint64_t seed = 1;
    for (int round = 0; round < 1500; round++) {
        const problem p = random_problem(&seed);
        const bool dfinal = random_int(&seed, 0, 1);
        const int accumulate = (int)random_int(&seed, 0, 1);
        const unsigned wanted = (unsigned)random_int(&seed, 0, 3) ? 63 : (unsigned)random_int(&seed, 0, 63);
        shape_tensors(&p, &v, &seed);
        memset(&e, 0, sizeof e);
        for (int d = 0; d < p.D; d++)
            for (int n = 0; n < p.N; n++)
                expect_segment(&p, &v, n, d, dfinal, &e);
        for (int d = 0; accumulate && d < p.D; d++) {
            e.dbias[d] += *at(&v.dbias, d, 0, 0);
            for (int k = 0; k < p.K; k++)
                e.dweight[d][k] += *at(&v.dweight, d, k, 0);
        }

        cot_causal_conv1d_forward_args f;
        COT_INIT(&f);
        f.activation = p.silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
        f.x = v.x.view;
        f.weight = v.weight.view;
        if (p.bias)
            f.bias = v.bias.view;
        if (p.initial_state)
            f.initial_state = v.state.view;
        if (p.packing == SEQ_IDX) {
            f.seq_idx = cot_tensor_contiguous((void *)p.seq_idx, COT_I32, 2, (int64_t[]){p.B, p.T});
            f.seq_idx.stride[0] = MAX_T;
        }
        if (p.packing == CU_SEQLENS)
            f.cu_seqlens = cot_tensor_contiguous((void *)p.cu_seqlens, COT_I32, 1, (int64_t[]){p.N + 1});
        if (wanted & 1)
            f.y = v.y.view;
        if (wanted & 2)
            f.final_state = v.final.view;
        assert_ok(cot_causal_conv1d_forward(queues[round % 2], &f));

        cot_causal_conv1d_backward_args g;
        COT_INIT(&g);
        g.activation = f.activation;
        g.accumulate = accumulate;
        g.x = f.x;
        g.weight = f.weight;
        g.bias = f.bias;
        g.initial_state = f.initial_state;
        g.seq_idx = f.seq_idx;
        g.cu_seqlens = f.cu_seqlens;
        g.dy = v.dy.view;
        if (dfinal)
            g.dfinal_state = v.dfinal.view;
        if (wanted & 4)
            g.dx = v.dx.view;
        if (wanted & 8)
            g.dweight = v.dweight.view;
        if (wanted & 16)
            g.dbias = v.dbias.view;
        if (wanted & 32)
            g.dinitial_state = v.dstate.view;
        assert_ok(cot_causal_conv1d_backward(queues[round % 2], &g));

        const double nonzero_total = 2.0 * 2 * MAX_K; /* an upper bound of the absolute terms of any element below */
        for (int b = 0; b < p.B; b++)
            for (int d = 0; d < p.D; d++)
                for (int t = 0; t < p.T; t++) {
                    COMPARE(&p, &v, y, b, d, t, wanted & 1 ? e.y[b][d][t] : gap, nonzero_total);
                    COMPARE(&p, &v, dx, b, d, t, wanted & 4 ? e.dx[b][d][t] : gap, nonzero_total);
                }
        for (int n = 0; n < p.N; n++)
            for (int d = 0; d < p.D; d++)
                for (int i = 0; i < p.K - 1; i++) {
                    COMPARE(&p, &v, final, n, d, i, wanted & 2 ? e.final[n][d][i] : gap, 0);
                    COMPARE(&p, &v, dstate, n, d, i, wanted & 32 ? e.dstate[n][d][i] : gap, nonzero_total);
                }
        for (int d = 0; d < p.D; d++) {
            if (wanted & 16)
                COMPARE(&p, &v, dbias, d, 0, 0, e.dbias[d], e.dbias_terms[d]);
            for (int k = 0; (wanted & 8) && k < p.K; k++)
                COMPARE(&p, &v, dweight, d, k, 0, e.dweight[d][k], e.dweight_terms[d][k]);
        }
        array *const outputs[] = {&v.y, &v.final, &v.dx, &v.dweight, &v.dbias, &v.dstate};
        for (size_t i = 0; i < COUNT(outputs); i++)
            assert_true(gaps_are_unchanged(outputs[i]));
    }
    cot_queue_destroy(queues[0]);
    cot_queue_destroy(queues[1]);
}

/* ---- update ------------------------------------------------------------------------------------------- */

static int modulo(int64_t a, int b)
{
    return (int)((a % b + b) % b);
}

/* The input at position q. The first new token of row b has position `start`; earlier inputs are in the state. A
 * plain state holds the latest S inputs, oldest first. A ring holds position q in column q mod S. */
static double input_of(array *x, array *before, bool ring, int b, int d, int row, int S, int64_t start, int64_t q)
{
    if (q >= start)
        return *at(x, b, d, (int)(q - start));
    return *at(before, row, d, ring ? modulo(q, S) : (int)(q - start + S));
}

static void update(void **state)
{
    (void)state;
    static array x, weight, bias, conv_state, before, y;
    cot_queue *queue = NULL;
    assert_ok(cot_queue_create(NULL, &queue));
    uint64_t seed = 2;
    for (int round = 0; round < 1500; round++) {
        const int B = (int)random_int(&seed, 0, MAX_B), D = (int)random_int(&seed, 1, MAX_D);
        const int T = random_int(&seed, 0, 2) == 0 ? 1 : (int)random_int(&seed, 0, MAX_T);
        const bool two_axes = T == 1 && random_int(&seed, 0, 1);
        const int K = (int)random_int(&seed, 1, MAX_K), S = (int)random_int(&seed, K - 1, MAX_S);
        const int N = (int)random_int(&seed, B, MAX_N);
        const bool with_silu = random_int(&seed, 0, 1), with_bias = random_int(&seed, 0, 1);
        const bool ring = random_int(&seed, 0, 1) && S > 0, indexed = random_int(&seed, 0, 1);
        int32_t starts[MAX_B], rows[MAX_B];
        for (int b = 0; b < B; b++) {
            starts[b] = (int32_t)random_int(&seed, 0, random_int(&seed, 0, 1) ? 20 : INT32_MAX);
            rows[b] = indexed ? (int32_t)((b + round) % (N > 0 ? N : 1)) : b; /* distinct, because B <= N */
            if (indexed && random_int(&seed, 0, 3) == 0)
                rows[b] = (int32_t)random_int(&seed, INT32_MIN, -1);
        }
        shape_array(&x, &seed, two_axes ? 2 : 3, B, D, T);
        shape_array(&y, &seed, two_axes ? 2 : 3, B, D, T);
        shape_array(&weight, &seed, 2, D, K, 0);
        shape_array(&bias, &seed, 1, D, 0, 0);
        shape_array(&conv_state, &seed, 3, N, D, S);
        fill(&x, &seed);
        fill(&weight, &seed);
        fill(&bias, &seed);
        fill(&conv_state, &seed);
        before = conv_state;
        before.view.data = before.data + ((double *)conv_state.view.data - conv_state.data);

        cot_causal_conv1d_update_args u;
        COT_INIT(&u);
        u.activation = with_silu ? COT_ACTIVATION_SILU : COT_ACTIVATION_NONE;
        u.x = x.view;
        u.weight = weight.view;
        if (with_bias)
            u.bias = bias.view;
        u.conv_state = conv_state.view;
        if (ring)
            u.cache_seqlens = cot_tensor_contiguous(starts, COT_I32, 1, (int64_t[]){B});
        if (indexed)
            u.conv_state_indices = cot_tensor_contiguous(rows, COT_I32, 1, (int64_t[]){B});
        u.y = y.view;
        assert_ok(cot_causal_conv1d_update(queue, &u));

        const problem p = {.B = B, .D = D, .T = T, .K = K, .N = N, .silu = with_silu, .bias = with_bias};
        static bool is_written[MAX_N][MAX_D][MAX_S];
        memset(is_written, 0, sizeof is_written);
        for (int b = 0; b < B; b++)
            for (int d = 0; d < D; d++) {
                const int64_t start = ring ? starts[b] : 0;
                const int row = rows[b];
                for (int t = 0; t < T; t++) {
                    double z = with_bias ? *at(&bias, d, 0, 0) : 0;
                    for (int k = 0; row >= 0 && k < K; k++)
                        z += *at(&weight, d, k, 0) *
                             input_of(&x, &before, ring, b, d, row, S, start, start + t - (K - 1) + k);
                    const double wanted = row < 0 ? 0 : with_silu ? silu(z) : z, value = *at(&y, b, d, t);
                    if (!close_to(value, wanted, 4 * MAX_K))
                        describe(&p, ring ? "y (ring)" : "y (update)", b, d, t, value, wanted);
                }
                /* After the call, the state holds the S positions before the next token. */
                for (int i = 0; row >= 0 && i < S; i++) {
                    const int64_t q = start + T - S + i;
                    const int column = ring ? modulo(q, S) : i;
                    const double wanted = input_of(&x, &before, ring, b, d, row, S, start, q);
                    is_written[row][d][column] = true;
                    if (*at(&conv_state, row, d, column) != wanted)
                        describe(&p, "conv_state", row, d, column, *at(&conv_state, row, d, column), wanted);
                }
            }
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++)
                for (int i = 0; i < S; i++)
                    if (!is_written[n][d][i])
                        assert_true(*at(&conv_state, n, d, i) == *at(&before, n, d, i));
        assert_true(gaps_are_unchanged(&y));
        assert_true(gaps_are_unchanged(&conv_state));
    }
    cot_queue_destroy(queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_and_backward),
        cmocka_unit_test(update),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
