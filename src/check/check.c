/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include "bound_case.h"
#include "compare.h"
#include "verify.h"
#include "core/cpu_features.h"
#include "cases/draw.h"
#include "core/queue.h"
#include "core/tensor.h"
#include "cuda/memory.h"

#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* For the oracle's gradients, compared with finite differences of the oracle's forward. */
static const double gradient_tolerance = 1e-7;

/* The first run of a kernel has MANY_THREADS threads, an odd number, and the second has one thread. Both must give the
 * same bits. On a GPU, REPEAT_BATCH repeats run before the first of them is read. */
enum { MANY_THREADS = 3, MAX_PRINTED_FAILURES = 3, REPEAT_BATCH = 16 };

/* Totals over all ops. */
typedef struct summary {
    int64_t passed, failed, skipped; /* tests, as check_run counts them */
    int64_t cases;                   /* cases that the options select */
    int64_t kernel_tests;            /* tests that passed or failed, without those of the oracles' gradients */
} summary;

/* Results of one kernel so far. */
typedef struct tally {
    const cot_kernel *kernel;
    int64_t passed, failed, skipped;
    double worst_ratio, worst_ulp; /* over all outputs of all cases */
    uint64_t hash;                 /* the sum of the cases' hashes, which does not depend on the order of the cases */
    char worst_case[256];
} tally;

/* Results that the workers share. */
typedef struct shared_results {
    pthread_mutex_t lock; /* protects all members below except next */
    tally tallies[COT_MAX_KERNELS];
    int64_t gradients_passed, gradients_failed;
    double worst_gradient;
    int64_t total;         /* cases */
    _Atomic(int64_t) next; /* the first case that no worker has taken */
} shared_results;

/* A worker thread. Every worker visits all cases and runs only those whose numbers it took from `next`. */
typedef struct worker {
    const check_options *options;
    const cot_op_cases *cases;
    shared_results *results;
    int64_t case_number, next_case; /* numbers of the visited case and of the next case that this worker runs */
    int64_t base_count;             /* cases visited so far that have variants with a NaN or an infinity */
    bool reports_progress;
    cot_queue *device_queues[COT_MAX_KERNELS];
    cot_queue *explain_queue; /* explains the calls: the backend under check, without a forced kernel */
    pthread_t thread;
} worker;

bool kernel_exists(const char *op, cot_backend backend, const char *text)
{
    for (int i = 0; i < cot_op_count; i++)
        for (int k = 0; k < cot_ops[i]->kernel_count; k++)
            if ((op == NULL || strcmp(op, cot_ops[i]->name) == 0) && cot_ops[i]->kernels[k].backend == backend &&
                strstr(cot_ops[i]->kernels[k].name, text) != NULL)
                return true;
    return false;
}

void describe_case(const cot_op_cases *cases, const cot_case *c, char *text, size_t size)
{
    const cot_direction *direction = case_direction(cases, c);
    const cot_tensor *first = cot_field_tensor(&direction->fields[0], (void *)c->args);
    const int length = snprintf(text, size, "%s %s %s %s %s", direction->name, cot_dtype_name(first->dtype), c->layout,
                                c->shape, c->options);
    if (c->special != 0 && length >= 0 && (size_t)length < size)
        snprintf(text + length, size - (size_t)length, " %s in %s", isnan(c->special) ? "NaN" : "Inf",
                 direction->fields[c->special_field].name);
}

static bool case_selected(const worker *w, const cot_case *c)
{
    const unsigned all = w->options->backend != COT_BACKEND_CPU ? COT_CASE_CHECK | COT_CASE_CHECK_CUDA : COT_CASE_CHECK;
    const unsigned uses = w->options->quick ? COT_CASE_QUICK : all;
    char text[256];
    if (!(c->uses & uses))
        return false;
    describe_case(w->cases, c, text, sizeof text);
    return w->options->only == NULL || strstr(text, w->options->only) != NULL;
}

/* ---- one kernel, one case ----------------------------------------------------------------------------- */

static cot_queue *queue_for(const cot_op *op, const cot_kernel *kernel, int threads)
{
    char forced[160];
    snprintf(forced, sizeof forced, "%s=%s", op->name, kernel->name);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = kernel->backend;
    options.threads = threads;
    options.kernels = forced;
    cot_queue *queue = NULL;
    return cot_queue_create(&options, &queue) == COT_OK ? queue : NULL;
}

