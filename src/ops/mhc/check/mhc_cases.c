/* SPDX-License-Identifier: Apache-2.0
 *
 * mhc_cases.c: the cases that check, bench and the gradient check run, for the four ops, and how their
 * random inputs are changed. */
#include "mhc_case_build.h"
#include "mhc_ref.h"

#include "cases/draw.h"

#include <math.h>
#include <stdlib.h>

enum { CHECKED = COT_CASE_CHECK | COT_CASE_CHECK_CUDA };

static const cot_dtype float_dtypes[] = {COT_F32, COT_F16, COT_BF16, COT_F64};

/* ---- case families ----------------------------------------------------------------------------------- */

static void emit(cot_case_visitor *v, const mhc_case_params *p)
{
    cot_case c;
    mhc_case_build(p, &c);
    cot_visit_case(v, &c);
}

static void draw_features(mhc_case_params *p, uint64_t *state)
{
    p->gamma = cot_draw_bool(state);
    p->wide_phi = cot_draw_below(state, 3) == 0;
    p->fused = cot_draw_bool(state);
    p->dh_res_logits = cot_draw_bool(state);
    p->dx_post = cot_draw_bool(state);
    p->accumulate = p->direction == COT_MHC_BACKWARD && cot_draw_bool(state);
    p->no_data_gradient = p->direction == COT_MHC_BACKWARD && cot_draw_below(state, 10) == 0;
    p->no_parameter_gradient = p->direction == COT_MHC_BACKWARD && cot_draw_below(state, 10) == 0;
    p->only_saved = p->direction == COT_MHC_FORWARD && cot_draw_below(state, 10) == 0;
    p->iterations = cot_draw_below(state, 4) == 0 ? 1 + cot_draw_below(state, 5) : 20;
    p->wide_logits = cot_draw_below(state, 3) == 0;
    p->no_eps = !p->wide_logits && cot_draw_below(state, 4) == 0;
    p->out_in = cot_draw_bool(state);
    if (p->op != POST_PRE) /* the cases of the other ops stay the same */
        return;
    p->saved_y = p->direction == COT_MHC_BACKWARD && cot_draw_bool(state);
    p->only_y = p->direction == COT_MHC_FORWARD && cot_draw_below(state, 4) == 0;
}

/* Every n and D, with token counts around the kernels' tiles. The oracle's work, about n*n*n*D*tokens, bounds the
 * sizes. */
static void sweep_sizes(cot_case_visitor *v, int op, int direction)
{
    static const int64_t streams[] = {1, 2, 3, 4, 5, 6, 7, 8, 11}, widths[] = {1, 8, 64, 129, 513, 1280, 4096, 7168};
    static const int64_t tokens[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 130, 300, 1025};
    uint64_t state = 1 + (uint64_t)(op * 2 + direction);
    int64_t index = 0;
    for (size_t s = 0; s < sizeof streams / sizeof *streams; s++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
                mhc_case_params p = {
                    .op = op, .direction = direction, .uses = COT_CASE_CHECK, .n = streams[s], .D = widths[w]};
                const double n = (double)p.n, x = (double)tokens[i] * n * (double)p.D;
                const double work = op == PRE        ? x * (n * n + 2 * n)
                                    : op == POST     ? 10 * x * (n + 1)
                                    : op == POST_PRE ? x * (n * n + 12 * n)
                                                     : 5000 * x / (double)p.D;
                if ((op == SINKHORN && p.D != 1) || work > 3e6 ||
                    (work > 1e5 && cot_draw_below(&state, work > 5e5 ? 12 : 3) != 0))
                    continue;
                p.B = tokens[i] % 2 == 0 ? 2 : tokens[i] % 3 == 0 ? 3 : 1;
                p.T = tokens[i] / p.B;
                p.layout = index % 4 == 3 ? (mhc_case_layout)cot_draw_below(&state, LAYOUT_COUNT) : TOKEN_MAJOR;
                p.dtype = float_dtypes[op == SINKHORN                    ? 3 * (cot_draw_below(&state, 5) == 0)
                                       : cot_draw_below(&state, 10) == 0 ? 3
                                                                         : index % 3];
                p.seed = cot_draw(&state);
                draw_features(&p, &state);
                if (work < 2e5 && index % 6 == 0)
                    p.uses |= COT_CASE_QUICK;
                index++;
                emit(v, &p);
            }
}

