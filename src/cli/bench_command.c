/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_command.c: `cotangent bench`. */
#include "bench/bench.h"
#include "commands.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct bench_input {
    bench_options options;
    const char *json, *plot;
    cot_case one;
} bench_input;

static volatile sig_atomic_t stop_requested;

static void request_stop(int signal_number)
{
    (void)signal_number;
    stop_requested = 1;
}

static error_t parse(int key, char *argument, struct argp_state *state)
{
    bench_input *input = state->input;
    bench_options *options = &input->options;
    switch (key) {
    case 'b': options->backend = parse_backend(state, argument); return 0;
    case 'c': options->chosen_only = true; return 0;
    case 'j': input->json = argument; return 0;
    case 'k': options->kernel = argument; return 0;
    case 'l': options->load_seconds = parse_number(state, "--load", argument, 0, 3600); return 0;
    case 'o': options->only = argument; return 0;
    case 'p': input->plot = argument; return 0;
    case 't': options->threads = (int)parse_number(state, "--threads", argument, 1, 4096); return 0;
    case ARGP_KEY_ARGS: {
        char **words = state->argv + state->next;
        const int count = state->argc - state->next;
        const cot_op *op = find_op(state, words[0]);
        options->op = op->name;
        if (count > 1) {
            const int direction = find_direction(state, op, words[1]);
            case_from_words(state, op, direction, count - 2, words + 2, &input->one);
            options->one = &input->one;
        }
        return 0;
    }
    default: return ARGP_ERR_UNKNOWN;
    }
}

int command_bench(int argc, char **argv)
{
    static const struct argp_option table[] = {
        {"backend", 'b', "cpu|cuda|hip", 0, "Time this backend's kernels (cpu)", 0},
        {"chosen", 'c', 0, 0, "Only the kernel that a call would take", 0},
        {"json", 'j', "FILE", 0, "Write the rows as JSON", 0},
        {"kernel", 'k', "TEXT", 0, "Only kernels whose name contains TEXT, however slow", 0},
        {"load", 'l', "SECONDS", 0,
         "GPU: run each chosen kernel that products bound for SECONDS, and time the second half (3); 0: no such load",
         0},
        {"only", 'o', "TEXT", 0, "Only cases whose description contains TEXT", 0},
        {"plot", 'p', "FILE.svg", 0, "Draw the rows with gnuplot", 0},
        {"threads", 't', "N", 0, "CPU threads (all)", 0},
        {0}};
    static const struct argp parser = {
        table,
        parse,
        "[OP [DIRECTION [WORD...]]]",
        "Times every kernel on the cases of the benchmark, and compares it with the machine's ceilings.\v"
        "DIRECTION and WORDs describe a case of your own, as in\n"
        "  cotangent bench causal_conv1d backward B=2 D=64 T=4096 K=4 bf16 channel-last silu",
        0,
        0,
        0};
    static bench_input input = {.options = {.progress = show_progress, .load_seconds = 3}};
    parse_arguments(&parser, argc, argv, &input);
    if (!can_write("--json", input.json) || !can_write("--plot", input.plot))
        return 2;
    if (!backend_works(input.options.backend))
        return 1;
    /* The first signal ends the program after the current case and writes the rows so far. The second one ends it at
     * once. */
    const struct sigaction stop_action = {.sa_handler = request_stop, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &stop_action, NULL);
    sigaction(SIGTERM, &stop_action, NULL);
    input.options.stop = &stop_requested;
    json_t *rows = bench_run(&input.options);
    bench_print(rows);
    /* No row: the op refuses the case, or the filters match nothing. */
    int status = json_array_size(rows) > 0 ? 0 : 2;
    if (stop_requested) {
        fprintf(stderr, "cotangent bench: interrupted; these are not all rows\n");
        status = 1;
    }
    if (input.json != NULL && !write_json(rows, input.json))
        status = 1;
    if (input.plot != NULL && !write_plot(rows, input.plot, bench_plot))
        status = 1;
    json_decref(rows);
    return status;
}
