/* SPDX-License-Identifier: Apache-2.0
 *
 * demo_command.c: `cotangent demo`. */
#include "bench/bench.h"
#include "bench/demo.h"
#include "commands.h"

#include <stdio.h>

typedef struct demo_input {
    demo_options options;
    const char *json, *plot;
} demo_input;

static bool parse_switch(const struct argp_state *state, const char *option, const char *text)
{
    if (strcmp(text, "on") != 0 && strcmp(text, "off") != 0)
        argp_error(state, "%s is '%s', expected on or off", option, text);
    return strcmp(text, "on") == 0;
}

static error_t parse(int key, char *argument, struct argp_state *state)
{
    demo_input *input = state->input;
    switch (key) {
    case 'b': input->options.backend = parse_backend(state, argument); return 0;
    case 'j': input->json = argument; return 0;
    case 'p': input->plot = argument; return 0;
    case 'q': input->options.quick = true; return 0;
    case 'v': input->options.verify = parse_switch(state, "--verify", argument); return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0)
            argp_error(state, "unexpected argument '%s'", argument);
        if (demo_title(argument) == NULL)
            argp_error(state, "NUMBER is '%s', expected one of: %s", argument, demo_numbers);
        input->options.number = argument;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "NUMBER is missing, expected one of: %s", demo_numbers); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* Returns the rows that bench_plot can draw: those of kernels. */
static json_t *measured_rows(const json_t *rows)
{
    json_t *measured = json_array(), *row;
    size_t index;
    json_array_foreach((json_t *)rows, index, row)
    {
        if (json_object_get(row, "kernel") != NULL)
            json_array_append(measured, row);
    }
    return measured;
}

int command_demo(int argc, char **argv)
{
    static const struct argp_option table[] = {
        {"backend", 'b', "cpu|cuda|hip", 0, "Run on this backend (cpu)", 0},
        {"json", 'j', "FILE", 0, "Write rows and figures as JSON", 0},
        {"plot", 'p', "FILE.svg", 0, "Draw the rows with gnuplot", 0},
        {"quick", 'q', 0, 0, "Small sizes: test that it works, not how fast it is", 0},
        {"verify", 'v', "on|off", 0, "Compare every output with the oracle (on)", 0},
        {0}};
    static const struct argp parser = {
        table,
        parse,
        "NUMBER",
        "Runs the task of one of the five original specifications on generated tensors, and prints its figures next to "
        "the document's figures.\v"
        "000: causal conv1d, backward\n001: attention, backward\n002: dropout and bias, backward\n"
        "003: causal conv1d, forward\n004: hyper-connections, backward\n"
        "docs/original_specifications.md describes each. For your own tensors, use `cotangent run OP DIRECTION "
        "--verify`.",
        0,
        0,
        0};
    demo_input input = {.options = {.verify = true, .progress = show_progress}};
    parse_arguments(&parser, argc, argv, &input);
    if (!can_write("--json", input.json) || !can_write("--plot", input.plot))
        return 2;
    if (!backend_works(input.options.backend))
        return 1;
    const char *missing = demo_missing_op(input.options.number, input.options.backend);
    if (missing != NULL) {
        fprintf(stderr, "cotangent demo: NUMBER is '%s', whose op %s has no kernel of backend %s\n",
                input.options.number, missing, cot_backend_name(input.options.backend));
        return 2;
    }
    bool good = false;
    json_t *rows = demo_run(&input.options, &good);
    int status = good ? 0 : 1;
    if (input.json != NULL && !write_json(rows, input.json))
        status = 1;
    json_t *measured = measured_rows(rows);
    if (input.plot != NULL && !write_plot(measured, input.plot, bench_plot))
        status = 1;
    json_decref(measured);
    json_decref(rows);
    return status;
}