/* Shapes of real models: few tokens for a large D, many tokens for a small D. */
static void large_shapes(cot_case_visitor *v, int op, int direction)
{
    static const int64_t shapes[][3] = {/* n, D, tokens */
                                        {4, 1280, 65}, {4, 4096, 17}, {4, 7168, 5}, {8, 4096, 2},  {2, 7168, 33},
                                        {3, 1280, 64}, {1, 4096, 65}, {4, 8, 8192}, {2, 64, 8192}, {8, 8, 2048}};
    uint64_t state = 101 + (uint64_t)(op * 2 + direction);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        mhc_case_params p = {
            .op = op, .direction = direction, .uses = COT_CASE_CHECK, .n = shapes[i][0], .D = shapes[i][1]};
        p.B = 1;
        p.T = shapes[i][2];
        p.dtype = float_dtypes[op == SINKHORN ? 0 : (i + 2) % 3];
        p.seed = cot_draw(&state);
        draw_features(&p, &state);
        p.no_data_gradient = p.no_parameter_gradient = p.only_saved = p.only_y = false;
        emit(v, &p);
    }
}

/* Enough tokens for the rings of the Hopper kernels to wrap around, for every number of blocks of a cluster. */
static void many_tiles(cot_case_visitor *v, int op, int direction)
{
    enum { ALL = COT_CASE_CHECK, GPU = COT_CASE_CHECK_CUDA };
    static const struct {
        int64_t n, D, tokens;
        cot_dtype dtype;
        int uses;
    } shapes[] = {
        {4, 4096, 1, COT_BF16, ALL},    {4, 4096, 40, COT_BF16, ALL},   {4, 4096, 129, COT_BF16, ALL},
        {4, 512, 800, COT_BF16, ALL},   {4, 1280, 130, COT_BF16, ALL},  {4, 64, 900, COT_BF16, ALL},
        {4, 7168, 1, COT_F16, ALL},     {4, 7168, 2, COT_BF16, ALL},    {4, 7168, 65, COT_BF16, ALL},
        {4, 4096, 63, COT_F16, ALL},    {4, 1280, 130, COT_F16, ALL},   {4, 64, 900, COT_F16, ALL},
        {4, 17408, 120, COT_BF16, ALL}, {4, 7168, 64, COT_F16, ALL},    {4, 64, 3000, COT_BF16, GPU},
        {4, 1024, 200, COT_F16, GPU},   {4, 768, 33, COT_BF16, GPU},    {4, 1088, 1500, COT_BF16, GPU},
        {4, 2048, 100, COT_F16, GPU},   {4, 1024, 2000, COT_BF16, GPU}, {4, 2048, 500, COT_BF16, GPU},
        {4, 192, 4000, COT_BF16, GPU},  {4, 640, 1000, COT_BF16, GPU},  {4, 2048, 300, COT_F32, GPU},
        {4, 768, 2000, COT_F32, GPU},   {4, 4096, 500, COT_F32, GPU},   {2, 8192, 300, COT_BF16, GPU},
        {2, 4096, 500, COT_F16, GPU},   {2, 1024, 3000, COT_BF16, GPU}, {2, 2048, 1000, COT_F32, GPU},
        {2, 8192, 200, COT_F32, GPU},   {2, 3584, 700, COT_F32, GPU},   {8, 4096, 333, COT_BF16, GPU},
        {8, 1024, 1300, COT_BF16, GPU}, {4, 4096, 60, COT_F32, ALL},    {4, 1280, 63, COT_F32, ALL},
        {4, 320, 300, COT_F32, ALL},    {2, 8192, 33, COT_BF16, ALL},   {2, 2560, 130, COT_BF16, ALL},
        {2, 1920, 300, COT_BF16, ALL},  {2, 4160, 40, COT_F16, ALL},    {2, 832, 200, COT_F32, ALL},
        {8, 192, 150, COT_BF16, ALL},   {8, 64, 5000, COT_BF16, ALL},   {8, 64, 130, COT_BF16, ALL},
        {8, 128, 64, COT_BF16, ALL},    {4, 4096, 64, COT_BF16, ALL},   {2, 8192, 65, COT_F16, ALL},
        {4, 4096, 600, COT_BF16, ALL},  {4, 7168, 600, COT_BF16, GPU},  {4, 7168, 500, COT_F16, GPU},
        {4, 5120, 400, COT_BF16, GPU},  {4, 4160, 500, COT_BF16, GPU},  {2, 8192, 700, COT_BF16, GPU},
        {2, 4096, 1300, COT_BF16, GPU}, {2, 8192, 300, COT_F32, GPU},
    };
    uint64_t state = 301 + (uint64_t)(op * 2 + direction);
    for (size_t i = 0; op != SINKHORN && i < sizeof shapes / sizeof *shapes; i++) {
        mhc_case_params p = {.op = op, .direction = direction, .dtype = shapes[i].dtype};
        p.n = shapes[i].n;
        p.uses = shapes[i].uses;
        p.B = 1 + (int64_t)(i & 1 & (shapes[i].tokens % 2 == 0));
        p.D = shapes[i].D;
        p.T = shapes[i].tokens / p.B;
        p.seed = cot_draw(&state);
        draw_features(&p, &state);
        p.no_data_gradient = p.no_parameter_gradient = p.only_saved = p.only_y = false;
        emit(v, &p);
    }
}