static bool run_once(worker *w, const cot_kernel *kernel, const cot_direction *direction, bound_case *b, int threads,
                     char *why, size_t size)
{
    /* A GPU queue loads the device code when it is created, so one queue per kernel is enough for all cases. */
    cot_queue **cached = &w->device_queues[kernel - w->cases->op->kernels];
    cot_queue *queue = *cached != NULL ? *cached : queue_for(w->cases->op, kernel, threads);
    const cot_status status = queue == NULL ? COT_NO_DEVICE : bound_case_run(b, direction, queue);
    if (status != COT_OK)
        snprintf(why, size, "%s: %s", cot_status_name(status), cot_error_message());
    if (kernel->backend != COT_BACKEND_CPU)
        *cached = queue;
    else
        cot_queue_destroy(queue);
    return status == COT_OK;
}

/* Returns false if a byte outside the outputs' elements changed: in the guards, in the gaps or in an input. */
static bool memory_intact(const cot_direction *direction, const bound_case *b, const bound_case *initial, char *why,
                          size_t size)
{
    for (int f = 0; f < direction->field_count; f++) {
        int64_t byte;
        if (storage_find_overrun(&b->fields[f], &byte)) {
            snprintf(why, size, "%s: byte %" PRId64 " outside the tensor's elements was written",
                     direction->fields[f].name, byte);
            return false;
        }
        if (direction->fields[f].role == COT_INPUT && b->fields[f].memory != NULL &&
            memcmp(b->fields[f].memory, initial->fields[f].memory, b->fields[f].bytes) != 0) {
            snprintf(why, size, "%s: an input was written", direction->fields[f].name);
            return false;
        }
    }
    return true;
}

static bool same_bytes(const cot_case *c, const cot_direction *direction, const bound_case *a, const bound_case *b,
                       int run, char *why, size_t size)
{
    for (int f = 0; f < direction->field_count; f++) {
        if (c->nondeterministic[f] || a->fields[f].memory == NULL ||
            memcmp(a->fields[f].memory, b->fields[f].memory, a->fields[f].bytes) == 0)
            continue;
        for (size_t i = 0; i < a->fields[f].bytes; i++) {
            if (a->fields[f].memory[i] == b->fields[f].memory[i])
                continue;
            snprintf(why, size, "%s: other bits in run %d (CPU: 1 and %d threads alternate), first at byte %td",
                     direction->fields[f].name, run, MANY_THREADS,
                     a->fields[f].memory + i - (char *)a->fields[f].view.data);
            return false;
        }
    }
    return true;
}

/* Compares runs 3 to `repeat` with the first run. Each run begins with the initial memory. */
static bool repeats_agree_on_host(worker *w, const cot_kernel *kernel, const cot_case *c,
                                  const cot_direction *direction, const bound_case *first, bound_case *repeated,
                                  const bound_case *initial, char *why, size_t size)
{
    for (int run = 3; run <= w->options->repeat; run++) {
        for (int f = 0; f < direction->field_count; f++)
            if (repeated->fields[f].memory != NULL)
                memcpy(repeated->fields[f].memory, initial->fields[f].memory, repeated->fields[f].bytes);
        if (!run_once(w, kernel, direction, repeated, run % 2 != 0 ? MANY_THREADS : 1, why, size) ||
            !same_bytes(c, direction, first, repeated, run, why, size))
            return false;
    }
    return true;
}

/* The same on a GPU. A copy within the device restores the initial memory, and a batch of runs is enqueued before the
 * first is read. Small cases take less time than to allocate, to copy from the host and to wait for each run. */
