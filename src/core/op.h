/* SPDX-License-Identifier: Apache-2.0
 * op.h: the description of an op. One dispatcher, one check and one bench handle all ops through it.
 *
 * An op has directions (forward, backward, update...), each with one argument struct, and a table of kernels.
 * A call takes these steps: copy the caller's struct -> validate (fills a `problem`: named sizes and the arguments) ->
 * choose the cheapest kernel that admits the problem -> plan its workspace -> find the workspace -> run. */
#ifndef COT_CORE_OP_H
#define COT_CORE_OP_H

#include <cotangent/core.h>
#include <stdbool.h>

/* One kernel. admit, cost, workspace, plan and scratch read the problem's sizes, dtypes, strides and alignment of data,
 * never its elements. A null pointer counts as aligned. */
typedef struct cot_kernel {
    const char *name; /* shown by profilers */
    int direction;    /* index into the op's directions */
    cot_backend backend;
    uint32_t isa; /* required instruction sets, COT_ISA_*; 0 = any processor; see COT_ISA_BACKEND */
    /* The least precise dtype to which the kernel rounds a value before it rounds the output, for check's error rule.
     * COT_F32 unless the kernel's file gives a reason. For f64 outputs check takes f64. */
    cot_dtype intermediate;
    const char *(*admit)(const void *problem); /* NULL = admitted, else the reason of the refusal, a static string */
    double (*cost)(const void *problem);       /* only to compare kernels; CPU kernels estimate core cycles */
    cot_status (*run)(cot_queue *queue, const void *problem, void *workspace);
    size_t (*workspace)(const void *problem); /* bytes; NULL = none, or `plan` returns them */
    /* For kernels that divide their workspace: writes the plan (where its parts are, and the tiling that decides their
     * sizes; at most COT_MAX_PLAN bytes), and returns the bytes of the workspace. `run` finds the plan in queue->plan,
     * so that a call computes it once. */
    size_t (*plan)(const void *problem, void *plan);
    /* CPU: additional bytes for each thread, see cot_run_items_scratch; NULL = none. */
    size_t (*scratch)(const void *problem);
} cot_kernel;

/* The backend of a kernel, from its instruction set. */
#define COT_ISA_BACKEND(isa) \
    ((isa) >= COT_ISA_CDNA ? COT_BACKEND_HIP : (isa) >= COT_ISA_SM80 ? COT_BACKEND_CUDA : COT_BACKEND_CPU)

/* The name of a backend on the command line and in reports. */
static inline const char *cot_backend_name(cot_backend backend)
{
    return backend == COT_BACKEND_CUDA ? "cuda" : backend == COT_BACKEND_HIP ? "hip" : "cpu";
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
    COT_OPTION_ENUM, /* an enum or int32_t with named values; the value is the index of its name in `words` */
    COT_OPTION_I32,
    COT_OPTION_I64,
    COT_OPTION_U64,
    COT_OPTION_F32,
    COT_OPTION_F64
} cot_option_kind;

/* One member of an argument struct that is not a tensor. */
typedef struct cot_option {
    const char *name;
    size_t offset;
    cot_option_kind kind;
    const char *words; /* for COT_OPTION_ENUM: the names of the values, for example "none silu" for 0 and 1 */
    /* For --help: the meaning of the values. It has the word "default" where the initial value stands for another
     * value. NULL where the name is enough. */
    const char *note;
} cot_option;

typedef struct cot_op cot_op;

typedef struct cot_direction {
    const char *name; /* "forward" */
    const char *call; /* "causal_conv1d_forward": messages begin with it */
    const cot_op *op;
    size_t args_size, problem_size;
    size_t workspace_offset, workspace_bytes_offset; /* offsets of these members in the argument struct */
    size_t accumulate_offset;                        /* offset of its int32_t accumulate; 0 = there is none */
    void (*init)(void *args);                        /* calls the init macro of the argument struct; NULL = COT_INIT */
    const cot_option *options;
    int option_count;
    /* All fields in their order with their shapes, for example "x[B,D,T] weight[D,K] y=x state[N|B,D,K-1]".
     * - The shape of an input defines the values of its symbols. The shape of an output is computed from the symbols,
     *   or copied from another field (=).
     * - N|B is N where N has a value, else B. D/8 is rounded up. A leading ... stands for any number of axes.
     * - The dtype of an output is that of the field after =, or the one named in `y:f32[...]` or `y:x[...]`, else that
     *   of the first field. f32 becomes f64 where the first field is f64. */
    const char *signature;
    const cot_field *fields;
    int field_count;
    /* Checks the arguments and fills the problem. with_data: also checks data pointers and overlaps. */
    cot_status (*validate)(const char *call, const void *args, bool with_data, void *problem);
    /* Checks the contents of index tensors, on backends where the host can read them; NULL = the op has none. */
    cot_status (*check_index_data)(const char *call, const void *problem);
} cot_direction;

struct cot_op {
    const char *name;
    const cot_direction *directions;
    int direction_count;
    const cot_kernel *kernels; /* the first kernel of each direction is its scalar kernel, which admits all but f64 */
    int kernel_count;
};

enum { COT_MAX_ARGS = 4096, COT_MAX_PROBLEM = 4096, COT_MAX_PLAN = 256, COT_MAX_KERNELS = 64 };

/* The bytes of a kernel's own workspace, without scratch. Writes the kernel's plan, if it has one, to
 * plan[COT_MAX_PLAN]. */
static inline size_t cot_kernel_plan(const cot_kernel *kernel, const void *problem, void *plan)
{
    if (kernel->plan != NULL)
        return kernel->plan(problem, plan);
    return kernel->workspace != NULL ? kernel->workspace(problem) : 0;
}

/* The implementations of the public calls. */
cot_status cot_op_run(const cot_direction *direction, cot_queue *queue, const void *args);
cot_status cot_op_workspace(const cot_direction *direction, cot_queue *queue, const void *args, size_t *bytes);

/* Why a kernel of a direction was chosen or not. Choices are in the order of the table. */
typedef struct cot_choice {
    const cot_kernel *kernel;
    const char *refusal;    /* NULL = admitted */
    double cost;            /* only of an admitted kernel */
    size_t workspace_bytes; /* including the scratch of all threads */
    size_t scratch_bytes;   /* of each thread, at the end of the workspace */
    bool chosen;
} cot_choice;

/* Fills at most COT_MAX_KERNELS choices. Fails where the call would fail: invalid arguments, or no kernel that admits
 * them. */
cot_status cot_op_explain(const cot_direction *direction, const cot_queue *queue, const void *args,
                          cot_choice choices[COT_MAX_KERNELS], int *count);

/* All ops of the library. Defined in src/ops/ops.c, so that core does not depend on any op. */
extern const cot_op *const cot_ops[];
extern const int cot_op_count;

#endif