/* Sizes that finite differences can afford, with every combination of the options that a gradient depends on. */
static void gradients(cot_case_visitor *v, int op)
{
    uint64_t state = 201 + (uint64_t)op;
    for (int bits = 0; bits < 16; bits++) {
        mhc_case_params p = {
            .op = op, .direction = COT_MHC_BACKWARD, .dtype = COT_F64, .B = 1 + bits % 2, .seed = cot_draw(&state)};
        p.uses = COT_CASE_CHECK | COT_CASE_QUICK | COT_CASE_GRADIENT;
        p.n = 1 + cot_draw_below(&state, 4);
        p.D = 1 + cot_draw_below(&state, 5);
        p.T = 1 + cot_draw_below(&state, 2);
        p.layout = (mhc_case_layout)(bits % LAYOUT_COUNT);
        p.gamma = bits & 1, p.fused = bits >> 1 & 1, p.dh_res_logits = bits >> 2 & 1, p.wide_phi = bits >> 3 & 1;
        p.iterations = bits & 4 ? 20 : 1 + bits % 3;
        p.no_eps = bits & 1, p.out_in = bits & 2;
        p.dx_post = p.op == POST_PRE, p.saved_y = bits >> 2 & 1; /* dy; pre's forward has no output for dx_post */
        emit(v, &p);
    }
}

/* Cases for faults that the other cases do not show. An eps of 1e-6 is so small that a missing eps goes unnoticed. A
 * maximum may skip a column whose logits are not larger than the others. Rows of up to 4096 columns are summed in one
 * run. */
static void rare_faults(cot_case_visitor *v, int op, int direction)
{
    static const int64_t streams[] = {1, 2, 3, 4, 5, 6, 7, 8, 11};
    uint64_t state = 401 + (uint64_t)(op * 2 + direction);
    for (size_t s = 0; s < sizeof streams / sizeof *streams; s++) {
        mhc_case_params p = {
            .op = op, .direction = direction, .B = 1, .T = 3, .n = streams[s], .D = 64, .iterations = 3};
        p.uses = COT_CASE_CHECK | COT_CASE_QUICK;
        p.seed = cot_draw(&state);
        p.dtype = op == SINKHORN ? COT_F32 : float_dtypes[s % 3];
        p.large_eps = p.fused = true;
        if (op == POST) {
            p.large_eps = false, p.T = 1, p.D = 8448;
            if (p.n % 3 != 2)
                continue;
        }
        emit(v, &p);
        if (op == POST_PRE && p.n == 4) { /* a special value, in blocks with columns beyond D */
            p.dtype = COT_BF16;
            emit(v, &p);
        }
        p.large_eps = false, p.peaks = true, p.T = 2 * p.n; /* a peak in every column of every row */
        if (op == SINKHORN)
            emit(v, &p);
    }
}

