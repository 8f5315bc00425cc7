/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "bench_device.h"
#include "bench_hip.h"
#include "check/bound_case.h"
#include "ceiling.h"
#include "check/check.h"
#include "commit.h"
#include "core/cpu_features.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* A sample has as many calls as fill sample_seconds. A measurement is the median of SAMPLES samples, or of at least
 * MIN_SAMPLES after case_seconds. The samples of all kernels of a case and of the copies are interleaved, so that a
 * slow moment of the machine affects them equally. A kernel that takes longer than slow_seconds is called only once. A
 * kernel that would take longer than max_seconds, by its own estimate, is timed only if --kernel names it. Otherwise
 * attention's plain loops would take most of a benchmark of five minutes, only to show that they are 1000 times as
 * slow as its tiled kernels. */
static const double sample_seconds = 0.01, case_seconds = 12, slow_seconds = 0.5, max_seconds = 2;
enum { SAMPLES = 9, MIN_SAMPLES = 3, MAX_RUNNERS = COT_MAX_KERNELS + 2 };

void device_name(char *text, size_t size)
{
    char line[256], name[200] = "unknown processor";
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "model name : %199[^\n]", name) == 1)
            break;
    if (file != NULL)
        fclose(file);
    snprintf(text, size, "%s, %ld cores", name, sysconf(_SC_NPROCESSORS_ONLN));
}

/* ---- kernels and copies ------------------------------------------------------------------------------- */

/* A kernel of the case, or one of the two copies. */
typedef struct runner {
    const cot_choice *choice; /* NULL = a copy */
    void (*copy)(const cot_queue *, const copy_ceiling *);
    cot_queue *queue;
    int64_t calls; /* calls of one sample; 0 = the only call is already timed */
    double samples[SAMPLES];
    int count;
} runner;

typedef struct bench {
    const bench_options *options;
    const cot_op_cases *cases;
    json_t *rows;
    double clock;
    char device[256], date[16];
    int64_t total, done;
    double load_rate[COT_BF16 + 1];   /* GPU: see bench_device_case */
    int64_t selected_cases, failures; /* of all ops: selected cases, and printed messages */
} bench;

typedef struct comparison_run {
    const cot_direction *direction;
    bound_case *bound;
    copy_ceiling copy;
    runner runners[MAX_RUNNERS];
    int count;
} comparison_run;

static bool call(comparison_run *c, runner *r)
{
    if (r->choice == NULL) {
        r->copy(r->queue, &c->copy);
        return true;
    }
    return cot_op_run(c->direction, r->queue, c->bound->args) == COT_OK;
}

static double time_calls(comparison_run *c, runner *r, int64_t calls)
{
    const double begin = now();
    for (int64_t i = 0; i < calls; i++)
        if (!call(c, r))
            return NAN;
    return (now() - begin) / (double)calls;
}

static void run_interleaved(comparison_run *c, bool brief)
{
    const double begin = now();
    for (int i = 0; i < c->count; i++) { /* the first call is a warm-up, and its time decides the calls of a sample */
        runner *r = &c->runners[i];
        const double first = time_calls(c, r, 1);
        if (!(first <= slow_seconds)) {
            r->samples[r->count++] = first;
            continue;
        }
        const double once = time_calls(c, r, 1);
        r->calls = !brief && once > 0 && once < sample_seconds ? (int64_t)(sample_seconds / once) + 1 : 1;
    }
    for (int sample = 0; sample < (brief ? 1 : SAMPLES); sample++) {
        if (sample >= MIN_SAMPLES && now() - begin > case_seconds)
            break;
        for (int i = 0; i < c->count; i++) {
            runner *r = &c->runners[i];
            if (r->calls == 0)
                continue;
            if (r->calls > 1)
                call(c, r); /* a warm-up: the previous runner has left other data in the caches */
            r->samples[r->count++] = time_calls(c, r, r->calls);
        }
    }
}

