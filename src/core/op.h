/* SPDX-License-Identifier: Apache-2.0
 * op.h: what an op tells the house about itself, so that one dispatcher, one check and one bench serve all ops.
 *
 * An op has directions (forward, backward, update...), each with one argument struct, and a table of kernel rows.
 * A call goes: copy the caller's struct -> validate (a `problem`: sizes by name, the arguments) -> the cheapest row
 * that admits the problem -> workspace -> run. */
#ifndef COT_CORE_OP_H
#define COT_CORE_OP_H

#include <cotangent/core.h>
#include <stdbool.h>

/* One kernel. admit, cost and workspace read the problem's sizes, dtypes and strides, never its data. */
typedef struct cot_kernel {
    const char *name; /* what a profiler shows */
    int direction;    /* index into the op's directions */
    cot_backend backend;
    uint32_t isa; /* COT_ISA_*, 0 = any processor; see COT_ISA_BACKEND */
    /* The coarsest dtype that a sum passes through on its way to the output, for check's error rule; COT_F32 unless
     * the kernel's file says why. */
    cot_dtype intermediate;
    const char *(*admit)(const void *problem); /* NULL = yes, else the reason why not, a static string */
    double (*cost)(const void *problem);       /* an estimate of core cycles; only the order matters */
    cot_status (*run)(cot_queue *queue, const void *problem, void *workspace);
    size_t (*workspace)(const void *problem); /* bytes; NULL = none */
    /* CPU: bytes besides, for each thread, see cot_parallel_scratch; NULL = none. */
    size_t (*scratch)(const void *problem);
} cot_kernel;

/* A row's instruction set tells its backend. */
#define COT_ISA_BACKEND(isa) ((isa) >= COT_ISA_SM80 ? COT_BACKEND_CUDA : COT_BACKEND_CPU)

/* An entry of a kernel table. After the workspace may follow `.scratch = FUNCTION`. */
#define COT_KERNEL_ENTRY(name_, direction_, isa_, intermediate_, admit_, cost_, ...)                          \
    {                                                                                                         \
        .name = #name_, .direction = direction_, .backend = COT_ISA_BACKEND(isa_), .isa = isa_,               \
        .intermediate = intermediate_, .admit = admit_, .cost = cost_, .run = name_, .workspace = __VA_ARGS__ \
    }

typedef enum cot_role { COT_INPUT, COT_OUTPUT, COT_INPUT_OUTPUT } cot_role;

/* One tensor of an argument struct. */
typedef struct cot_field {
    const char *name;
    size_t offset; /* of the cot_tensor in the struct */
    cot_role role;
    bool accumulates; /* += when the struct's `accumulate` is set */
} cot_field;

typedef enum cot_option_kind {
    COT_OPTION_WORD, /* an enum or int32_t: the number of its word */
    COT_OPTION_I32,
    COT_OPTION_I64,
    COT_OPTION_U64,
    COT_OPTION_F32,
    COT_OPTION_F64
} cot_option_kind;

/* One member of an argument struct that is no tensor. */
typedef struct cot_option {
    const char *name;
    size_t offset;
    cot_option_kind kind;
    const char *words; /* of COT_OPTION_WORD: "none silu" for 0 and 1 */
    /* For --help: the meaning of the values; with the word "default" where the initial value stands for another. NULL where
     * the name says it. */
    const char *note;
} cot_option;

typedef struct cot_op cot_op;

typedef struct cot_direction {
    const char *name; /* "forward" */
    const char *call; /* "causal_conv1d_forward": how messages begin */
    const cot_op *op;
    size_t args_size, problem_size;
    size_t workspace_offset, workspace_bytes_offset; /* of those members in the argument struct */
    size_t accumulate_offset;                        /* of its int32_t accumulate, 0 = it has none */
    void (*init)(void *args);                        /* the init macro of the argument struct; NULL = COT_INIT */
    const cot_option *options;
    int option_count;
    /* The fields once more, in their order, with their shapes: "x[B,D,T] weight[D,K] y=x state[N|B,D,K-1]". An input
     * gives values to its symbols; an output takes its shape from them, or all of it from another field (=). N|B is N
     * where that has a value, else B; D/8 is rounded up; a ... before the others stands for any axes. An output's dtype
     * is that of the field it is like, or the one that `y:f32[...]` or `y:x[...]` names, else the first field's; f32
     * becomes f64 where the first field is f64. */
    const char *signature;
    const cot_field *fields;
    int field_count;
    /* Checks the arguments and fills the problem. with_data: data pointers and overlaps too. */
    cot_status (*validate)(const char *call, const void *args, bool with_data, void *problem);
    /* Checks the contents of index tensors, on backends where the host can read them; NULL = the op has none. */
    cot_status (*check_index_data)(const char *call, const void *problem);
} cot_direction;

struct cot_op {
    const char *name;
    const cot_direction *directions;
    int direction_count;
    const cot_kernel *kernels; /* the first row of each direction is its scalar kernel, which admits everything */
    int kernel_count;
};

enum { COT_MAX_ARGS = 4096, COT_MAX_PROBLEM = 4096, COT_MAX_KERNELS = 64 };

/* The bodies of the public calls. */
cot_status cot_op_run(const cot_direction *direction, cot_queue *queue, const void *args);
cot_status cot_op_workspace(const cot_direction *direction, cot_queue *queue, const void *args, size_t *bytes);

/* Why each row of a direction was taken or not, in the order of the table. */
typedef struct cot_choice {
    const cot_kernel *kernel;
    const char *refusal;    /* NULL = admitted */
    double cost;            /* of an admitted row */
    size_t workspace_bytes; /* all of it */
    size_t scratch_bytes;   /* of each thread, at the workspace's end */
    bool chosen;
} cot_choice;

/* Fills at most COT_MAX_KERNELS choices. Fails where the call would: refused arguments, or no row that serves. */
cot_status cot_op_explain(const cot_direction *direction, const cot_queue *queue, const void *args,
                          cot_choice choices[COT_MAX_KERNELS], int *count);

/* Every op of the library: in src/ops/ops.c, so that core knows none. */
extern const cot_op *const cot_ops[];
extern const int cot_op_count;

#endif