static void bench_shapes(cot_case_visitor *v, int op, int direction)
{
    enum { CPU = COT_CASE_BENCH, GPU = COT_CASE_BENCH_CUDA };
    static const struct {
        int64_t tokens, n, D;
        cot_dtype dtype;
        unsigned uses;
    } shapes[] = {
        {16384, 4, 1024, COT_F32, CPU}, {16384, 4, 1024, COT_BF16, CPU}, /* larger than the caches */
        {2048, 4, 4096, COT_BF16, CPU}, {512, 4, 1024, COT_F32, CPU},    {512, 4, 1024, COT_BF16, CPU},
        {2048, 2, 1024, COT_BF16, CPU}, {1024, 8, 1024, COT_BF16, CPU},  {8192, 4, 4096, COT_BF16, GPU},
        {8192, 4, 7168, COT_BF16, GPU}, {8192, 4, 1280, COT_BF16, GPU},  {40, 4, 4096, COT_BF16, GPU},
        {8192, 2, 4096, COT_BF16, GPU}, {4096, 8, 4096, COT_BF16, GPU},  {8192, 4, 4096, COT_F16, GPU},
        {8192, 4, 4096, COT_F32, GPU},  {16384, 4, 768, COT_BF16, GPU},  {8192, 4, 2048, COT_BF16, GPU},
        {8192, 2, 2048, COT_BF16, GPU}, {8192, 4, 2048, COT_F32, GPU},   {8192, 2, 4096, COT_F32, GPU},
    };
    const size_t first_of_gpu = 7, wide = 8; /* D = 7168 */
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        mhc_case_params p = {.op = op, .direction = direction, .uses = shapes[i].uses, .B = 1, .T = shapes[i].tokens};
        p.n = shapes[i].n, p.D = shapes[i].D, p.dtype = shapes[i].dtype;
        p.iterations = 20;
        p.seed = 41;
        if (op == SINKHORN && (p.uses == CPU ? p.dtype != COT_F32 && p.n == 4 : p.D != 4096 || p.dtype != COT_BF16))
            continue;
        p.dtype = op == SINKHORN ? COT_F32 : p.dtype;
        p.dh_res_logits = op != POST_PRE;
        p.fused = p.dx_post = op == POST_PRE; /* between two layers */
        emit(v, &p);
        const bool has_two_rows = i == 0 || i == first_of_gpu || i == wide;
        if (op == POST_PRE && direction == COT_MHC_BACKWARD && has_two_rows) {
            p.saved_y = true;
            emit(v, &p);
        }
        if (op != PRE || !has_two_rows)
            continue;
        p.dh_res_logits = false,
        p.fused = p.dx_post = true; /* the fused layer: Sinkhorn and dx_post in the same call */
        emit(v, &p);
    }
}

static void visit_cases(int op, bool (*visit)(void *, const cot_case *), void *context)
{
    cot_case_visitor v = {visit, context, false};
    gradients(&v, op);
    for (int direction = COT_MHC_FORWARD; direction <= COT_MHC_BACKWARD; direction++) {
        sweep_sizes(&v, op, direction);
        large_shapes(&v, op, direction);
        many_tiles(&v, op, direction);
        rare_faults(&v, op, direction);
        bench_shapes(&v, op, direction);
    }
}

/* ---- inputs ------------------------------------------------------------------------------------------- */

static void scale_values(double *data, int64_t count, double factor)
{
    for (int64_t i = 0; data != NULL && i < count; i++)
        data[i] *= factor;
}

static int find_field(const cot_direction *direction, const char *name)
{
    for (int field = 0; field < direction->field_count; field++)
        if (strcmp(direction->fields[field].name, name) == 0)
            return field;
    return -1;
}

/* Computes by the oracle of `forward` its outputs that are inputs of `backward`: the fields of the same name. `args`
 * are the forward's options, and an output that the oracle needs and `backward` lacks. */
static void prepare_saved(const cot_case *c, const cot_direction *forward, const cot_direction *backward,
                          void (*oracle)(const void *, void *), void *args, double *const values[])
{
    _Alignas(16) char magnitudes[COT_MAX_ARGS];
    double *sizes[COT_MAX_FIELDS] = {0};
    for (int f = 0; f < forward->field_count; f++) {
        const int source = find_field(backward, forward->fields[f].name);
        cot_tensor *tensor = cot_field_tensor(&forward->fields[f], args);
        if (source >= 0 && values[source] != NULL) {
            const cot_tensor *shape_source = cot_field_tensor(&backward->fields[source], (void *)c->args);
            *tensor = cot_tensor_contiguous(values[source], COT_F64, shape_source->rank, shape_source->shape);
        }
        if (forward->fields[f].role == COT_OUTPUT && cot_is_present(tensor))
            sizes[f] = allocate((size_t)cot_elements(tensor), sizeof(double));
    }
    memcpy(magnitudes, args, forward->args_size);
    for (int f = 0; f < forward->field_count; f++)
        if (sizes[f] != NULL)
            cot_field_tensor(&forward->fields[f], magnitudes)->data = sizes[f];
    oracle(args, magnitudes);
    for (int f = 0; f < forward->field_count; f++)
        free(sizes[f]);
}