/* ---- one case ----------------------------------------------------------------------------------------- */

/* Makes the inputs. If the op's cases have `prepare`, the inputs must be made as for a check, which is slow. On a GPU
 * that takes too long, and there no value makes a kernel slower. */
static void make_bound(bound_case *bound, const cot_op_cases *cases, const cot_case *c, cot_backend backend)
{
    if (cases->prepare == NULL || backend != COT_BACKEND_CPU) {
        bound_case_make_repeating(bound, cases, c);
        return;
    }
    reference ref = reference_make(cases, c);
    bound_case_make(bound, &ref, false);
    reference_free(&ref);
}

static cot_queue *make_queue(const bench *b, const cot_kernel *kernel)
{
    char forced[160] = "";
    if (kernel != NULL)
        snprintf(forced, sizeof forced, "%s=%s", b->cases->op->name, kernel->name);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = b->options->backend;
    options.threads = b->options->threads;
    options.kernels = forced;
    cot_queue *queue = NULL;
    if (cot_queue_create(&options, &queue) != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        exit(1);
    }
    return queue;
}

static void add_row(const bench *b, const cot_case *c, const measurement *m, double ceiling)
{
    const cot_direction *direction = case_direction(b->cases, c);
    const cot_tensor *first = cot_field_tensor(&direction->fields[0], (void *)c->args);
    const double seconds = m->seconds, bytes = compulsory_bytes(direction, c->args);
    const double elements = (double)cot_elements(first);
    const int threads = m->threads;
    json_t *row = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:b, s:s, s:f, s:s, s:s, s:s}",
        "op", b->cases->op->name, "direction", direction->name, "kernel", m->choice->kernel->name, "backend",
        cot_backend_name(m->choice->kernel->backend), "dtype", cot_dtype_name(first->dtype), "layout", c->layout,
        "shape", c->shape, "options", c->options, "threads", threads, "ms", 1e3 * seconds, "bytes", bytes, "flops",
        c->flops, "gbps", 1e-9 * bytes / seconds, "tflops", 1e-12 * c->flops / seconds, "ceiling", 1e-9 * ceiling,
        "ratio", bytes / seconds / ceiling, "cycles16", seconds * b->clock * threads / (elements / 16), "footprint",
        bytes, "workspace_bytes", (json_int_t)m->choice->workspace_bytes, "chosen", m->choice->chosen, "device",
        b->device, "clock_ghz", 1e-9 * b->clock, "date", b->date, "commit", COT_COMMIT, "version", cot_version());
    if (m->product_rate > 0) {
        json_object_set_new(row, "product_ceiling", json_real(1e-12 * m->product_rate));
        json_object_set_new(row, "product_ratio", json_real(c->flops / seconds / m->product_rate));
    }
    if (m->interleaved_seconds > 0)
        json_object_set_new(row, "turn_ms", json_real(1e3 * m->interleaved_seconds));
    if (m->burst_seconds > 0)
        json_object_set_new(row, "burst_ms", json_real(1e3 * m->burst_seconds));
    if (m->has_power) {
        json_object_set_new(row, "sm_mhz", json_real(m->power.sm_mhz));
        json_object_set_new(row, "watts", json_real(m->power.watts));
        json_object_set_new(row, "pj_per_flop", json_real(1e12 * m->power.watts * seconds / c->flops));
    }
    json_array_append_new(b->rows, row);
}

static bool case_selected(const bench *b, const cot_case *c)
{
    char text[256];
    describe_case(b->cases, c, text, sizeof text);
    const unsigned use = b->options->backend != COT_BACKEND_CPU ? COT_CASE_BENCH_CUDA : COT_CASE_BENCH;
    return (c->uses & use) && (b->options->only == NULL || strstr(text, b->options->only) != NULL);
}