static bool repeats_agree_on_device(worker *w, const cot_kernel *kernel, const cot_case *c,
                                    const cot_direction *direction, const bound_case *first, bound_case *repeated,
                                    const bound_case *initial, char *why, size_t size)
{
    cot_queue *queue = w->device_queues[kernel - w->cases->op->kernels];
    size_t bytes = 0;
    device_image images[REPEAT_BATCH] = {0}, initial_image = {0};
    const int repeats = w->options->repeat - 2, batch = repeats < REPEAT_BATCH ? repeats : REPEAT_BATCH;
    bool same = true;
    if (repeats <= 0)
        return true;
    cot_status status = cot_op_workspace(direction, queue, initial->args, &bytes);
    if (status == COT_OK)
        status = device_image_make(&initial_image, initial, direction, queue, bytes);
    for (int i = 0; i < batch && status == COT_OK; i++)
        status = device_image_make(&images[i], initial, direction, queue, bytes);
    for (int done = 0; same && status == COT_OK && done < repeats; done += batch) {
        const int count = repeats - done < batch ? repeats - done : batch;
        for (int i = 0; i < count && status == COT_OK; i++) {
            status =
                queue->calls->copy_on_device_async(queue, images[i].memory, initial_image.memory, initial_image.bytes);
            if (status == COT_OK)
                status = cot_op_run(direction, queue, images[i].args);
        }
        for (int i = 0; same && i < count && status == COT_OK; i++) {
            status = device_image_read_outputs(&images[i], repeated, direction, queue);
            same = status == COT_OK && same_bytes(c, direction, first, repeated, done + i + 3, why, size);
        }
    }
    if (status == COT_OK)
        status = cot_queue_check(queue);
    if (status != COT_OK)
        snprintf(why, size, "%s: %s", cot_status_name(status), cot_error_message());
    for (int i = 0; i < batch; i++)
        device_image_free(&images[i], queue);
    device_image_free(&initial_image, queue);
    return same && status == COT_OK;
}

typedef struct outcome {
    bool failed;
    char why[256];
    double worst_ratio, worst_ulp;
    uint64_t hash;
} outcome;

/* FNV-1a, of 64 bits. */
static uint64_t add_to_hash(uint64_t hash, const char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)data[i]) * 0x100000001b3u;
    return hash;
}

/* The hash of the case's description, its seed, and the bits of its outputs whose order of sums is fixed. */
static uint64_t hash_outputs(const worker *w, const cot_case *c, const cot_direction *direction, const bound_case *b)
{
    char text[256];
    describe_case(w->cases, c, text, sizeof text);
    uint64_t hash = add_to_hash(0xcbf29ce484222325u, text, strlen(text));
    hash = add_to_hash(hash, (const char *)&c->seed, sizeof c->seed);
    for (int f = 0; f < direction->field_count; f++)
        if (direction->fields[f].role != COT_INPUT && b->fields[f].memory != NULL && !c->nondeterministic[f])
            hash = add_to_hash(hash, b->fields[f].memory, b->fields[f].bytes);
    return hash;
}

/* Compares the outputs in b with the oracle's; s are the scalar kernel's. Writes a report of each output if `report` is
 * not NULL. */
static void compare_outputs(const reference *ref, const cot_kernel *kernel, const bound_case *b,
                            double *const s[COT_MAX_FIELDS], FILE *report, outcome *out)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *view = &b->fields[f].view;
        if (ref->expected[f] == NULL)
            continue;
        double *y = tensor_values(view);
        const comparison c = compare_output(ref, s[f], b->args, f, kernel, view, y);
        if (c.failed && !out->failed) {
            char line[200];
            comparison_line(&c, line, sizeof line);
            snprintf(out->why, sizeof out->why, "%s: %s", direction->fields[f].name, line);
            out->failed = true;
        }
        out->worst_ratio = c.worst_ratio > out->worst_ratio ? c.worst_ratio : out->worst_ratio;
        out->worst_ulp = c.max_ulp > out->worst_ulp ? c.max_ulp : out->worst_ulp;
        if (report != NULL)
            comparison_report(report, direction->fields[f].name, &c, y, ref->expected[f], ref->magnitudes[f], view,
                              intermediate_of(view, kernel));
        free(y);
    }
}

