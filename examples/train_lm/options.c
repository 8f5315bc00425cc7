/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPU_INNER = 64, GPT2_MLP = 4, DEFAULT_EVERY = 100, DEFAULT_STEPS = 2600, DEFAULT_STEPS_OF_SEVERAL = 700 };

/* The names of --arch all, then gpt2. */
enum { FULL = 4, ALL = 5 };
const architecture architectures[ARCHITECTURES] = {
    {"conv", 0, 0, 0, 0},       {"attention", 1, 0, 0, 0}, {"hybrid", 5, 0, 0, 0},
    {"hybrid-mhc", 5, 2, 0, 0}, {"full", 5, 2, 4, 0},      {"gpt2", 1, 0, 0, 1},
};

/* Keys of options without a short form. */
enum {
    KEY_STEPS = 256,
    KEY_BATCH,
    KEY_CONTEXT,
    KEY_WIDTH,
    KEY_INNER,
    KEY_LAYERS,
    KEY_KERNEL,
    KEY_ARCH,
    KEY_MHC,
    KEY_ATTENTION,
    KEY_DENSE,
    KEY_RATE,
    KEY_DECAY,
    KEY_CLIP,
    KEY_DROPOUT,
    KEY_SEED,
    KEY_SEEDS,
    KEY_JSON,
    KEY_THREADS,
    KEY_OUT,
    KEY_SAMPLE,
    KEY_TEMPERATURE,
    KEY_PROMPT,
    KEY_TEXT,
    KEY_SOURCE_DIR,
    KEY_TOKENIZER,
    KEY_TOKENS,
    KEY_VALIDATION,
    KEY_CHECKPOINT,
    KEY_IMPORT,
    KEY_EXPORT,
    KEY_GRADIENTS,
    KEY_LOG,
    KEY_EVERY,
    KEY_RESUME,
    KEY_BACKEND,
    KEY_TRANSFERS,
    KEY_DTYPE,
    KEY_PRESET,
    KEY_ACCUMULATE,
    KEY_VOCABULARY,
    KEY_MLP,
    KEY_HEADS,
    KEY_KV_HEADS,
    KEY_RECOMPUTE,
    KEY_SHARD_OPTIMIZER,
    KEY_GPUS,
    KEY_CONTEXT_RANKS
};

