/* SPDX-License-Identifier: Apache-2.0
 * commands.h: the program's commands. Each takes its own argv (argv[0] = "cotangent COMMAND") and returns the exit
 * status: 0, 1 = something failed or cannot be done, 2 = wrong usage. */
#ifndef COT_CLI_COMMANDS_H
#define COT_CLI_COMMANDS_H

#include "core/cases.h"

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

/* argp_parse, which ends the program where there is no memory to parse them. */
void parse_arguments(const struct argp *parser, int argc, char **argv, void *input);

/* Of a call that the library refused: 2 where the user can do something about it, 1 where the machine fails. */
int exit_status(cot_status status);

/* The op, or the direction of an op, with this name; ends the program through argp_error, which names what there is,
 * if none has it. */
const cot_op *find_op(const struct argp_state *state, const char *name);
int find_direction(const struct argp_state *state, const cot_op *op, const char *name);
const cot_op_cases *find_cases(const cot_op *op);

/* "cpu" or "cuda"; ends the program through argp_error for any other word. */
cot_backend find_backend(const struct argp_state *state, const char *name);

/* Can a queue of this backend be made? Says why not on standard error. */
bool backend_works(cot_backend backend);

/* The files of --json and --plot, written as src/io/file.h has it. can_write tells before minutes of measuring whether an
 * option's file, or NULL, can be written. `draw` draws into a file and returns NULL or what failed. On failure each says why on
 * standard error and returns false. */
bool can_write(const char *option, const char *path);
bool write_json(const json_t *rows, const char *path);
bool write_plot(const json_t *rows, const char *path, const char *(*draw)(const json_t *rows, const char *path));

/* A whole number in [least, most]; ends the program through argp_error, which names the option, otherwise. */
long find_number(const struct argp_state *state, const char *option, const char *text, long least, long most);

/* A bar on standard error while work goes on, if that is a terminal; nothing otherwise. For check's and bench's
 * progress callbacks; a share of 1 takes it away. */
void show_progress(void *context, double share, const char *what);

/* Fills the case that `words` ("T=100", "bf16") describe; ends the program through argp_error for an unknown one. */
void case_from_words(const struct argp_state *state, const cot_op *op, int direction, int count, char **words,
                     cot_case *c);

#endif