static outcome check_kernel(worker *w, const reference *ref, const cot_kernel *kernel, double *s[COT_MAX_FIELDS],
                            FILE *report)
{
    const cot_direction *direction = case_direction(ref->cases, ref->c);
    outcome out = {0};
    bound_case initial, first, second;
    bound_case_make(&initial, ref, false);
    bound_case_make(&first, ref, true);
    bound_case_make(&second, ref, false);
    const bool ran = run_once(w, kernel, direction, &first, MANY_THREADS, out.why, sizeof out.why) &&
                     run_once(w, kernel, direction, &second, 1, out.why, sizeof out.why);
    for (int f = 0; ran && f < direction->field_count; f++)
        if (ref->expected[f] != NULL && s[f] == NULL) /* the scalar kernel is the first to run */
            s[f] = tensor_values(&first.fields[f].view);
    out.failed = !ran || !memory_intact(direction, &first, &initial, out.why, sizeof out.why) ||
                 !same_bytes(ref->c, direction, &first, &second, 2, out.why, sizeof out.why) ||
                 !(kernel->backend != COT_BACKEND_CPU ? repeats_agree_on_device : repeats_agree_on_host)(
                     w, kernel, ref->c, direction, &first, &second, &initial, out.why, sizeof out.why);
    if (ran && w->options->hash)
        out.hash = hash_outputs(w, ref->c, direction, &first);
    if (ran)
        compare_outputs(ref, kernel, &first, s, report, &out);
    bound_case_free(&initial, direction);
    bound_case_free(&first, direction);
    bound_case_free(&second, direction);
    return out;
}

/* ---- one case ----------------------------------------------------------------------------------------- */

static bool kernel_selected(const worker *w, const cot_kernel *kernel)
{
    return kernel->backend == w->options->backend &&
           (w->options->kernel == NULL || strstr(kernel->name, w->options->kernel) != NULL);
}

/* Returns whether the kernel spreads this NaN or infinity further than the oracle allows, as its documentation says.
 * The im2col kernels, which are never chosen, multiply every channel by the zeros of all others. Kernels that split
 * numbers into sums of two or three bf16 turn an infinity into inf - inf. mhc's forwards on Hopper and AMX do so
 * with phi and gamma. */
static bool spreads_special(const cot_kernel *kernel, const cot_direction *direction, const cot_case *c)
{
    const double special = c->special;
    if (special == 0)
        return false;
    static const char *const split_kernels[] = {"_amx_split", "mhc_pre_fwd_tiles_sm80", "mhc_pre_bwd_tiles_sm80",
                                                "mhc_post_pre_fwd_tiles_sm80"};
    static const char *const exact_x_kernels[] = {"mhc_pre_fwd_cluster_sm90", "mhc_post_pre_fwd_cluster_sm90",
                                                  "mhc_post_pre_fwd_split_sm90", "mhc_pre_fwd_tiles_amx",
                                                  "mhc_post_pre_fwd_tiles_amx"};
    const char *field = direction->fields[c->special_field].name;
    const bool is_split = strcmp(field, "phi") == 0 || strcmp(field, "gamma") == 0;
    bool spreads = strstr(kernel->name, "im2col") != NULL;
    for (size_t i = 0; i < sizeof split_kernels / sizeof *split_kernels; i++)
        spreads = spreads || (isinf(special) && strstr(kernel->name, split_kernels[i]) != NULL);
    for (size_t i = 0; i < sizeof exact_x_kernels / sizeof *exact_x_kernels; i++)
        spreads = spreads || (isinf(special) && is_split && strstr(kernel->name, exact_x_kernels[i]) != NULL);
    return spreads;
}

static void record(worker *w, const cot_kernel *kernel, const outcome *out, const char *text)
{
    tally *t = &w->results->tallies[kernel - w->cases->op->kernels];
    pthread_mutex_lock(&w->results->lock);
    t->hash += out->hash;
    if (!out->failed) {
        t->passed++;
        if (out->worst_ratio > t->worst_ratio) {
            t->worst_ratio = out->worst_ratio;
            snprintf(t->worst_case, sizeof t->worst_case, "%s", text);
        }
        t->worst_ulp = out->worst_ulp > t->worst_ulp ? out->worst_ulp : t->worst_ulp;
    } else if (++t->failed <= MAX_PRINTED_FAILURES || w->options->report)
        printf("FAILED %s, %s: %s\n", t->kernel->name, text, out->why);
    fflush(stdout); /* the process can be stopped before its end */
    pthread_mutex_unlock(&w->results->lock);
}