static const struct argp_option OPTIONS[] = {
    {0, 0, 0, 0, "Text:", 1},
    {"text", KEY_TEXT, "FILE", 0, "Train on FILE; may be repeated, and further files may follow", 0},
    {"source-dir", KEY_SOURCE_DIR, "DIR", 0,
     "Without --text: the licence texts in /usr/share/common-licenses and the sources below DIR", 0},
    {"tokens", KEY_TOKENS, "FILE", 0,
     "Train on the tokens of FILE, in llm.c's format; may be repeated, and further files may follow", 0},
    {"tokenizer", KEY_TOKENIZER, "FILE", 0,
     "With --tokens: the tokenizer.json of the files; prints the sample as text, and encodes --prompt", 0},
    {"validation", KEY_VALIDATION, "FILE", 0, "With --tokens: hold out this file, and nothing of the others", 0},
    {0, 0, 0, 0, "Model:", 2},
    {"arch", KEY_ARCH, "NAME,...", 0,
     "conv, attention (in every block), hybrid (--attention 5), hybrid-mhc (--attention 5 --mhc 2) or full (--attention 5 "
     "--mhc 2 --dense 4), the default; gpt2 (LayerNorm, learned positions, biases, GELU, the embedding as the head); "
     "several, or all without gpt2: one after the other, and a table at the end",
     0},
    {"width", KEY_WIDTH, "N", 0, "Channels of the residual stream", 0},
    {"inner", KEY_INNER, "N", 0, "Channels inside a block (default: 5/4 of the width, on a GPU a multiple of 64)", 0},
    {"layers", KEY_LAYERS, "N", 0, "Blocks", 0},
    {"kernel", KEY_KERNEL, "K", 0, "Width of the causal convolutions", 0},
    {"mhc", KEY_MHC, "N", 0, "Hyper-connections: every block between N residual streams; 0: one plain stream", 0},
    {"attention", KEY_ATTENTION, "K", 0, "Attention in place of the convolution in every K-th block; 0: in none", 0},
    {"dense", KEY_DENSE, "K", 0, "A dense causal convolution of width K after the embedding; 0: none", 0},
    {"mlp", KEY_MLP, "N", 0, "After every block an MLP (SwiGLU) with N inner channels; 0: none", 0},
    {"heads", KEY_HEADS, "N", 0, "Heads of attention (default: 4)", 0},
    {"kv-heads", KEY_KV_HEADS, "N", 0, "Heads of attention's keys and values (default: half of the heads)", 0},
    {"vocabulary", KEY_VOCABULARY, "N", 0, "Rows of the embedding and of the head; a text uses the first 256", 0},
    {"import", KEY_IMPORT, "FILE", 0, "Initial values: a model.safetensors of GPT-2 or Llama with the same sizes", 0},
    {"preset", KEY_PRESET, "NAME", 0,
     "gpt2-124m, gpt2-350m (GPT-2's layers), llama-130m, llama-350m, hybrid-130m or hybrid-mhc-130m: sizes of the model, "
     "its learning rate, no dropout, context 1024; options after it change them",
     0},
    {0, 0, 0, 0, "Training:", 3},
    {"backend", KEY_BACKEND, "NAME", 0, "cpu, cuda (the first GPU) or auto: the GPU, if there is one", 0},
    {"gpus", KEY_GPUS, "N", 0, "Divide the batches of a step (--accumulate) over N GPUs of this machine", 0},
    {"context-ranks", KEY_CONTEXT_RANKS, "N", 0,
     "Divide every sequence over N of the GPUs or of mpirun's ranks (context parallel); needs --dropout 0 and --dense 0",
     0},
    {"transfers", KEY_TRANSFERS, "NAME", 0,
     "Between the GPUs of mpirun's ranks: nccl, or mpi, which copies through host memory and needs no NCCL (nccl)", 0},
    {"dtype", KEY_DTYPE, "TYPE", 0, "On a GPU: f32, f16 or bf16, with float32 masters (bf16)", 0},
    {"accumulate", KEY_ACCUMULATE, "N", 0, "Batches whose gradients a step adds", 0},
    {"shard-optimizer", KEY_SHARD_OPTIMIZER, 0, 0,
     "Each GPU or rank has the moments of AdamW, and in 16 bits the masters, of a share of the matrices: less memory, the "
     "same bits",
     0},
    {"recompute", KEY_RECOMPUTE, 0, 0,
     "Store only the input of each block, and run its forward again in the backward: less memory, the same bits", 0},
    {"steps", KEY_STEPS, "N", 0, "Steps of the optimiser (2600; of several runs 700 each)", 0},
    {"batch", KEY_BATCH, "N", 0, "Sequences in a step", 0},
    {"context", KEY_CONTEXT, "N", 0, "Bytes in a sequence", 0},
    {"lr", KEY_RATE, "X", 0, "Highest learning rate", 0},
    {"weight-decay", KEY_DECAY, "X", 0, "AdamW's decay of the matrices", 0},
    {"clip", KEY_CLIP, "X", 0, "Largest norm of the gradient; 0: no limit", 0},
    {"dropout", KEY_DROPOUT, "P", 0, "Probability of dropping an element of what a block adds", 0},
    {"seed", KEY_SEED, "N", 0, "Names the initial weights, the batches, the dropped elements and the sample", 0},
    {"seeds", KEY_SEEDS, "N", 0, "Train with N seeds, from --seed on, and end with a table", 0},
    {"threads", KEY_THREADS, "N", 0, "Threads (default: what OpenMP would use); the losses do not depend on it", 0},
    {0, 0, 0, 0, "Output:", 4},
    {"out", KEY_OUT, "DIR", 0, "Where loss.csv and loss.svg go; made if it is not there", 0},
    {"json", KEY_JSON, "FILE", 0, "The table of several runs as JSON", 0},
    {"log", KEY_LOG, "FILE", 0, "One line of JSON for each step, as it ends; --resume appends to it", 0},
    {"export", KEY_EXPORT, "DIR", 0,
     "Write the trained model to DIR/config.json and DIR/model.safetensors, which transformers loads as GPT-2 or Llama",
     0},
    {"gradients", KEY_GRADIENTS, "FILE", 0,
     "Write the gradients of the last step and its tokens to FILE (.safetensors), with the names of --export", 0},
    {"sample", KEY_SAMPLE, "N", 0, "Bytes or tokens to generate at the end of a single run", 0},
    {"temperature", KEY_TEMPERATURE, "X", 0, "Of the sample; 0: always the likeliest byte", 0},
    {"prompt", KEY_PROMPT, "TEXT", 0, "What the sample continues", 0},
    {"quiet", 'q', 0, 0, "No progress, only the results", 0},
    {0, 0, 0, 0, "Stopping and going on:", 5},
    {"checkpoint", KEY_CHECKPOINT, "FILE", 0, "Keep all that the run needs to go on in FILE (.safetensors)", 0},
    {"every", KEY_EVERY, "N", 0, "Steps from one checkpoint to the next", 0},
    {"resume", KEY_RESUME, 0, 0,
     "Go on from --checkpoint's FILE, or begin if it is not there: the losses are those of a run that never stopped",
     0},
    {0, 0, 0, 0, 0, 0},
};