static bool kernel_selected(const bench *b, const cot_choice *choice, int threads)
{
    const bench_options *options = b->options;
    if (choice->refusal != NULL || (options->chosen_only && !choice->chosen))
        return false;
    if (options->kernel != NULL)
        return strstr(choice->kernel->name, options->kernel) != NULL;
    return choice->chosen || choice->kernel->backend != COT_BACKEND_CPU ||
           choice->cost / b->clock / threads < max_seconds;
}

static void add_runners(const bench *b, comparison_run *c, const cot_choice *choices, int count)
{
    for (int i = 0; i < count; i++) {
        if (!kernel_selected(b, &choices[i], (int)cot_queue_threads(c->runners[0].queue)))
            continue;
        runner *r = &c->runners[c->count++];
        *r = (runner){.choice = &choices[i], .queue = make_queue(b, choices[i].kernel)};
        cot_queue_reserve(r->queue, choices[i].workspace_bytes);
    }
}

/* On the CPU: times all kernels and the copies, interleaved. */
static void bench_on_host(bench *b, const cot_case *c, const cot_choice *choices, int count)
{
    const cot_direction *direction = case_direction(b->cases, c);
    comparison_run run = {.direction = direction,
                          .copy = copy_ceiling_make((size_t)compulsory_bytes(direction, c->args))};
    cot_queue *default_queue = make_queue(b, NULL);
    run.runners[0] = (runner){.copy = copy_plain, .queue = default_queue};
    run.runners[1] = (runner){.copy = copy_streaming, .queue = default_queue};
    run.count = 2;
    add_runners(b, &run, choices, count);
    bound_case bound;
    make_bound(&bound, b->cases, c, b->options->backend);
    run.bound = &bound;
    run_interleaved(&run, b->options->brief);
    const double plain = median(run.runners[0].samples, run.runners[0].count);
    const double streaming = median(run.runners[1].samples, run.runners[1].count);
    const double ceiling = 2 * (double)run.copy.bytes / (plain < streaming ? plain : streaming);
    const bool measure_product_rate = case_is_product_bound(c, direction) && !b->options->brief;
    const cot_dtype dtype = cot_field_tensor(&direction->fields[0], (void *)c->args)->dtype;
    for (int i = 2; i < run.count; i++) {
        runner *r = &run.runners[i];
        const measurement m = {.choice = r->choice,
                               .threads = (int)cot_queue_threads(r->queue),
                               .seconds = median(r->samples, r->count),
                               .product_rate = measure_product_rate ? measure_products(r->queue, dtype) : 0};
        add_row(b, c, &m, ceiling);
        cot_queue_destroy(r->queue);
    }
    cot_queue_destroy(default_queue);
    copy_ceiling_free(&run.copy);
    bound_case_free(&bound, direction);
}

static void bench_on_device(bench *b, const cot_case *c, const cot_choice *choices, int count)
{
    bound_case bound;
    make_bound(&bound, b->cases, c, b->options->backend);
    double ceiling = 0;
    measurement m[COT_MAX_KERNELS];
    int kernel_count = 0;
    for (int i = 0; i < count; i++)
        if (kernel_selected(b, &choices[i], 1))
            m[kernel_count++] = (measurement){.choice = &choices[i]};
    const bool brief = b->options->brief;
    const cot_status status = b->options->backend == COT_BACKEND_HIP
                                  ? bench_hip_case(b->cases, c, &bound, brief, m, kernel_count, &ceiling)
                                  : bench_device_case(b->cases, c, &bound, b->options->load_seconds, brief, m,
                                                      kernel_count, &ceiling, b->load_rate);
    for (int i = 0; status == COT_OK && i < kernel_count; i++)
        add_row(b, c, &m[i], ceiling);
    if (status != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        b->failures++;
    }
    bound_case_free(&bound, case_direction(b->cases, c));
}