static void record_skipped(worker *w, const cot_kernel *kernel)
{
    pthread_mutex_lock(&w->results->lock);
    w->results->tallies[kernel - w->cases->op->kernels].skipped++;
    pthread_mutex_unlock(&w->results->lock);
}

static void record_gradient(worker *w, double error, const char *text)
{
    shared_results *results = w->results;
    const bool failed = !(error <= gradient_tolerance);
    pthread_mutex_lock(&results->lock);
    results->gradients_failed += failed;
    results->gradients_passed += !failed;
    results->worst_gradient = !(error <= results->worst_gradient) ? error : results->worst_gradient;
    if (failed)
        printf("FAILED oracle, %s: off from finite differences by %.3g\n", text, error);
    pthread_mutex_unlock(&results->lock);
}

/* Runs the scalar CPU kernel on the case and keeps its outputs in s. The error rule of another backend's kernels needs
 * them. */
static bool run_scalar_kernel(worker *w, const reference *ref, double *s[COT_MAX_FIELDS])
{
    cot_queue *cpu = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.kernels = "";
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    bool scalar_found = false;
    if (cot_queue_create(&options, &cpu) == COT_OK &&
        cot_op_explain(case_direction(w->cases, ref->c), cpu, ref->c->args, choices, &count) == COT_OK)
        for (int i = 0; i < count && !scalar_found; i++)
            if (choices[i].refusal == NULL) {
                check_kernel(w, ref, choices[i].kernel, s, NULL);
                scalar_found = true;
            }
    cot_queue_destroy(cpu);
    return scalar_found;
}

static void check_case_kernels(worker *w, const reference *ref, const char *text)
{
    const cot_op *op = w->cases->op;
    double *s[COT_MAX_FIELDS] = {0};
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    const cot_status status =
        cot_op_explain(case_direction(w->cases, ref->c), w->explain_queue, ref->c->args, choices, &count);
    if (status == COT_UNSUPPORTED && w->options->backend != COT_BACKEND_CPU)
        return; /* f64, which only the CPU supports */
    if (status != COT_OK) {
        outcome out = {.failed = true};
        snprintf(out.why, sizeof out.why, "%s", cot_error_message());
        record(w, op->kernels, &out, text);
        return;
    }
    bool scalar_ran = w->options->backend != COT_BACKEND_CPU && run_scalar_kernel(w, ref, s);
    for (int i = 0; i < count; i++) {
        const bool selected = kernel_selected(w, choices[i].kernel);
        if (spreads_special(choices[i].kernel, case_direction(w->cases, ref->c), ref->c))
            continue;
        if (choices[i].refusal != NULL) {
            if (selected && (choices[i].kernel->isa & ~w->explain_queue->isa) != 0)
                record_skipped(w, choices[i].kernel);
            continue;
        }
        if (!selected && scalar_ran)
            continue;
        scalar_ran = true;
        const outcome out = check_kernel(w, ref, choices[i].kernel, s, NULL);
        if (!selected)
            continue; /* the scalar kernel, which ran only for its values */
        record(w, choices[i].kernel, &out, text);
        if (out.failed && w->options->report) {
            flockfile(stdout); /* a report has many lines */
            check_kernel(w, ref, choices[i].kernel, s, stdout);
            funlockfile(stdout);
        }
    }
    for (int f = 0; f < COT_MAX_FIELDS; f++)
        free(s[f]);
}

/* Returns false if --kernel selects no kernel of the case. Skipping its oracle then saves most of the time. */
static bool any_kernel_selected(worker *w, const cot_case *c)
{
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    if (w->options->kernel == NULL ||
        cot_op_explain(case_direction(w->cases, c), w->explain_queue, c->args, choices, &count) != COT_OK)
        return true;
    for (int i = 0; i < count; i++)
        if (kernel_selected(w, choices[i].kernel) &&
            (choices[i].refusal == NULL || (choices[i].kernel->isa & ~w->explain_queue->isa) != 0))
            return true;
    return false;
}

