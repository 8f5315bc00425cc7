/* SPDX-License-Identifier: Apache-2.0
 *
 * info.c: `cotangent info`, `cotangent ops` and `cotangent explain`: what this machine has, and which kernels calls
 * take. */
#include "bench/bench.h"
#include "bench/bench_device.h"
#include "check/check.h"
#include "commands.h"
#include "core/cpu_features.h"
#include "core/queue.h"
#include "parallel/explain.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_EXPLAINED_RANKS = 1024 };

/* A CPU queue with the settings of the user's environment. */
static cot_queue *default_queue(void)
{
    cot_queue *queue = NULL;
    const cot_status status = cot_queue_create(NULL, &queue);
    if (status != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        exit(exit_status(status));
    }
    return queue;
}

/* Returns "available", or why there is no HIP queue. *isa: the instruction sets that its kernels may use. */
static const char *describe_hip(uint32_t *isa)
{
    static char text[200] = "available";
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_HIP;
    *isa = 0;
    if (cot_queue_create(&options, &queue) != COT_OK) {
        snprintf(text, sizeof text, "%s", cot_error_message());
        return text;
    }
    *isa = queue->isa;
    cot_queue_destroy(queue);
    return text;
}

/* Returns "available, NVIDIA H200", or why there is no CUDA queue. *isa: the instruction sets that its kernels may
 * use. */
static const char *describe_cuda(uint32_t *isa)
{
    static char text[512] = "available, ";
    cot_queue *queue = NULL;
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    *isa = 0;
    if (cot_queue_create(&options, &queue) != COT_OK) { /* the next failing call overwrites the message */
        snprintf(text, sizeof text, "%s", cot_error_message());
        return text;
    }
    *isa = queue->isa;
    cot_queue_destroy(queue);
    const size_t length = strlen("available, ");
    bench_device_name(text + length, sizeof text - length);
    return text;
}

/* ---- info --------------------------------------------------------------------------------------------- */

static error_t parse_info(int key, char *argument, struct argp_state *state)
{
    (void)argument;
    if (key == 'j')
        *(bool *)state->input = true;
    else if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", argument);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

int command_info(int argc, char **argv)
{
    static const struct argp_option options[] = {{"json", 'j', 0, 0, "Print JSON", 0}, {0}};
    static const struct argp parser = {options, parse_info, "", "This machine, the backends and the version.", 0, 0, 0};
    bool json = false;
    parse_arguments(&parser, argc, argv, &json);
    char device[256];
    device_name(device, sizeof device);
    cot_queue *queue = default_queue();
    const uint32_t isa = cot_cpu_features();
    uint32_t cuda_isa, hip_isa;
    json_t *info = json_pack("{s:s, s:s, s:s, s:[s], s:i, s:{s:s, s:s, s:s}}", "version", cot_version(), "device",
                             device, "isa", cot_isa_name(isa), "isa_levels", cot_isa_name(COT_ISA_PORTABLE), "threads",
                             (int)cot_queue_threads(queue), "backends", "cpu", "available", "cuda",
                             describe_cuda(&cuda_isa), "hip", describe_hip(&hip_isa));
    for (uint32_t level = COT_ISA_AVX2; level <= COT_ISA_AMX; level <<= 1)
        if (isa & level)
            json_array_append_new(json_object_get(info, "isa_levels"), json_string(cot_isa_name(level)));
    if (json) {
        json_dumpf(info, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
        putchar('\n');
    } else {
        printf("cotangent %s\nprocessor  %s\nisa        %s\nthreads    %d\ncpu        available\ncuda       %s\n"
               "hip        %s\n",
               cot_version(), device, cot_isa_name(isa), (int)cot_queue_threads(queue), describe_cuda(&cuda_isa),
               describe_hip(&hip_isa));
    }
    json_decref(info);
    cot_queue_destroy(queue);
    return 0;
}

/* ---- ops ---------------------------------------------------------------------------------------------- */

static error_t parse_nothing(int key, char *argument, struct argp_state *state)
{
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", argument);
    return ARGP_ERR_UNKNOWN;
}

/* The kernel that is chosen on this machine for each layout, by the benchmark's first case in that layout. */
typedef struct layout_kernels {
    const cot_op_cases *cases;
    const cot_queue *queue;
    int direction;
    const cot_kernel *kernels[8];
    const char *layouts[8];
    int count;
} layout_kernels;

static bool add_layout_kernel(void *context, const cot_case *c)
{
    layout_kernels *r = context;
    if (!(c->uses & COT_CASE_BENCH) || c->direction != r->direction || r->count == 8)
        return true;
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->layouts[i], c->layout) == 0)
            return true;
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    if (cot_op_explain(&r->cases->op->directions[r->direction], r->queue, c->args, choices, &count) != COT_OK)
        return true;
    for (int i = 0; i < count; i++) {
        if (!choices[i].chosen)
            continue;
        r->layouts[r->count] = c->layout;
        r->kernels[r->count++] = choices[i].kernel;
    }
    return true;
}

