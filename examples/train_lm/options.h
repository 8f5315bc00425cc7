/* SPDX-License-Identifier: Apache-2.0
 *
 * options.h: the command line. */
#ifndef TRAIN_LM_OPTIONS_H
#define TRAIN_LM_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

/* An architecture of --arch: the values of --attention, --mhc and --dense, and whether its layers are those of GPT-2. */
typedef struct architecture {
    const char *name;
    int64_t attention, streams, dense, gpt2;
} architecture;

enum { ARCHITECTURES = 6 };
extern const architecture architectures[ARCHITECTURES];

typedef struct options {
    const char *backend, *dtype; /* "cpu", "cuda" or "auto"; "f32", "f16" or "bf16" */
    const char *transfers;       /* between GPUs under mpirun: "nccl" or "mpi"; NULL: not given, nccl */
    int64_t gpus;                /* ranks, each with a GPU of its own */
    int64_t context_ranks;       /* ranks that hold parts of the same sequences */
    int64_t accumulate, vocabulary, mlp, heads, kv_heads;
    int64_t gpt2; /* 1: GPT-2's layers */
    int64_t steps, batch, context, width, inner, layers, kernel, streams, attention, dense, threads, sample;
    int64_t seed;
    double rate, weight_decay, clip, dropout, temperature;
    unsigned archs; /* bit i: architectures[i]; 0: streams, attention and dense define the model */
    int64_t seeds;  /* number of runs per architecture, with seeds from `seed` on */
    const char *out, *source_dir;
    const char *prompt;     /* NULL: not given */
    const char *json;       /* NULL: not written */
    const char *checkpoint; /* NULL: not written */
    const char *import;     /* a file of initial values for all parameters, or NULL */
    const char *export;     /* the folder of a model for transformers; NULL: not written */
    const char *gradients;  /* a file for the gradients of the last step; NULL: not written */
    const char *log;        /* JSON lines; NULL: not written */
    int64_t every;
    bool resume, quiet;
    bool recompute;         /* see backend.recompute */
    bool shard_optimizer;   /* see optimizer_shards.h */
    bool has_text;          /* --text was given */
    bool tokens;            /* the texts are token files */
    const char *tokenizer;  /* the tokenizer.json of token files; NULL: the sample is printed as numbers */
    const char *validation; /* a token file; NULL: the last tenth of each file is held out */
    const char **texts;     /* [text_count], pointers into argv */
    int text_count;
} options;

/* Exit status of a refused command line or unusable input. */
enum { EXIT_BAD_INPUT = 2 };

/* Fills `o` from the command line. Ends the process after --help. If an argument is wrong, it prints one line that
 * names the argument and ends the process with EXIT_BAD_INPUT. */
void options_parse(options *o, int argc, char **argv);
void options_destroy(options *o);

/* Sets `backend` to "cpu" or "cuda", and the dtype, if it was not given. */
void options_use_backend(options *o, const char *backend);

/* The number of runs. options_run sets the options of run i: its architecture and seed, and the sizes that were not
 * given. Call it after options_use_backend. */
int options_run_count(const options *o);
const architecture *options_run(const options *o, int i, options *run);

#endif