static void check_case(worker *w, const cot_case *c)
{
    if (!case_selected(w, c) || w->case_number++ != w->next_case)
        return;
    char text[256];
    describe_case(w->cases, c, text, sizeof text);
    if (w->reports_progress)
        w->options->progress(w->options->context, (double)w->next_case / (double)w->results->total, text);
    if (any_kernel_selected(w, c)) {
        reference ref = reference_make(w->cases, c);
        reference_run_oracle(&ref);
        check_case_kernels(w, &ref, text);
        reference_free(&ref);
    }
    if ((c->uses & COT_CASE_GRADIENT) && w->options->backend == COT_BACKEND_CPU)
        record_gradient(w, check_gradient(w->cases, c), text);
    w->next_case = atomic_fetch_add(&w->results->next, 1);
}

static void count_case(worker *w, const cot_case *c)
{
    w->results->total += case_selected(w, c);
}

/* A NaN whose bits after the sign are ones, in every dtype. Rounding by integer arithmetic carries into the sign. */
static double nan_of_ones(void)
{
    const uint64_t bits = UINT64_MAX >> 1;
    double nan;
    memcpy(&nan, &bits, sizeof nan);
    return nan;
}

/* Visits the case. A quick case is also visited with a NaN and with an infinity in each float input in turn. With
 * --quick, such a case has only one variant, and the next case has another. */
static void visit_with_specials(worker *w, const cot_case *c, void (*visit)(worker *, const cot_case *))
{
    const cot_direction *direction = case_direction(w->cases, c);
    visit(w, c);
    if (!(c->uses & COT_CASE_QUICK) || c->special != 0)
        return;
    cot_case special = *c;
    special.uses &= ~(unsigned)COT_CASE_GRADIENT;
    uint64_t state = c->seed;
    int64_t variant_count = 0, base_number = w->base_count++;
    for (int pass = 0; pass < 2; pass++) /* first counts the variants, then visits them */
        for (int f = 0, variant = 0; f < direction->field_count; f++) {
            const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)c->args);
            const int64_t count = cot_is_present(tensor) ? cot_elements(tensor) : 0;
            if (count == 0 || tensor->dtype == COT_I32 || tensor->dtype == COT_U8 ||
                !field_has_initial_value(direction, &direction->fields[f], c->args))
                continue;
            for (int value = 0; value < 2; value++, variant++) {
                variant_count += pass == 0;
                if (pass == 0 || (w->options->quick && variant != base_number % variant_count))
                    continue;
                special.special = value == 0 ? nan_of_ones() : cot_draw_bool(&state) ? INFINITY : -INFINITY;
                special.special_field = f;
                special.special_element = cot_draw_below(&state, count);
                visit(w, &special);
            }
        }
}

static bool check_variants(void *context, const cot_case *c)
{
    visit_with_specials(context, c, check_case);
    return true;
}

static bool count_variants(void *context, const cot_case *c)
{
    visit_with_specials(context, c, count_case);
    return true;
}

static void *run_worker(void *argument)
{
    worker *w = argument;
    const int threads_per_job = omp_get_num_procs() / w->options->jobs;
    omp_set_num_threads(threads_per_job > 1 ? threads_per_job : 1); /* for the oracles; kernels use their queue's */
    w->next_case = atomic_fetch_add(&w->results->next, 1);
    w->base_count = 0;
    w->cases->each(check_variants, w);
    return NULL;
}

/* ---- all cases ---------------------------------------------------------------------------------------- */

static void print_tallies(const shared_results *results, const cot_op *op, const check_options *options, summary *total)
{
    if (results->gradients_passed + results->gradients_failed > 0)
        printf("%-48s %6" PRId64 " passed %4" PRId64
               " failed   off from finite differences by at most %.2g (allowed %.0e)\n",
               "oracle's gradients", results->gradients_passed, results->gradients_failed, results->worst_gradient,
               gradient_tolerance);
    for (int i = 0; i < op->kernel_count; i++) {
        const tally *t = &results->tallies[i];
        total->passed += t->passed;
        total->failed += t->failed;
        total->skipped += t->skipped;
        total->kernel_tests += t->passed + t->failed;
        if (t->passed + t->failed == 0 && t->skipped == 0)
            continue;
        printf("%-48s %6" PRId64 " passed %4" PRId64 " failed %4" PRId64 " skipped", t->kernel->name, t->passed,
               t->failed, t->skipped);
        if (t->passed > 0)
            printf("   at most %.2f of the tolerance", t->worst_ratio);
        if (options->hash && t->passed + t->failed > 0)
            printf("   hash %016" PRIx64, t->hash);
        printf("\n");
        if (options->report && t->passed > 0)
            printf("    closest to the tolerance: %s; largest error %.3g ulp\n", t->worst_case, t->worst_ulp);
    }
    total->passed += results->gradients_passed;
    total->failed += results->gradients_failed;
    total->cases += results->total;
}