static void print_kernels(const cot_op *op, int direction, const layout_kernels *r, uint32_t isa)
{
    for (int k = 0; k < op->kernel_count; k++) {
        const cot_kernel *kernel = &op->kernels[k];
        if (kernel->direction != direction)
            continue;
        printf("    %-46s %-7s %s", kernel->name,
               kernel->backend == COT_BACKEND_CPU ? cot_isa_name(kernel->isa) : cot_backend_name(kernel->backend),
               (kernel->isa & ~isa) == 0            ? "runs here"
               : kernel->backend == COT_BACKEND_CPU ? "not on this processor"
                                                    : "not on this device");
        for (int i = 0; i < r->count; i++)
            if (r->kernels[i] == kernel)
                printf("; taken for %s", r->layouts[i]);
        putchar('\n');
    }
}

int command_ops(int argc, char **argv)
{
    static const struct argp parser = {
        0, parse_nothing, "", "The ops, their kernels, and which of them this machine runs and takes.", 0, 0, 0};
    parse_arguments(&parser, argc, argv, NULL);
    cot_queue *queue = default_queue();
    uint32_t cuda_isa, hip_isa;
    describe_cuda(&cuda_isa);
    describe_hip(&hip_isa);
    for (int i = 0; i < cot_op_count; i++) {
        printf("%s\n", cot_ops[i]->name);
        for (int d = 0; d < cot_ops[i]->direction_count; d++) {
            layout_kernels r = {.cases = find_cases(cot_ops[i]), .queue = queue, .direction = d};
            r.cases->each(add_layout_kernel, &r);
            printf("  %s\n", cot_ops[i]->directions[d].name);
            print_kernels(cot_ops[i], d, &r, cot_cpu_features() | cuda_isa | hip_isa);
        }
    }
    cot_queue_destroy(queue);
    return 0;
}

/* ---- explain ------------------------------------------------------------------------------------------ */

typedef struct explain_input {
    const cot_op *op;
    int direction, ranks;
    cot_backend backend;
    cot_case c;
} explain_input;

