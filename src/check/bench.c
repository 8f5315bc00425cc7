/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "bench_device.h"
#include "bound_case.h"
#include "ceiling.h"
#include "check.h"
#include "commit.h"
#include "core/cpu_features.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* A sample is as many calls as fill this time; a measurement the median of this many samples, or of as many as its
 * time allows. All kernels of a case and the copies take turns, so that a slow moment of the machine hits them alike.
 * Of a kernel that takes longer than slow_seconds the first call is all there is to see; one that would take longer
 * than hopeless_seconds, by its own estimate, is timed where --kernel names it. Attention's plain loops took most of
 * five minutes' bench, to show that they are a thousand times as slow as its tiles. */
static const double sample_seconds = 0.01, case_seconds = 12, slow_seconds = 0.5, hopeless_seconds = 2;
enum { SAMPLES = 9, SAMPLES_LEAST = 3, MAX_RUNNERS = COT_MAX_KERNELS + 2 };

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

/* ---- what takes turns --------------------------------------------------------------------------------- */

/* A kernel of the case, or one of the two copies. */
typedef struct runner {
    const cot_choice *choice; /* NULL = a copy */
    void (*copy)(const cot_queue *, const copy_ceiling *);
    cot_queue *queue;
    int64_t calls; /* of one sample; 0 = it has had its only one */
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
    double load_rate[COT_BF16 + 1]; /* GPU: see bench_device_case */
    int64_t cases_seen, failures;   /* of all ops: cases that the options ask for, and messages printed about them */
} bench;

typedef struct contest {
    const cot_direction *direction;
    bound_case *bound;
    copy_ceiling copy;
    runner runners[MAX_RUNNERS];
    int count;
} contest;

static bool call(contest *c, runner *r)
{
    if (r->choice == NULL) {
        r->copy(r->queue, &c->copy);
        return true;
    }
    return cot_op_run(c->direction, r->queue, c->bound->args) == COT_OK;
}

static double seconds_of(contest *c, runner *r, int64_t calls)
{
    const double begin = now();
    for (int64_t i = 0; i < calls; i++)
        if (!call(c, r))
            return NAN;
    return (now() - begin) / (double)calls;
}

double median(double *samples, int count)
{
    for (int i = 1; i < count; i++)
        for (int j = i; j > 0 && samples[j] < samples[j - 1]; j--) {
            const double swap = samples[j];
            samples[j] = samples[j - 1];
            samples[j - 1] = swap;
        }
    return samples[count / 2];
}

static void run_contest(contest *c, bool brief)
{
    const double begin = now();
    for (int i = 0; i < c->count; i++) { /* the first call warms up and tells how many make a sample */
        runner *r = &c->runners[i];
        const double first = seconds_of(c, r, 1);
        if (!(first <= slow_seconds)) {
            r->samples[r->count++] = first;
            continue;
        }
        const double once = seconds_of(c, r, 1);
        r->calls = !brief && once > 0 && once < sample_seconds ? (int64_t)(sample_seconds / once) + 1 : 1;
    }
    for (int sample = 0; sample < (brief ? 1 : SAMPLES); sample++) {
        if (sample >= SAMPLES_LEAST && now() - begin > case_seconds)
            break;
        for (int i = 0; i < c->count; i++) {
            runner *r = &c->runners[i];
            if (r->calls == 0)
                continue;
            if (r->calls > 1)
                call(c, r); /* the runner before has left other data in the caches */
            r->samples[r->count++] = seconds_of(c, r, r->calls);
        }
    }
}

/* ---- one case ----------------------------------------------------------------------------------------- */

/* Inputs that an op's cases prepare must be made as for a check, which takes its time; on a GPU too much of it, and there
 * no value makes a kernel slower. */