/* The calling thread is worker 0. */
static void check_op(const check_options *options, const cot_op_cases *cases, summary *total)
{
    shared_results results = {.lock = PTHREAD_MUTEX_INITIALIZER};
    worker *workers = allocate((size_t)options->jobs, sizeof *workers);
    cot_queue_options queue_options;
    COT_INIT(&queue_options);
    queue_options.backend = options->backend;
    queue_options.kernels = "";
    for (int j = 0; j < cases->op->kernel_count; j++)
        results.tallies[j].kernel = &cases->op->kernels[j];
    int queue_count = 0, thread_count = 1;
    for (; queue_count < options->jobs; queue_count++) {
        workers[queue_count] = (worker){.options = options, .cases = cases, .results = &results};
        if (cot_queue_create(&queue_options, &workers[queue_count].explain_queue) != COT_OK)
            break;
    }
    if (queue_count < options->jobs) {
        printf("FAILED %s: %s\n", cases->op->name, cot_error_message());
        total->failed++;
    } else {
        workers[0].reports_progress = options->progress != NULL;
        cases->each(count_variants, &workers[0]);
        while (thread_count < options->jobs &&
               pthread_create(&workers[thread_count].thread, NULL, run_worker, &workers[thread_count]) == 0)
            thread_count++;
        run_worker(&workers[0]);
        for (int i = 1; i < thread_count; i++)
            pthread_join(workers[i].thread, NULL);
        if (options->progress != NULL)
            options->progress(options->context, 1, "");
        print_tallies(&results, cases->op, options, total);
    }
    for (int i = 0; i < queue_count; i++) {
        cot_queue_destroy(workers[i].explain_queue);
        for (int j = 0; j < COT_MAX_KERNELS; j++)
            cot_queue_destroy(workers[i].device_queues[j]);
    }
    free(workers);
}

/* Prints why no kernel was checked: names the first option that left nothing to check. */
static void print_why_nothing_checked(const check_options *options, const summary *total)
{
    const char *op = options->op != NULL ? options->op : "any op", *only = options->only;
    const char *backend = cot_backend_name(options->backend);
    fprintf(stderr, "cotangent check: nothing was checked: ");
    if (total->cases == 0 && only != NULL)
        fprintf(stderr, "no case's description contains '%s'%s (of %s)\n", only, options->quick ? " with --quick" : "",
                op);
    else if (options->kernel != NULL && !kernel_exists(options->op, options->backend, options->kernel))
        fprintf(stderr, "no kernel's name contains '%s' (of %s, backend %s)\n", options->kernel, op, backend);
    else if (total->skipped > 0)
        fprintf(stderr, "this machine lacks the instruction set of every kernel in question\n");
    else if (options->kernel != NULL)
        fprintf(stderr, "no kernel with '%s' in its name supports a case%s%s%s (of %s, backend %s)\n", options->kernel,
                only != NULL ? " that contains '" : "", only != NULL ? only : "", only != NULL ? "'" : "", op, backend);
    else
        fprintf(stderr, "no kernel of backend %s supports these cases (of %s)\n", backend, op);
}

int64_t check_run(const check_options *options)
{
    summary total = {0};
    for (int i = 0; i < cot_op_count; i++)
        if (options->op == NULL || strcmp(options->op, cot_ops[i]->name) == 0)
            check_op(options, cot_all_cases[i], &total);
    printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " skipped\n", total.passed, total.failed, total.skipped);
    fflush(stdout); /* so that it precedes the message on stderr */
    if (total.failed == 0 && total.kernel_tests == 0) {
        print_why_nothing_checked(options, &total);
        return CHECKED_NOTHING;
    }
    return total.failed;
}