/* Options with an integer value, and options with a real value: the member of `options` and the range. */
static const struct integer_option {
    int key;
    size_t offset;
    int64_t min, max;
} INTEGERS[] = {
    {KEY_STEPS, offsetof(options, steps), 1, 100000000},
    {KEY_BATCH, offsetof(options, batch), 1, 65536},
    {KEY_CONTEXT, offsetof(options, context), 1, 1 << 20},
    {KEY_WIDTH, offsetof(options, width), 1, 16384},
    {KEY_INNER, offsetof(options, inner), 1, 65536},
    {KEY_LAYERS, offsetof(options, layers), 1, 1024},
    {KEY_KERNEL, offsetof(options, kernel), 1, 1024},
    {KEY_SEED, offsetof(options, seed), 0, INT64_MAX},
    {KEY_THREADS, offsetof(options, threads), 1, 64},
    {KEY_SAMPLE, offsetof(options, sample), 0, 1 << 24},
    {KEY_EVERY, offsetof(options, every), 1, 100000000},
    {KEY_MHC, offsetof(options, streams), 0, 64},
    {KEY_ATTENTION, offsetof(options, attention), 0, 4096},
    {KEY_DENSE, offsetof(options, dense), 0, 1024},
    {KEY_SEEDS, offsetof(options, seeds), 1, 64},
    {KEY_ACCUMULATE, offsetof(options, accumulate), 1, 4096},
    {KEY_GPUS, offsetof(options, gpus), 1, 64},
    {KEY_CONTEXT_RANKS, offsetof(options, context_ranks), 1, 64},
    {KEY_MLP, offsetof(options, mlp), 0, 65536},
    {KEY_HEADS, offsetof(options, heads), 1, 1024},
    {KEY_KV_HEADS, offsetof(options, kv_heads), 1, 1024},
    {KEY_VOCABULARY, offsetof(options, vocabulary), 256, 1 << 20},
};

static const struct real_option {
    int key;
    size_t offset;
    double min, max;
} REALS[] = {
    {KEY_RATE, offsetof(options, rate), 0, 10},
    {KEY_DECAY, offsetof(options, weight_decay), 0, 100},
    {KEY_CLIP, offsetof(options, clip), 0, 1e30},
    {KEY_DROPOUT, offsetof(options, dropout), 0, 1},
    {KEY_TEMPERATURE, offsetof(options, temperature), 0, 100},
};

static const char *name_of(int key)
{
    const struct argp_option *option = OPTIONS;
    while (option->key != key)
        option++;
    return option->name;
}

static void parse_integer(const struct integer_option *option, const char *text, options *o)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < option->min || value > option->max) {
        fprintf(stderr, "train_lm: --%s is \"%s\", expected a whole number from %lld to %lld\n", name_of(option->key),
                text, (long long)option->min, (long long)option->max);
        exit(EXIT_BAD_INPUT);
    }
    *(int64_t *)((char *)o + option->offset) = value;
}

static void parse_real(const struct real_option *option, const char *text, options *o)
{
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= option->min && value <= option->max)) {
        fprintf(stderr, "train_lm: --%s is \"%s\", expected a number from %g to %g\n", name_of(option->key), text,
                option->min, option->max);
        exit(EXIT_BAD_INPUT);
    }
    *(double *)((char *)o + option->offset) = value;
}

static const char *parse_text(int key, const char *text)
{
    if (text[0] == '\0') {
        fprintf(stderr, "train_lm: --%s is empty\n", name_of(key));
        exit(EXIT_BAD_INPUT);
    }
    return text;
}