static void make_bound(bound_case *bound, const cot_op_cases *cases, const cot_case *c, cot_backend backend)
{
    if (cases->prepare == NULL || backend == COT_BACKEND_CUDA) {
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

double compulsory_bytes(const cot_direction *direction, const void *args)
{
    double bytes = 0;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)args);
        if (!cot_present(tensor))
            continue;
        const double once = (double)cot_elements(tensor) * (double)cot_dtype_size(tensor->dtype);
        bytes += direction->fields[f].role == COT_INPUT_OUTPUT ? 2 * once : once;
    }
    return bytes;
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
        m->choice->kernel->backend == COT_BACKEND_CPU ? "cpu" : "cuda", "dtype", cot_dtype_name(first->dtype), "layout",
        c->layout, "shape", c->shape, "options", c->options, "threads", threads, "ms", 1e3 * seconds, "bytes", bytes,
        "flops", c->flops, "gbps", 1e-9 * bytes / seconds, "tflops", 1e-12 * c->flops / seconds, "ceiling",
        1e-9 * ceiling, "ratio", bytes / seconds / ceiling, "cycles16", seconds * b->clock * threads / (elements / 16),
        "footprint", bytes, "workspace_bytes", (json_int_t)m->choice->workspace_bytes, "chosen", m->choice->chosen,
        "device", b->device, "clock_ghz", 1e-9 * b->clock, "date", b->date, "commit", COT_COMMIT, "version",
        cot_version());
    if (c->flops > PRODUCTS_BOUND * bytes && m->choice->kernel->backend == COT_BACKEND_CPU && !b->options->brief) {
        cot_queue *queue = make_queue(b, m->choice->kernel);
        const double products = measure_products(queue, first->dtype);
        cot_queue_destroy(queue);
        json_object_set_new(row, "product_ceiling", json_real(1e-12 * products));
        json_object_set_new(row, "product_ratio", json_real(c->flops / seconds / products));
    }
    if (m->product_rate > 0) {
        json_object_set_new(row, "product_ceiling", json_real(1e-12 * m->product_rate));
        json_object_set_new(row, "product_ratio", json_real(c->flops / seconds / m->product_rate));
    }
    if (m->turn_seconds > 0)
        json_object_set_new(row, "turn_ms", json_real(1e3 * m->turn_seconds));
    if (m->burst_seconds > 0)
        json_object_set_new(row, "burst_ms", json_real(1e3 * m->burst_seconds));
    if (m->use_known) {
        json_object_set_new(row, "sm_mhz", json_real(m->use.sm_mhz));
        json_object_set_new(row, "watts", json_real(m->use.watts));
        json_object_set_new(row, "pj_per_flop", json_real(1e12 * m->use.watts * seconds / c->flops));
    }
    json_array_append_new(b->rows, row);
}

static bool wanted(const bench *b, const cot_case *c)
{
    char text[256];
    describe_case(b->cases, c, text, sizeof text);
    const unsigned use = b->options->backend == COT_BACKEND_CUDA ? COT_CASE_BENCH_CUDA : COT_CASE_BENCH;
    return (c->uses & use) && (b->options->only == NULL || strstr(text, b->options->only) != NULL);
}

static bool bench_wants(const bench *b, const cot_choice *choice, int threads)
{
    const bench_options *options = b->options;
    if (choice->refusal != NULL || (options->chosen_only && !choice->chosen))
        return false;
    if (options->kernel != NULL)
        return strstr(choice->kernel->name, options->kernel) != NULL;
    return choice->chosen || choice->kernel->backend != COT_BACKEND_CPU ||
           choice->cost / b->clock / threads < hopeless_seconds;
}

static void add_runners(const bench *b, contest *c, const cot_choice *choices, int count)
{
    for (int i = 0; i < count; i++) {
        if (!bench_wants(b, &choices[i], (int)cot_queue_threads(c->runners[0].queue)))
            continue;
        runner *r = &c->runners[c->count++];
        *r = (runner){.choice = &choices[i], .queue = make_queue(b, choices[i].kernel)};
        cot_queue_reserve(r->queue, choices[i].workspace_bytes);
    }
}

/* On the CPU: all kernels and the copies take turns. */
static void bench_on_host(bench *b, const cot_case *c, const cot_choice *choices, int count)
{
    const cot_direction *direction = case_direction(b->cases, c);
    contest all = {.direction = direction, .copy = copy_ceiling_make((size_t)compulsory_bytes(direction, c->args))};
    cot_queue *any = make_queue(b, NULL);
    all.runners[0] = (runner){.copy = copy_plain, .queue = any};
    all.runners[1] = (runner){.copy = copy_streaming, .queue = any};
    all.count = 2;
    add_runners(b, &all, choices, count);
    bound_case bound;
    make_bound(&bound, b->cases, c, b->options->backend);
    all.bound = &bound;
    run_contest(&all, b->options->brief);
    const double plain = median(all.runners[0].samples, all.runners[0].count);
    const double streaming = median(all.runners[1].samples, all.runners[1].count);
    const double ceiling = 2 * (double)all.copy.bytes / (plain < streaming ? plain : streaming);
    for (int i = 2; i < all.count; i++) {
        runner *r = &all.runners[i];
        const measurement m = {
            .choice = r->choice, .threads = (int)cot_queue_threads(r->queue), .seconds = median(r->samples, r->count)};
        add_row(b, c, &m, ceiling);
        cot_queue_destroy(r->queue);
    }
    cot_queue_destroy(any);
    copy_ceiling_free(&all.copy);
    bound_case_free(&bound, direction);
}

