/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c: the program `cotangent COMMAND [OPTION...]`. */
#include "commands.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"info", command_info, "this machine, the backends and the version"},
    {"ops", command_ops, "the ops, their kernels, and which of them this machine can run"},
    {"explain", command_explain, "which kernel a call would take, and why not the others"},
    {"check", command_check, "compare every kernel with its oracle"},
    {"bench", command_bench, "time every kernel, and compare it with the machine's ceilings"},
    {"profile", command_profile, "where the time of a call goes, from the host's memory to a GPU and back"},
    {"demo", command_demo, "run the jobs of the project's first documents, and compare the figures"},
    {"run", command_run, "run an op on tensors in files"},
    {"diff", command_diff, "compare tensors in files by the error rule"},
    {"doctor", command_doctor, "what works on this machine, and how to correct the rest"},
};

static void print_help(FILE *file)
{
    fprintf(file, "Usage: cotangent COMMAND [OPTION...]\nThe kernels of training, forward and backward.\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(file, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(file,
            "\n`cotangent COMMAND --help` lists a command's options; `cotangent --version` prints the version.\n");
}

static void *json_allocate(size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL)
        out_of_memory(bytes);
    return memory;
}

/* Returns the exit status. A failure to write standard output is also a failure. */
static int finish(int status)
{
    if ((fflush(stdout) == 0 && !ferror(stdout)) || status != 0)
        return status;
    fprintf(stderr, "cotangent: standard output: %s\n", strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    json_set_alloc_funcs(json_allocate, free);
    argp_err_exit_status = 2; /* the exit status of wrong usage, in all commands */
    signal(SIGXFSZ, SIG_IGN); /* exceeding a file size limit becomes a write error, as on a full disk */
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("cotangent %s\n", cot_version());
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(argv[1], commands[i].name) != 0)
            continue;
        static char name[64]; /* argp keeps the pointer */
        snprintf(name, sizeof name, "cotangent %s", commands[i].name);
        argv[1] = name;
        return finish(commands[i].run(argc - 1, argv + 1));
    }
    fprintf(stderr, "cotangent: '%s' is no command; `cotangent --help` lists them\n", argv[1]);
    return 2;
}