/* One of the names, of which the last is NULL. */
static const char *parse_name(int key, const char *text, const char *const *names, const char *expected)
{
    for (; *names != NULL; names++)
        if (strcmp(text, *names) == 0)
            return *names;
    fprintf(stderr, "train_lm: --%s is \"%s\", expected %s\n", name_of(key), text, expected);
    exit(EXIT_BAD_INPUT);
}

static const char *const BACKENDS[] = {"cpu", "cuda", "auto", NULL}, *const DTYPES[] = {"f32", "f16", "bf16", NULL},
                         *const TRANSFERS[] = {"nccl", "mpi", NULL}, *const PRESETS[] = {"gpt2-124m",
                                                                                         "gpt2-350m",
                                                                                         "llama-130m",
                                                                                         "llama-350m",
                                                                                         "hybrid-130m",
                                                                                         "hybrid-mhc-130m",
                                                                                         NULL};

/* The sizes of GPT-2: its width, layers, heads and vocabulary (50257, padded). The MLP of the other models has as many
 * parameters in its products: SwiGLU has three matrices where GPT-2 has two of 4 times the width. */
static void apply_preset(const char *name, options *o)
{
    const bool large = strstr(name, "350m") != NULL, hybrid = strncmp(name, "hybrid", 6) == 0,
               llama = strncmp(name, "llama", 5) == 0;
    o->gpt2 = !hybrid && !llama;
    o->width = o->inner = large ? 1024 : 768;
    o->layers = large ? 24 : 12;
    o->heads = large ? 16 : 12;
    o->kv_heads = llama ? 4 : o->heads;
    o->mlp = o->gpt2 ? GPT2_MLP * o->width : large ? 2752 : 2048;
    o->vocabulary = 50304;
    o->kernel = 4;
    o->attention = hybrid ? 4 : 1;
    o->streams = strcmp(name, "hybrid-mhc-130m") == 0 ? 4 : 0;
    o->dense = 0;
    o->context = 1024;
    o->batch = 16;
    o->rate = large ? 3e-4 : 6e-4;
    o->weight_decay = 0.1;
    o->dropout = 0;
}

/* True if the key is an option with a numeric value. */
static bool parse_number(int key, const char *text, options *o)
{
    for (size_t i = 0; i < sizeof INTEGERS / sizeof INTEGERS[0]; i++)
        if (INTEGERS[i].key == key)
            return parse_integer(&INTEGERS[i], text, o), true;
    for (size_t i = 0; i < sizeof REALS / sizeof REALS[0]; i++)
        if (REALS[i].key == key)
            return parse_real(&REALS[i], text, o), true;
    return false;
}

/* Parses "hybrid,conv" or "all" to bits. */
static unsigned parse_archs(const char *text)
{
    unsigned archs = 0;
    size_t length;
    for (const char *name = text;; name += length + 1) {
        length = strcspn(name, ",");
        unsigned found = length == 3 && strncmp(name, "all", length) == 0 ? (1u << ALL) - 1 : 0;
        for (int i = 0; i < ARCHITECTURES; i++)
            if (strlen(architectures[i].name) == length && strncmp(name, architectures[i].name, length) == 0)
                found = 1u << i;
        if (found == 0) {
            fprintf(stderr,
                    "train_lm: --arch is \"%s\", expected conv, attention, hybrid, hybrid-mhc, full, gpt2 or all\n",
                    text);
            exit(EXIT_BAD_INPUT);
        }
        archs |= found;
        if (name[length] == '\0')
            return archs;
    }
}

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    options *o = state->input;
    switch (key) {
    case KEY_OUT: o->out = parse_text(key, text); return 0;
    case KEY_SOURCE_DIR: o->source_dir = parse_text(key, text); return 0;
    case KEY_PROMPT: o->prompt = parse_text(key, text); return 0;
    case KEY_CHECKPOINT: o->checkpoint = parse_text(key, text); return 0;
    case KEY_IMPORT: o->import = parse_text(key, text); return 0;
    case KEY_EXPORT: o->export = parse_text(key, text); return 0;
    case KEY_GRADIENTS: o->gradients = parse_text(key, text); return 0;
    case KEY_LOG: o->log = parse_text(key, text); return 0;
    case KEY_RESUME: o->resume = true; return 0;
    case KEY_RECOMPUTE: o->recompute = true; return 0;
    case KEY_SHARD_OPTIMIZER: o->shard_optimizer = true; return 0;
    case KEY_JSON: o->json = parse_text(key, text); return 0;
    case KEY_ARCH: o->archs = parse_archs(text); return 0;
    case KEY_BACKEND: o->backend = parse_name(key, text, BACKENDS, "cpu, cuda or auto"); return 0;
    case KEY_TRANSFERS: o->transfers = parse_name(key, text, TRANSFERS, "nccl or mpi"); return 0;
    case KEY_DTYPE: o->dtype = parse_name(key, text, DTYPES, "f32, f16 or bf16"); return 0;
    case KEY_PRESET:
        apply_preset(parse_name(key, text, PRESETS,
                                "gpt2-124m, gpt2-350m, llama-130m, llama-350m, hybrid-130m or hybrid-mhc-130m"),
                     o);
        return 0;
    case KEY_TOKENIZER: o->tokenizer = parse_text(key, text); return 0;
    case KEY_VALIDATION: o->validation = parse_text(key, text); return 0;
    case KEY_TOKENS: o->tokens = true;                           /* fallthrough */
    case KEY_TEXT: o->has_text = o->has_text || key == KEY_TEXT; /* fallthrough */
    case ARGP_KEY_ARG: o->texts[o->text_count++] = text; return 0;
    case 'q': o->quiet = true; return 0;
    default: return parse_number(key, text, o) ? 0 : ARGP_ERR_UNKNOWN;
    }
}