static void prepare_pre(const cot_case *c, double *const values[])
{
    const cot_direction *direction = &cot_mhc_pre_directions[c->direction];
    const int phi = find_field(direction, "phi");
    const cot_tensor *tensor = cot_field_tensor(&direction->fields[phi], (void *)c->args);
    if (strstr(c->options, "phi~1/nD") != NULL)
        scale_values(values[phi], cot_elements(tensor), 1 / sqrt((double)tensor->shape[1]));
    /* Timing does not depend on these values, and the oracle takes seconds for them at the benchmark's sizes. */
    if (c->direction == COT_MHC_BACKWARD && (c->uses & CHECKED)) {
        cot_mhc_pre_forward_args args;
        COT_MHC_PRE_FORWARD_INIT(&args);
        prepare_saved(c, &cot_mhc_pre_directions[COT_MHC_FORWARD], direction, cot_mhc_pre_oracles[COT_MHC_FORWARD],
                      &args, values);
    }
}

/* Rounds to multiples of `unit` within the limits. NaN stays NaN. */
static void quantize(double *data, int64_t count, double unit, double lowest, double highest)
{
    for (int64_t i = 0; i < count; i++) {
        const double value = rint(data[i] / unit) * unit;
        data[i] = isfinite(value) ? fmin(fmax(value, lowest), highest) : data[i];
    }
}

/* Chooses inputs of which y is exact in f16 and bf16: up to 12 products that are multiples of 1/8 with an absolute
 * value of at most 1.75. The oracle does not round y. A kernel rounds its float32 y, and near the middle of two numbers
 * of x's dtype it may choose another one than the rounded y of the oracle. One such element is beyond the tolerance of
 * the sums that are computed from y. */
static void make_y_exact(const cot_case *c, const cot_direction *direction, double *const values[])
{
    static const char *const streams[] = {"x", "f"}, *const coefficients[] = {"h_post", "h_res"};
    for (int i = 0; i < 2; i++) {
        const int field = find_field(direction, streams[i]), coefficient = find_field(direction, coefficients[i]);
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[field], (void *)c->args);
        quantize(values[field], cot_elements(tensor), 0.25, -1.75, 1.75);
        tensor = cot_field_tensor(&direction->fields[coefficient], (void *)c->args);
        quantize(values[coefficient], cot_elements(tensor), 0.5, -0.5, 1);
    }
}

static void prepare_post_pre_saved(const cot_case *c, double *const values[])
{
    const cot_mhc_post_pre_backward_args *b = (const cot_mhc_post_pre_backward_args *)c->args;
    const cot_direction *forward = &cot_mhc_post_pre_directions[COT_MHC_FORWARD];
    cot_mhc_post_pre_forward_args args;
    COT_MHC_POST_PRE_FORWARD_INIT(&args);
    args.h_res_is_out_in = b->h_res_is_out_in;
    const size_t elements = (size_t)cot_elements(&b->x);
    double *y = cot_is_present(&b->y) ? NULL : allocate(elements, sizeof *y);
    if (y != NULL)
        args.y = cot_tensor_contiguous(y, COT_F64, 4, b->x.shape);
    prepare_saved(c, forward, &cot_mhc_post_pre_directions[COT_MHC_BACKWARD], cot_mhc_post_pre_oracles[COT_MHC_FORWARD],
                  &args, values);
    free(y);
}

static void prepare_post_pre(const cot_case *c, double *const values[])
{
    const cot_direction *direction = &cot_mhc_post_pre_directions[c->direction];
    const int phi = find_field(direction, "phi"), h_mix = find_field(direction, "h_mix");
    const cot_tensor *tensor = cot_field_tensor(&direction->fields[phi], (void *)c->args);
    if (strstr(c->options, "phi~1/nD") != NULL)
        scale_values(values[phi], cot_elements(tensor), 1 / sqrt((double)tensor->shape[1]));
    if (!(c->uses & CHECKED)) /* as in prepare_pre */
        return;
    const cot_tensor *x = cot_field_tensor(&direction->fields[find_field(direction, "x")], (void *)c->args);
    const bool given = c->direction == COT_MHC_BACKWARD && values[find_field(direction, "y")] != NULL;
    const bool uses_y = cot_is_present(cot_field_tensor(&direction->fields[h_mix], (void *)c->args));
    if ((x->dtype == COT_F16 || x->dtype == COT_BF16) && uses_y && !given)
        make_y_exact(c, direction, values);
    if (c->direction == COT_MHC_BACKWARD)
        prepare_post_pre_saved(c, values);
}

