/* SPDX-License-Identifier: Apache-2.0
 *
 * check_command.c: `cotangent check`. */
#include "check/check.h"
#include "commands.h"

#include <string.h>
#include <unistd.h>

enum { HASH = 256 };

static error_t parse(int key, char *argument, struct argp_state *state)
{
    check_options *options = state->input;
    switch (key) {
    case HASH: options->hash = true; return 0;
    case 'b': options->backend = parse_backend(state, argument); return 0;
    case 'j': options->jobs = (int)parse_number(state, "--jobs", argument, 1, 1024); return 0;
    case 'k': options->kernel = argument; return 0;
    case 'o': options->only = argument; return 0;
    case 'q': options->quick = true; return 0;
    case 'n': options->repeat = (int)parse_number(state, "--repeat", argument, 2, 1000000); return 0;
    case 'r': options->report = true; return 0;
    case ARGP_KEY_ARG:
        if (options->op != NULL)
            argp_error(state, "unexpected argument '%s'", argument);
        options->op = find_op(state, argument)->name;
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int command_check(int argc, char **argv)
{
    static const struct argp_option table[] = {
        {"backend", 'b', "cpu|cuda|hip", 0, "Check this backend's kernels (cpu)", 0},
        {"hash", HASH, 0, 0,
         "Print a hash of each kernel's outputs: equal hashes of two builds mean the same bits in every case", 0},
        {"jobs", 'j', "N", 0, "Check N cases at a time (as many as there are cores)", 0},
        {"kernel", 'k', "TEXT", 0, "Only kernels whose name contains TEXT", 0},
        {"only", 'o', "TEXT", 0, "Only cases whose description contains TEXT, as in 'bf16 channel-last'", 0},
        {"quick", 'q', 0, 0, "Fewer cases", 0},
        {"repeat", 'n', "N", 0, "Run every case N times and compare the bytes (2)", 0},
        {"report", 'r', 0, 0, "For every failure: errors in units of the dtype, counts, and where along each axis", 0},
        {0}};
    static const struct argp parser = {
        table,
        parse,
        "[OP]",
        "Compares every kernel with its oracle, and the oracle's gradients with finite differences.\v"
        "The last line is \"N passed, N failed, N skipped\". The exit status is 1 if any failed, and 2 if no kernel ran: "
        "the options match nothing, or this machine lacks the instruction set of all kernels that they name.",
        0,
        0,
        0};
    check_options options = {.repeat = 2, .jobs = (int)sysconf(_SC_NPROCESSORS_ONLN), .progress = show_progress};
    parse_arguments(&parser, argc, argv, &options);
    if (!backend_works(options.backend))
        return 1;
    const int64_t failed = check_run(&options);
    return failed == CHECKED_NOTHING ? 2 : failed > 0;
}