static void bench_one(bench *b, const cot_case *c)
{
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0, selected_count = 0;
    cot_queue *default_queue = make_queue(b, NULL);
    const cot_status status = cot_op_explain(case_direction(b->cases, c), default_queue, c->args, choices, &count);
    const int threads = (int)cot_queue_threads(default_queue);
    cot_queue_destroy(default_queue);
    if (status != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        b->failures++;
        return;
    }
    for (int i = 0; i < count; i++)
        selected_count += kernel_selected(b, &choices[i], threads);
    if (selected_count == 0)
        return; /* without a kernel there is no row */
    if (b->options->backend != COT_BACKEND_CPU)
        bench_on_device(b, c, choices, count);
    else
        bench_on_host(b, c, choices, count);
}

/* ---- all cases ---------------------------------------------------------------------------------------- */

static bool count_case(void *context, const cot_case *c)
{
    bench *b = context;
    b->total += case_selected(b, c);
    return true;
}

static bool bench_case(void *context, const cot_case *c)
{
    bench *b = context;
    char text[256];
    if (b->options->stop != NULL && *b->options->stop != 0)
        return false;
    if (!case_selected(b, c))
        return true;
    describe_case(b->cases, c, text, sizeof text);
    if (b->options->progress != NULL)
        b->options->progress(b->options->context, (double)b->done / (double)b->total, text);
    b->done++;
    b->selected_cases++;
    bench_one(b, c);
    return true;
}

/* Prints why there is no row: names the first option that left nothing to time. */
static void print_why_nothing_timed(const bench *b)
{
    const bench_options *o = b->options;
    const char *op = o->op != NULL ? o->op : "any op", *backend = cot_backend_name(o->backend);
    fprintf(stderr, "cotangent bench: nothing was timed: ");
    if (b->selected_cases == 0 && o->only != NULL)
        fprintf(stderr, "no case's description contains '%s' (of %s)\n", o->only, op);
    else if (o->kernel != NULL && !kernel_exists(o->op, o->backend, o->kernel))
        fprintf(stderr, "no kernel's name contains '%s' (of %s, backend %s)\n", o->kernel, op, backend);
    else if (o->kernel != NULL)
        fprintf(stderr, "no kernel with '%s' in its name %s (of %s, backend %s)\n", o->kernel,
                o->chosen_only ? "is chosen for a case" : "supports a case that this machine can run", op, backend);
    else
        fprintf(stderr, "no kernel of backend %s supports these cases (of %s)\n", backend, op);
}

json_t *bench_run(const bench_options *options)
{
    bench b = {.options = options, .rows = json_array(), .clock = measure_clock()};
    const time_t seconds = time(NULL);
    strftime(b.date, sizeof b.date, "%Y-%m-%d", gmtime(&seconds));
    cot_queue *kept_queue = NULL; /* on a GPU: without it, each queue would load the driver and create a context */
    if (options->backend == COT_BACKEND_CUDA) {
        bench_device_name(b.device, sizeof b.device);
        kept_queue = make_queue(&b, NULL);
    } else if (options->backend == COT_BACKEND_HIP) {
        bench_hip_name(b.device, sizeof b.device);
        kept_queue = make_queue(&b, NULL);
    } else {
        device_name(b.device, sizeof b.device);
    }
    for (int i = 0; i < cot_op_count; i++) {
        if (options->op != NULL && strcmp(options->op, cot_ops[i]->name) != 0)
            continue;
        b.cases = cot_all_cases[i];
        b.total = b.done = 0;
        if (options->one != NULL) {
            b.total = 1;
            bench_case(&b, options->one);
            continue;
        }
        b.cases->each(count_case, &b);
        b.cases->each(bench_case, &b);
    }
    cot_queue_destroy(kept_queue);
    if (options->progress != NULL)
        options->progress(options->context, 1, "");
    if (json_array_size(b.rows) == 0 && b.failures == 0 && (options->stop == NULL || *options->stop == 0))
        print_why_nothing_timed(&b);
    return b.rows;
}
