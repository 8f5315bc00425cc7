/* SPDX-License-Identifier: Apache-2.0
 *
 * shared.c: parses names and numbers of the command line, writes the files of --json and --plot, and shows the progress
 * bar. */
#include "commands.h"
#include "io/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

void parse_arguments(const struct argp *parser, int argc, char **argv, void *input)
{
    const error_t error = argp_parse(parser, argc, argv, 0, NULL, input);
    if (error == 0)
        return;
    fprintf(stderr, "cotangent: the command line: %s\n", strerror(error));
    exit(1);
}

int exit_status(cot_status status)
{
    return status == COT_OUT_OF_MEMORY || status == COT_NO_DEVICE || status == COT_DEVICE_ERROR ? 1 : 2;
}

const cot_op *find_op(const struct argp_state *state, const char *name)
{
    char names[512] = "";
    for (int i = 0; i < cot_op_count; i++) {
        if (strcmp(cot_ops[i]->name, name) == 0)
            return cot_ops[i];
        snprintf(names + strlen(names), sizeof names - strlen(names), " %s", cot_ops[i]->name);
    }
    argp_error(state, "OP is '%s', expected one of:%s", name, names);
    return NULL;
}

int find_direction(const struct argp_state *state, const cot_op *op, const char *name)
{
    char names[512] = "";
    for (int i = 0; i < op->direction_count; i++) {
        if (strcmp(op->directions[i].name, name) == 0)
            return i;
        snprintf(names + strlen(names), sizeof names - strlen(names), " %s", op->directions[i].name);
    }
    argp_error(state, "DIRECTION is '%s', expected one of:%s", name, names);
    return -1;
}

const cot_op_cases *find_cases(const cot_op *op)
{
    for (int i = 0; i < cot_op_count; i++)
        if (cot_ops[i] == op)
            return cot_all_cases[i];
    return NULL;
}

cot_backend parse_backend(const struct argp_state *state, const char *name)
{
    if (strcmp(name, "cuda") == 0)
        return COT_BACKEND_CUDA;
    if (strcmp(name, "hip") == 0)
        return COT_BACKEND_HIP;
    if (strcmp(name, "cpu") != 0)
        argp_error(state, "--backend is '%s', expected cpu, cuda or hip", name);
    return COT_BACKEND_CPU;
}

long parse_number(const struct argp_state *state, const char *option, const char *text, long min, long max)
{
    char *end;
    errno = 0;
    const long number = strtol(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || number < min || number > max)
        argp_error(state, "%s is '%s', expected a whole number from %ld to %ld", option, text, min, max);
    return number;
}

/* Returns whether `word` is a NAME=NUMBER of the op and only its number is wrong. */
static bool is_out_of_range(const cot_op_cases *cases, int direction, const char *word)
{
    const char *equals = strchr(word, '=');
    if (equals == NULL || equals[1] == '\0' || equals[1 + strspn(equals + 1, "-+0123456789")] != '\0')
        return false;
    char name[32];
    static cot_case c;
    snprintf(name, sizeof name, "%.*s=1", (int)(equals - word), word);
    return cases->parse(direction, 1, (char *[]){name}, &c) == NULL;
}

void case_from_words(const struct argp_state *state, const cot_op *op, int direction, int count, char **words,
                     cot_case *c)
{
    const cot_op_cases *cases = find_cases(op);
    const char *unknown = cases->parse(direction, count, words, c);
    if (unknown != NULL && is_out_of_range(cases, direction, unknown))
        argp_error(state, "'%s' describes no case of %s: %.*s goes from 0 to %d", unknown, op->name,
                   (int)strcspn(unknown, "="), unknown, INT32_MAX);
    if (unknown != NULL)
        argp_error(state, "'%s' describes no case of %s; expected words like: %s", unknown, op->name,
                   cases->options_help);
}

bool backend_works(cot_backend backend)
{
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = backend;
    cot_queue *queue = NULL;
    if (cot_queue_create(&options, &queue) != COT_OK) {
        fprintf(stderr, "cotangent: %s\n", cot_error_message());
        return false;
    }
    cot_queue_destroy(queue);
    return true;
}

/* Prints on standard error why an option's file failed, and returns false. */
static bool print_file_error(const char *option, const io_error *error)
{
    fprintf(stderr, "cotangent: %s %s\n", option, error->text);
    return false;
}

bool can_write(const char *option, const char *path)
{
    io_error error;
    if (path == NULL || io_can_write(path, &error))
        return true;
    print_file_error(option, &error);
    if (error.out_of_memory)
        exit(1);
    return false;
}

bool write_json(const json_t *rows, const char *path)
{
    io_writer writer;
    io_error error;
    char *text = json_dumps(rows, JSON_INDENT(1) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(6));
    bool good = text != NULL || io_fail(&error, path, "cannot be written: the rows are no JSON");
    if (good && (good = io_open(&writer, path, &error))) {
        good = io_write(&writer, text, strlen(text), &error) && io_publish(&writer, 1, &error);
        io_abandon(&writer);
    }
    free(text);
    return good || print_file_error("--json", &error);
}

bool write_plot(const json_t *rows, const char *path, const char *(*draw)(const json_t *rows, const char *path))
{
    io_writer writer;
    io_error error;
    if (!io_open(&writer, path, &error))
        return print_file_error("--plot", &error);
    const char *failed = draw(rows, writer.partial);
    const bool good = failed == NULL ? io_publish(&writer, 1, &error) : io_fail(&error, path, "%s", failed);
    io_abandon(&writer);
    return good || print_file_error("--plot", &error);
}

void show_progress(void *context, double share, const char *what)
{
    enum { BAR_WIDTH = 30 };
    static int shown_percent = -1;
    (void)context;
    if (!isatty(STDERR_FILENO))
        return;
    const int percent = (int)(100 * share);
    if (percent == shown_percent && share < 1)
        return;
    shown_percent = percent;
    struct winsize window = {.ws_col = 80};
    ioctl(STDERR_FILENO, TIOCGWINSZ, &window);
    if (share >= 1) {
        fprintf(stderr, "\r\033[K");
        return;
    }
    const int done = (int)(BAR_WIDTH * share),
              text_width = window.ws_col > BAR_WIDTH + 12 ? window.ws_col - BAR_WIDTH - 10 : 0;
    fprintf(stderr, "\r\033[K[%.*s%.*s] %3d %% %.*s", done, "##############################", BAR_WIDTH - done,
            "------------------------------", percent, text_width, what);
}