static const struct argp PARSER = {
    .options = OPTIONS,
    .parser = parse_option,
    .args_doc = "[FILE...]",
    .doc =
        "Trains a language model of causal convolutions and attention on the bytes of text files or on token files, holding out "
        "the last tenth of each; prints its validation loss and that of a byte-bigram model, and a sample; and writes the loss curve.",
};

static void refuse(const char *why)
{
    fprintf(stderr, "train_lm: %s\n", why);
    exit(EXIT_BAD_INPUT);
}

static int64_t default_inner(const options *o)
{
    const int64_t inner = o->width + o->width / 4;
    if (strcmp(o->backend, "cuda") != 0 || o->heads > 0)
        return inner;
    return (inner + GPU_INNER - 1) / GPU_INNER * GPU_INNER; /* the GPU loads 16 bytes at a time, of halves of heads */
}

/* Checks combinations of options. */
static void check_combinations(const options *o)
{
    if (o->tokens && o->has_text)
        refuse("--text and --tokens: give one of them");
    if (o->validation != NULL && !o->tokens)
        refuse("--validation needs --tokens");
    if (o->tokenizer != NULL && !o->tokens)
        refuse("--tokenizer needs --tokens");
    if (o->prompt != NULL && o->tokens && o->tokenizer == NULL)
        refuse("--prompt needs --tokenizer if there are --tokens");
    if (o->checkpoint == NULL && o->resume)
        refuse("--resume needs --checkpoint");
    if (o->checkpoint == NULL && o->every > 0)
        refuse("--every needs --checkpoint");
    if (o->archs != 0 && (o->attention >= 0 || o->streams >= 0 || o->dense >= 0))
        refuse("--arch says what --attention, --mhc and --dense say: give it or them");
    if (strcmp(o->backend, "cpu") == 0 && o->dtype != NULL && strcmp(o->dtype, "f32") != 0)
        refuse("--dtype is of a GPU: --backend cuda");
    if (strcmp(o->backend, "cpu") == 0 && o->gpus > 1)
        refuse("--gpus is of GPUs: --backend cuda");
    const bool gpt2 = o->gpt2 || (o->archs >> (ARCHITECTURES - 1) & 1) != 0;
    if (o->gpt2 && (o->attention != 1 || o->streams > 0 || o->dense > 0))
        refuse("--attention, --mhc and --dense are not of a gpt2 preset");
    if (gpt2 && o->kv_heads > 0 && o->kv_heads != o->heads)
        refuse("--kv-heads is not of GPT-2");
    if (o->heads > 0 && o->inner > 0 && o->inner % o->heads != 0)
        refuse("--inner must be a multiple of --heads");
    const bool only_gpt2 = gpt2 && (o->archs & (o->archs - 1)) == 0;
    if (o->heads > 0 && o->inner == 0 && gpt2 && o->width % o->heads != 0)
        refuse("--width must be a multiple of --heads");
    if (o->heads > 0 && o->inner == 0 && !only_gpt2 && default_inner(o) % o->heads != 0)
        refuse("the default of --inner, 5/4 of the width, is no multiple of --heads: give --inner");
    if (o->kv_heads > 0 && (o->heads == 0 || o->heads % o->kv_heads != 0))
        refuse("--kv-heads must divide --heads");
    if (o->checkpoint != NULL && options_run_count(o) > 1)
        refuse("--checkpoint is of a single run: one --arch, and --seeds 1");
    if ((o->export != NULL || o->gradients != NULL || o->log != NULL) && options_run_count(o) > 1)
        refuse("--export, --gradients and --log are of a single run: one --arch, and --seeds 1");
    if (o->json != NULL && options_run_count(o) == 1)
        refuse("--json is of several runs: --arch all, or --seeds");
}