static void prepare_sinkhorn(const cot_case *c, double *const values[])
{
    const cot_tensor *logits = cot_field_tensor(&cot_mhc_sinkhorn_directions[c->direction].fields[0], (void *)c->args);
    if (strstr(c->options, "wide") != NULL) /* beyond 80 in both directions */
        scale_values(values[0], cot_elements(logits), 25);
    const int64_t n = logits->shape[2];
    for (int64_t row = 0; strstr(c->options, "peaks") != NULL && row < cot_elements(logits) / n; row++)
        values[0][row * n + (row / n + row) % n] += 200;
}

/* ---- gradients ---------------------------------------------------------------------------------------- */

static int primal(int direction)
{
    return direction == COT_MHC_BACKWARD ? COT_MHC_FORWARD : -1;
}

static void pre_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    const cot_mhc_pre_backward_args *b = args;
    cot_mhc_pre_forward_args *f = primal_args;
    COT_MHC_PRE_FORWARD_INIT(f);
    f->hc_eps = b->hc_eps;
    f->post_scale = b->post_scale;
    f->sinkhorn_eps = b->sinkhorn_eps;
    f->sinkhorn_iterations = b->sinkhorn_iterations;
}

static void sinkhorn_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    const cot_mhc_sinkhorn_backward_args *b = args;
    cot_mhc_sinkhorn_forward_args *f = primal_args;
    f->eps = b->eps;
    f->iterations = b->iterations;
}

static void post_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    ((cot_mhc_post_forward_args *)primal_args)->h_res_is_out_in =
        ((const cot_mhc_post_backward_args *)args)->h_res_is_out_in;
}

static void post_pre_options(int direction, const void *args, void *primal_args)
{
    (void)direction;
    const cot_mhc_post_pre_backward_args *b = args;
    cot_mhc_post_pre_forward_args *f = primal_args;
    COT_MHC_POST_PRE_FORWARD_INIT(f);
    f->hc_eps = b->hc_eps;
    f->post_scale = b->post_scale;
    f->sinkhorn_eps = b->sinkhorn_eps;
    f->sinkhorn_iterations = b->sinkhorn_iterations;
    f->h_res_is_out_in = b->h_res_is_out_in;
}

/* ---- one table for each op --------------------------------------------------------------------------- */

#define CASES(stem, STEM, help, prepare_)                                                       \
    static void each_##stem(bool (*visit)(void *, const cot_case *), void *context)             \
    {                                                                                           \
        visit_cases(STEM, visit, context);                                                      \
    }                                                                                           \
    static const char *parse_##stem(int direction, int count, char *const words[], cot_case *c) \
    {                                                                                           \
        return mhc_case_parse(STEM, direction, count, words, c);                                \
    }                                                                                           \
    const cot_op_cases cot_mhc_##stem##_cases = {                                               \
        .op = &cot_mhc_##stem##_op,                                                             \
        .each = each_##stem,                                                                    \
        .parse = parse_##stem,                                                                  \
        .options_help = "B=1 T=2048 n=4 " help " f64, token-major stream-major slice strided",  \
        .prepare = prepare_,                                                                    \
        .oracles = cot_mhc_##stem##_oracles,                                                    \
        .primal = primal,                                                                       \
        .primal_options = stem##_options,                                                       \
    };

CASES(pre, PRE, "D=1024 iterations=20, gamma phi~1 sinkhorn eps dh_res_logits dx_post accumulate, f32 f16 bf16",
      prepare_pre)
CASES(sinkhorn, SINKHORN, "iterations=20, wide peaks eps, f32", prepare_sinkhorn)
CASES(post, POST, "D=1024 h_res[out,in], f32 f16 bf16", NULL)
CASES(post_pre, POST_PRE,
      "D=1024 iterations=20, gamma phi~1 sinkhorn eps dh_res_logits dy y accumulate h_res[out,in], f32 f16 bf16",
      prepare_post_pre)