static error_t parse_explain(int key, char *argument, struct argp_state *state)
{
    explain_input *input = state->input;
    char *end;
    switch (key) {
    case 'b': input->backend = parse_backend(state, argument); return 0;
    case 'r':
        input->ranks = (int)strtol(argument, &end, 10);
        if (*end != '\0' || input->ranks < 1 || input->ranks > MAX_EXPLAINED_RANKS)
            argp_error(state, "--ranks is %s, expected 1 to %d", argument, MAX_EXPLAINED_RANKS);
        return 0;
    case ARGP_KEY_ARGS: {
        char **words = state->argv + state->next;
        const int count = state->argc - state->next;
        input->op = find_op(state, words[0]);
        if (count < 2)
            argp_error(state, "DIRECTION is missing");
        input->direction = find_direction(state, input->op, words[1]);
        case_from_words(state, input->op, input->direction, count - 2, words + 2, &input->c);
        if (input->ranks > 0 && (strcmp(input->op->name, "attention") != 0 || input->direction > 1))
            argp_error(state, "--ranks explains attention's forward and backward");
        return 0;
    }
    case ARGP_KEY_NO_ARGS: argp_error(state, "OP is missing"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

#ifdef COT_WITH_PARALLEL
/* One way to divide a call among ranks: a line of the table. */
static int explain_options(cot_queue *queue, const explain_input *input, const cot_parallel_options *options)
{
    const bool has_lines = options->head_ranks < input->ranks;
    cot_parallel_cost cost;
    const cot_status status =
        cot_parallel_explain(queue, input->direction, input->c.args, input->ranks, options, &cost);
    if (status != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        return exit_status(status);
    }
    printf("  %-10s %10d  %-10s  ", options->cut == COT_CUT_ZIGZAG ? "zigzag" : "contiguous", (int)options->head_ranks,
           !has_lines            ? ""
           : options->all_gather ? "all-gather"
                                 : "ring");
    if (cost.status != COT_OK)
        printf("refused: %s\n", cost.refusal);
    else
        printf("%5lld  %6lld  %8lld  %8.1f  %9.1f  %11.2f\n", (long long)cost.calls, (long long)cost.merges,
               (long long)cost.messages, 1e-6 * (double)cost.sent_bytes, 1e-6 * (double)cost.memory_bytes,
               cost.balance);
    return 0;
}
#endif

/* The ways to divide a call among ranks: each cut with each number of ranks that exchange heads, as a ring and with an
 * all-gather. */
static int explain_ranks(cot_queue *queue, const explain_input *input)
{
#ifdef COT_WITH_PARALLEL
    int status = 0;
    printf("over %d ranks (docs/guide/context_parallel_c.md); the most of any rank:\n"
           "  cut        head ranks  keys        calls  merges  messages   MB sent  MB memory  work / mean\n",
           input->ranks);
    for (int cut = COT_CUT_CONTIGUOUS; cut <= COT_CUT_ZIGZAG; cut++)
        for (int head_ranks = 1; head_ranks <= input->ranks; head_ranks++)
            for (int all_gather = 0; all_gather < 2 && input->ranks % head_ranks == 0 && status == 0; all_gather++) {
                cot_parallel_options options;
                COT_INIT(&options);
                options.cut = (cot_cut)cut;
                options.head_ranks = head_ranks;
                options.all_gather = all_gather;
                if (!all_gather || head_ranks < input->ranks)
                    status = explain_options(queue, input, &options);
            }
    return status;
#else
    (void)queue, (void)input;
    fprintf(stderr, "cotangent: this build has no libcotangent_parallel\n");
    return 2;
#endif
}

/* For a refusal such as "it supports K up to 32", formats the case's own K from its shape "B2 D64 T100 K40". Formats ""
 * for other refusals. */
static void format_refused_size(const char *refusal, const char *shape, char *text, size_t size)
{
    const char *symbol = strstr(refusal, "supports ");
    text[0] = '\0';
    if (symbol == NULL || strstr(symbol, " up to ") == NULL)
        return;
    symbol += strlen("supports ");
    const size_t length = strcspn(symbol, " ");
    for (const char *word = shape; *word != '\0'; word += strcspn(word, " "), word += strspn(word, " "))
        if (strncmp(word, symbol, length) == 0 && word[length] >= '0' && word[length] <= '9')
            snprintf(text, size, ", here %.*s is %.*s", (int)length, symbol, (int)strcspn(word + length, " "),
                     word + length);
}

/* Adds the words of each op to the end of --help. */
static char *explain_help(int key, const char *text, void *input)
{
    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC)
        return (char *)text;
    size_t size = strlen(text) + 1;
    for (int i = 0; i < cot_op_count; i++)
        size += strlen(cot_ops[i]->name) + strlen(find_cases(cot_ops[i])->options_help) + sizeof "\n\n: ";
    char *help = malloc(size);
    if (help == NULL)
        return (char *)text;
    size_t used = (size_t)snprintf(help, size, "%s", text);
    for (int i = 0; i < cot_op_count; i++)
        used += (size_t)snprintf(help + used, size - used, "\n\n%s: %s", cot_ops[i]->name,
                                 find_cases(cot_ops[i])->options_help);
    return help;
}

int command_explain(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"backend", 'b', "cpu|cuda|hip", 0, "The backend of the call (cpu). cuda and hip need their device", 0},
        {"ranks", 'r', "N", 0, "Attention: the ways to divide the call among N ranks of libcotangent_parallel", 0},
        {0}};
    static const struct argp parser = {
        options,
        parse_explain,
        "OP DIRECTION [WORD...]",
        "Which kernel a call would take, and why no other.\vWORDs describe the call, as in\n"
        "  cotangent explain causal_conv1d backward B=2 D=64 T=100 K=4 bf16 channel-last silu\n"
        "COT_KERNEL=op=kernel,... in the environment forces a kernel. The words of each op, sizes with an example:",
        0,
        explain_help,
        0};
    explain_input input = {0};
    parse_arguments(&parser, argc, argv, &input);
    const cot_direction *direction = &input.op->directions[input.direction];
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0, status = 0;
    cot_queue *queue = NULL;
    cot_queue_options queue_options;
    COT_INIT(&queue_options);
    queue_options.backend = input.backend;
    const cot_status created = cot_queue_create(&queue_options, &queue);
    if (created != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        return exit_status(created);
    }
    char text[256];
    describe_case(find_cases(input.op), &input.c, text, sizeof text);
    printf("%s %s\n", input.op->name, text);
    const cot_status explained = cot_op_explain(direction, queue, input.c.args, choices, &count);
    if (explained != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        status = exit_status(explained);
    }
    for (int i = 0; i < count && status == 0; i++) {
        printf("  %-46s ", choices[i].kernel->name);
        char refused_size[64] = "";
        if (choices[i].refusal != NULL) {
            format_refused_size(choices[i].refusal, input.c.shape, refused_size, sizeof refused_size);
            printf("refused: %s%s\n", choices[i].refusal, refused_size);
        } else {
            printf("%s: cost %.4g, workspace %zu bytes\n", choices[i].chosen ? "chosen  " : "admitted", choices[i].cost,
                   choices[i].workspace_bytes);
        }
    }
    if (status == 0 && input.ranks > 0)
        status = explain_ranks(queue, &input);
    cot_queue_destroy(queue);
    return status;
}