int options_run_count(const options *o)
{
    int count = o->archs == 0;
    for (int i = 0; i < ARCHITECTURES; i++)
        count += (int)(o->archs >> i & 1);
    return count * (int)o->seeds;
}

/* The sizes of GPT-2 that were not given. */
static void use_gpt2_sizes(options *run)
{
    if (run->inner == 0)
        run->inner = run->width;
    if (run->mlp == 0)
        run->mlp = GPT2_MLP * run->width;
    if (run->heads == 0)
        run->heads = run->inner % 4 == 0 ? 4 : 1;
    run->kv_heads = run->heads;
}

const architecture *options_run(const options *o, int i, options *run)
{
    static const architecture as_given = {"as given", 0, 0, 0, 0};
    const architecture *arch = &as_given;
    *run = *o;
    run->seed = o->seed + i % o->seeds;
    if (o->archs != 0) {
        int64_t runs_left = i / o->seeds;
        for (arch = architectures; (o->archs >> (arch - architectures) & 1) == 0 || runs_left-- > 0;)
            arch++;
        run->attention = arch->attention;
        run->streams = arch->streams;
        run->dense = arch->dense;
        run->gpt2 = arch->gpt2;
    }
    if (run->gpt2)
        use_gpt2_sizes(run);
    if (run->inner == 0)
        run->inner = default_inner(run);
    if (run->heads > 0 && run->kv_heads == 0)
        run->kv_heads = run->heads % 2 == 0 ? run->heads / 2 : run->heads;
    return arch;
}

void options_parse(options *o, int argc, char **argv)
{
    *o = (options){.backend = "cpu",
                   .gpus = 1,
                   .context_ranks = 1,
                   .accumulate = 1,
                   .vocabulary = 256,
                   .batch = 4,
                   .context = 256,
                   .width = 128,
                   .layers = 10,
                   .kernel = 4,
                   .streams = -1, /* -1: not given; so for attention and dense */
                   .attention = -1,
                   .dense = -1,
                   .seed = 1,
                   .seeds = 1,
                   .rate = 4e-3,
                   .weight_decay = 0.4,
                   .clip = 1,
                   .dropout = 0.1,
                   .temperature = 0.8,
                   .sample = 800,
                   .out = "train_lm_out",
                   .source_dir = TRAIN_LM_SOURCE_DIR};
    o->texts = calloc((size_t)argc, sizeof *o->texts);
    argp_err_exit_status = EXIT_BAD_INPUT;
    if (o->texts == NULL ||
        argp_parse(&PARSER, argc, argv, 0, NULL, o) != 0) { /* argp_parse fails only without memory */
        fputs("train_lm: out of memory\n", stderr);
        exit(EXIT_FAILURE);
    }
    check_combinations(o);
    if (o->archs == 0 && o->attention < 0 && o->streams < 0 && o->dense < 0)
        o->archs = 1u << FULL;
    o->attention = o->attention < 0 ? 0 : o->attention;
    o->dense = o->dense < 0 ? 0 : o->dense;
    o->streams = o->streams < 0 ? 0 : o->streams;
    if (o->steps == 0)
        o->steps = options_run_count(o) > 1 ? DEFAULT_STEPS_OF_SEVERAL : DEFAULT_STEPS;
    if (o->every == 0)
        o->every = DEFAULT_EVERY;
}

void options_use_backend(options *o, const char *backend)
{
    const bool cuda = strcmp(backend, "cuda") == 0;
    o->backend = backend;
    if (o->dtype == NULL || !cuda)
        o->dtype = cuda ? "bf16" : "f32";
}

void options_destroy(options *o)
{
    free(o->texts);
    *o = (options){0};
}
