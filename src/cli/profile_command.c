/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_command.c: `cotangent profile`. */
#include "bench/profile.h"
#include "commands.h"

#include <errno.h>
#include <stdio.h>

typedef struct profile_input {
    profile_options options;
    cot_backend backend;
    const char *from, *json, *plot;
    const cot_op *op;
    int direction; /* -1 = all */
    int word_count;
    char **words;
} profile_input;

/* Returns 1 for the first word and 2 for the second. Ends the program through argp_error for other words. */
static unsigned parse_mode(const struct argp_state *state, const char *option, const char *text, const char *one,
                           const char *two)
{
    if (strcmp(text, one) != 0 && strcmp(text, two) != 0)
        argp_error(state, "%s is '%s', expected %s or %s", option, text, one, two);
    return strcmp(text, one) == 0 ? 1 : 2;
}

static error_t parse(int key, char *argument, struct argp_state *state)
{
    profile_input *input = state->input;
    switch (key) {
    case 'F': input->from = argument; return 0;
    case 'b': input->backend = parse_backend(state, argument); return 0;
    case 'm': input->options.memory = parse_mode(state, "--memory", argument, "fresh", "pool"); return 0;
    case 's': input->options.streams = parse_mode(state, "--streams", argument, "1", "2"); return 0;
    case 'f': input->options.batch = parse_mode(state, "--batch", argument, "fused", "loop"); return 0;
    case 'j': input->json = argument; return 0;
    case 'p': input->plot = argument; return 0;
    case ARGP_KEY_ARGS: {
        input->words = state->argv + state->next;
        input->word_count = state->argc - state->next;
        input->op = find_op(state, input->words[0]);
        if (input->word_count > 1)
            input->direction = find_direction(state, input->op, input->words[1]);
        cot_case c; /* parsed here too, so that an unknown word ends the program early */
        if (input->word_count > 2)
            case_from_words(state, input->op, input->direction, input->word_count - 2, input->words + 2, &c);
        return 0;
    }
    case ARGP_KEY_END:
        if ((input->op == NULL) == (input->from == NULL))
            argp_error(state, input->op == NULL ? "OP is missing" : "--from shows a file: OP is too much");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* Profiles the directions and returns the exit status. */
static int profile_directions(const profile_input *input, json_t *rows)
{
    int failed = 0;
    for (int d = 0; d < input->op->direction_count; d++) {
        if (input->direction >= 0 && d != input->direction)
            continue;
        cot_case c;
        const int count = input->word_count > 2 ? input->word_count - 2 : 0;
        find_cases(input->op)->parse(d, count, input->words + 2, &c);
        const cot_status status = profile_case(find_cases(input->op), &c, input->backend, &input->options, rows);
        if (status == COT_OK)
            continue;
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        if (status != COT_UNSUPPORTED || input->direction >= 0)
            failed = status == COT_DEVICE_ERROR || status == COT_OUT_OF_MEMORY ? 1 : 2;
    }
    return failed != 0 || json_array_size(rows) > 0 ? failed : 2;
}

int command_profile(int argc, char **argv)
{
    static const struct argp_option table[] = {
        {"backend", 'b', "cuda|hip", 0, "The backend (cuda)", 0},
        {"batch", 'f', "fused|loop", 0, "One call for the whole batch, or one for each item (both)", 0},
        {"from", 'F', "FILE.json", 0, "Show the rows of an earlier --json instead of measuring", 0},
        {"json", 'j', "FILE", 0, "Write the rows as JSON", 0},
        {"memory", 'm', "fresh|pool", 0, "Allocate the device memory in every call, or once (both)", 0},
        {"plot", 'p', "FILE.svg", 0, "Draw the rows with gnuplot", 0},
        {"streams", 's', "1|2", 0, "Copies and kernels one after the other, or overlapped (both)", 0},
        {0}};
    static const struct argp parser = {
        table,
        parse,
        "OP [DIRECTION [WORD...]]\n--from=FILE.json",
        "Where the time of a call on a GPU goes when its data lie in the host's memory: allocation, copies, kernels; and "
        "what registers, shared memory and occupancy each kernel has.\v"
        "The host memory is page-locked. The same call is measured in every mode that the options "
        "allow. With two streams, a fused batch is two calls, of a half each. DIRECTION (all) and WORDs describe the case, as in\n"
        "  cotangent profile causal_conv1d forward B=8 D=4096 T=4096 K=4 bf16 silu bias",
        0,
        0,
        0};
    profile_input input = {.options = {3, 3, 3}, .backend = COT_BACKEND_CUDA, .direction = -1};
    parse_arguments(&parser, argc, argv, &input);
    if (input.backend == COT_BACKEND_CPU) {
        fprintf(stderr, "cotangent: profile measures copies to a GPU and back, of which backend cpu makes none; "
                        "`cotangent bench` times its kernels\n");
        return 2;
    }
    if (!can_write("--json", input.json) || !can_write("--plot", input.plot))
        return 2;
    int status = 0;
    json_t *rows;
    if (input.from != NULL) {
        const char *why;
        errno = 0;
        rows = profile_load(input.from, &why);
        const bool out_of_memory_error = errno == ENOMEM;
        if (rows == NULL) {
            fprintf(stderr, "cotangent: --from %s: %s\n", input.from, out_of_memory_error ? "out of memory" : why);
            return out_of_memory_error ? 1 : 2;
        }
    } else {
        if (!backend_works(input.backend))
            return 1;
        rows = json_array();
        status = profile_directions(&input, rows);
    }
    profile_print(rows);
    if (json_array_size(rows) > 0 && input.json != NULL && !write_json(rows, input.json))
        status = 1;
    if (json_array_size(rows) > 0 && input.plot != NULL && !write_plot(rows, input.plot, profile_plot))
        status = 1;
    json_decref(rows);
    return status;
}