static void bench_on_device(bench *b, const cot_case *c, const cot_choice *choices, int count)
{
    bound_case bound;
    make_bound(&bound, b->cases, c, b->options->backend);
    double ceiling = 0;
    measurement m[COT_MAX_KERNELS];
    int wanted_count = 0;
    for (int i = 0; i < count; i++)
        if (bench_wants(b, &choices[i], 1))
            m[wanted_count++] = (measurement){.choice = &choices[i]};
    const cot_status status = bench_device_case(b->cases, c, &bound, b->options->load_seconds, b->options->brief, m,
                                                wanted_count, &ceiling, b->load_rate);
    for (int i = 0; status == COT_OK && i < wanted_count; i++)
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
    int count = 0, runs = 0;
    cot_queue *any = make_queue(b, NULL);
    const cot_status status = cot_op_explain(case_direction(b->cases, c), any, c->args, choices, &count);
    const int threads = (int)cot_queue_threads(any);
    cot_queue_destroy(any);
    if (status != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        b->failures++;
        return;
    }
    for (int i = 0; i < count; i++)
        runs += bench_wants(b, &choices[i], threads);
    if (runs == 0)
        return; /* the copies alone would make no row */
    if (b->options->backend == COT_BACKEND_CUDA)
        bench_on_device(b, c, choices, count);
    else
        bench_on_host(b, c, choices, count);
}

/* ---- all of them -------------------------------------------------------------------------------------- */

static bool count_case(void *context, const cot_case *c)
{
    bench *b = context;
    b->total += wanted(b, c);
    return true;
}

static bool bench_case(void *context, const cot_case *c)
{
    bench *b = context;
    char text[256];
    if (b->options->stop != NULL && *b->options->stop != 0)
        return false;
    if (!wanted(b, c))
        return true;
    describe_case(b->cases, c, text, sizeof text);
    if (b->options->progress != NULL)
        b->options->progress(b->options->context, (double)b->done / (double)b->total, text);
    b->done++;
    b->cases_seen++;
    bench_one(b, c);
    return true;
}

/* Why there is no row: the first of the options that left nothing. */
static void print_nothing_timed(const bench *b)
{
    const bench_options *o = b->options;
    const char *op = o->op != NULL ? o->op : "any op", *backend = o->backend == COT_BACKEND_CUDA ? "cuda" : "cpu";
    fprintf(stderr, "cotangent bench: nothing was timed: ");
    if (b->cases_seen == 0 && o->only != NULL)
        fprintf(stderr, "no case's description contains '%s' (of %s)\n", o->only, op);
    else if (o->kernel != NULL && !kernel_exists(o->op, o->backend, o->kernel))
        fprintf(stderr, "no kernel's name contains '%s' (of %s, backend %s)\n", o->kernel, op, backend);
    else if (o->kernel != NULL)
        fprintf(stderr, "no kernel with '%s' in its name %s (of %s, backend %s)\n", o->kernel,
                o->chosen_only ? "is chosen for a case" : "serves a case that this machine can run", op, backend);
    else
        fprintf(stderr, "no kernel of backend %s serves these cases (of %s)\n", backend, op);
}

json_t *bench_run(const bench_options *options)
{
    bench b = {.options = options, .rows = json_array(), .clock = measure_clock()};
    const time_t seconds = time(NULL);
    strftime(b.date, sizeof b.date, "%Y-%m-%d", gmtime(&seconds));
    cot_queue *open = NULL; /* on a GPU: the driver makes a context anew for each queue that is the only one */
    if (options->backend == COT_BACKEND_CUDA) {
        bench_device_name(b.device, sizeof b.device);
        open = make_queue(&b, NULL);
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
    cot_queue_destroy(open);
    if (options->progress != NULL)
        options->progress(options->context, 1, "");
    if (json_array_size(b.rows) == 0 && b.failures == 0 && (options->stop == NULL || *options->stop == 0))
        print_nothing_timed(&b);
    return b.rows;
}
