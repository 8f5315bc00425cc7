/* SPDX-License-Identifier: Apache-2.0
 * commands.h: the program's commands. Each takes its own argv (argv[0] = "cotangent COMMAND") and returns the exit
 * status: 0, 1 = a failure, 2 = wrong usage. */
#ifndef COT_CLI_COMMANDS_H
#define COT_CLI_COMMANDS_H

#include "cases/cases.h"

#include <argp.h>
#include <jansson.h>

int command_info(int argc, char **argv);
int command_ops(int argc, char **argv);
int command_explain(int argc, char **argv);
int command_check(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_profile(int argc, char **argv);
int command_demo(int argc, char **argv);
int command_run(int argc, char **argv);
int command_diff(int argc, char **argv);
int command_doctor(int argc, char **argv);

/* Calls argp_parse, and ends the program if memory is insufficient. */
void parse_arguments(const struct argp *parser, int argc, char **argv, void *input);

/* The exit status for a call that the library refused: 2 if the user can correct the call, 1 if the machine fails. */
int exit_status(cot_status status);

/* Find the op, or the direction of an op, with this name. If there is none, they end the program through argp_error,
 * which lists the valid names. */
const cot_op *find_op(const struct argp_state *state, const char *name);
int find_direction(const struct argp_state *state, const cot_op *op, const char *name);
const cot_op_cases *find_cases(const cot_op *op);

/* Parses "cpu" or "cuda". Ends the program through argp_error for other words. */
cot_backend parse_backend(const struct argp_state *state, const char *name);

/* Returns whether a queue of this backend can be created. Prints the reason on standard error if not. */
bool backend_works(cot_backend backend);

/* Write the files of --json and --plot, by the rules of src/io/file.h. can_write tests, before minutes of measuring,
 * whether an option's file (or NULL) can be written. `draw` draws into a file and returns NULL, or a message if it
 * fails. On failure each function prints the reason on standard error and returns false. */
bool can_write(const char *option, const char *path);
bool write_json(const json_t *rows, const char *path);
bool write_plot(const json_t *rows, const char *path, const char *(*draw)(const json_t *rows, const char *path));

/* Parses a whole number in [min, max]. Otherwise ends the program through argp_error, which names the option. */
long parse_number(const struct argp_state *state, const char *option, const char *text, long min, long max);

/* Shows a progress bar on standard error if that is a terminal. For the progress callbacks of check and bench. A share
 * of 1 removes the bar. */
void show_progress(void *context, double share, const char *what);

/* Makes the case that `words` ("T=100", "bf16") describe. Ends the program through argp_error for an unknown word. */
void case_from_words(const struct argp_state *state, const cot_op *op, int direction, int count, char **words,
                     cot_case *c);

#endif
