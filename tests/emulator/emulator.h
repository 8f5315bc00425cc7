/* SPDX-License-Identifier: Apache-2.0
 * emulator.h: runs kernels on the CPU, from the PTX that nvcc generated for them.
 *
 * The emulator is a test tool. It executes each instruction exactly and reports errors that a GPU does not report.
 * It models no caches, no timing and no weak memory order.
 *
 * A warp executes an instruction for its 32 lanes at once. A 32-bit register is an array of 32 words, one per lane. A
 * 64-bit register is an array of 32 double words. A predicate is one word with one bit per lane. A constant is stored
 * like a register. An operand is the offset of the register in the warp's register file, in words. A negative operand
 * is the complement of an offset into the kernel's constants.
 *
 * After a divergent branch, each group of lanes is a split with its own program counter. Splits that reach the same
 * instruction are merged. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES = 32, MAX_WARPS = 32, MAX_CLUSTER = 16, BARRIERS = 16, SHARED_BEGIN = 1024, MAX_OPERANDS = 160 };

/* The result of a handler:
 *   NEXT    the split continues with the next instruction
 *   JUMP    the splits changed: choose the split that runs next
 *   PARK    the instruction waits for other lanes of the warp: it is executed again after the splits have changed
 *   RETRY   the instruction waits for other warps: it is executed again later
 *   YIELD   the instruction is done, but other splits and warps run first */
enum emu_step { NEXT, JUMP, PARK, RETRY, YIELD };

enum emu_space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

typedef struct emu_warp emu_warp;
typedef struct emu_ins emu_ins;
typedef enum emu_step emu_handler(emu_warp *warp, const emu_ins *ins, uint32_t mask);

struct emu_ins {
    emu_handler *run;
    int32_t *o;        /* operands in the order of the text; vectors and addresses are flattened */
    int64_t offset[3]; /* of the addresses */
    int32_t guard;     /* predicate, -1: none */
    int32_t target;    /* of a branch */
    int32_t order;     /* the split with the lowest order runs first; it rises along every edge except back edges */
    int32_t line;
    const char *text;
    uint16_t count;                       /* operands */
    uint8_t space, size, vector, variant; /* bytes per element; elements; variant: defined by the handler */
    bool negated, wide[3], wide_data, is_signed, poll, leader;
};

typedef struct emu_kernel {
    char *name;
    emu_ins *code;
    int count;
    uint32_t *constants;
    int register_words; /* size of a warp's register file */
    int shared_bytes, local_bytes, param_bytes;
    int param_count, param_offset[64];
    int special_count;
    struct emu_special {
        int id, reg;
        int64_t offset;
    } specials[64];
    int max_dynamic_shared;
} emu_kernel;

enum emu_special_id {
    TID_X,
    TID_Y,
    TID_Z,
    NTID_X,
    NTID_Y,
    NTID_Z,
    CTAID_X,
    CTAID_Y,
    CTAID_Z,
    NCTAID_X,
    NCTAID_Y,
    NCTAID_Z,
    LANEID,
    WARPID,
    LANEMASK_EQ,
    LANEMASK_LT,
    LANEMASK_LE,
    LANEMASK_GT,
    LANEMASK_GE,
    CLUSTER_CTARANK,
    CLUSTER_NCTARANK,
    DYNAMIC_SMEM,
    CLOCK,
    SPECIALS,
    PARAM_ADDRESS = SPECIALS
};

typedef struct emu_split {
    uint32_t mask;
    int pc;
    bool yielded, parked;
} emu_split;

enum emu_state { READY, AT_BARRIER, AT_CLUSTER, EXITED };

typedef struct emu_block emu_block;
struct emu_warp {
    uint32_t *regs;
    const uint32_t *constants;
    emu_block *block;
    const emu_kernel *kernel;
    int number;
    uint32_t alive; /* lanes that have not exited */
    int split_count, current;
    emu_split splits[LANES];
    enum emu_state state;
    int barrier;                                     /* the barrier that the warp waits at */
    bool passed;                                     /* the barrier was completed: the repeated bar.sync continues */
    uint32_t cluster_phase, carry, groups[2][LANES]; /* committed groups: of cp.async, of bulk copies */
    uint8_t *local;
};

typedef struct emu_cluster {
    int count, arrived;
    uint32_t phase;
    emu_block *blocks[MAX_CLUSTER];
} emu_cluster;

struct emu_block {
    uint8_t *shared;
    uint32_t shared_bytes, id[3], rank;
    int warp_count, threads;
    emu_warp warps[MAX_WARPS];
    emu_cluster *cluster;
    struct {
        int arrived, expected;
    } barrier[BARRIERS];
    bool ended;
};

typedef struct emu_grid {
    uint32_t blocks[3], threads[3], cluster, dynamic_shared;
} emu_grid;

/* ---- parse.c ------------------------------------------------------------------------------------------- */

/* Returns the kernel of that name in the PTX text. Returns NULL if the text has no such kernel, or (with a message)
 * if the kernel contains something that the emulator does not support. */
emu_kernel *emu_parse(const char *file, const char *text, const char *name);
/* Looks up an opcode of one family. Sets the handler and its variant. Returns the operand layout, one letter per
 * operand (see parse.c), or NULL if the opcode is unknown. */
const char *emu_find_arithmetic(const char *opcode, emu_ins *ins);
const char *emu_find_memory(const char *opcode, emu_ins *ins);
const char *emu_find_control(const char *opcode, emu_ins *ins);
const char *emu_find_matrix(const char *opcode, emu_ins *ins);
const char *emu_find_async(const char *opcode, emu_ins *ins);
bool emu_has(const char *opcode, const char *modifier); /* whether the opcode has the modifier ".x" as a whole part */

/* ---- rows.c --------------------------------------------------------------------------------------------- */

enum emu_class { WORD, DOUBLE, PREDICATE };
enum { USED = 1, WRITTEN = 2 };

/* The operands of all instructions before register allocation. The guard of an instruction precedes its operands. An
 * operand is the number of a virtual register; a negative operand is a constant. Until allocation is done, the `o` of
 * an instruction is an index into the pool. */
typedef struct emu_operands {
    int32_t *pool;
    const uint8_t *roles;   /* of each operand */
    const uint8_t *classes; /* of each register */
    int count, registers;
} emu_operands;

/* Replaces the register numbers by offsets into the register file. Sets the order of the instructions, by which splits
 * reconverge. */
void emu_allocate_registers(emu_kernel *k, emu_operands *all);
enum emu_step emu_exit(emu_warp *w, const emu_ins *i, uint32_t mask); /* parse.c: ends a thread */

/* ---- execute.c ------------------------------------------------------------------------------------------ */

bool emu_launch(const emu_kernel *kernel, const emu_grid *grid, const void *parameters);
/* Ends the launch. The message names the instruction and one thread of the mask. */
__attribute__((noreturn, format(printf, 4, 5))) void emu_fault(emu_warp *w, const emu_ins *i, uint32_t mask,
                                                               const char *format, ...);
extern char emu_message[1024]; /* of the last fault */
extern long emu_progress;      /* incremented by every event that can end the wait of a thread */
extern uint64_t emu_seed;      /* not 0: seeds a random schedule and completes copies late */
uint32_t emu_random(void);
/* Returns NEXT if the current split holds all needed lanes, else PARK. */
enum emu_step emu_converge(emu_warp *w, const emu_ins *i, uint32_t mask, uint32_t needed);

/* ---- memory.c ------------------------------------------------------------------------------------------- */

extern int emu_device; /* of the next allocation, and of the kernel that runs */
void emu_add_memory(uint64_t at, size_t bytes);
bool emu_is_memory(uint64_t at, size_t bytes); /* whether one allocation contains the bytes */
bool emu_remove_memory(uint64_t at);
uint8_t *emu_global(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t begin, uint64_t end, const char *what);
uint8_t *emu_shared(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t at, uint64_t bytes, unsigned align);
void emu_addresses(emu_warp *w, const emu_ins *i, uint32_t m, int operand, int which, uint64_t *at);

/* ---- async.c -------------------------------------------------------------------------------------------- */

/* The emulator's encoding of a tensor map. It fits into the 128 bytes of a CUtensorMap. */
typedef struct emu_map {
    uint32_t magic, rank, element, swizzle; /* swizzle: 0, 32, 64, 128 bytes */
    uint64_t base, size[5], stride[5];      /* in bytes, of the first axis too */
    uint16_t box[5];
} emu_map;
enum { MAP_MAGIC = 0x70616d65 };

void emu_async_reset(void);
bool emu_async_complete(void); /* completes all pending copies; false: no copy was pending */

uint32_t emu_bf16(float x); /* arithmetic.c: conversions between float and 16-bit floats, rounded to nearest even */
uint32_t emu_f16(float x);
float emu_from_bf16(uint32_t half);
float emu_from_f16(uint32_t half);

static inline void *emu_register(emu_warp *w, int32_t operand)
{
    return (void *)(operand >= 0 ? w->regs + operand : (uint32_t *)w->constants + ~operand);
}

static inline uint64_t emu_scalar(emu_warp *w, int32_t operand, bool wide, int lane)
{
    return wide ? ((uint64_t *)emu_register(w, operand))[lane] : ((uint32_t *)emu_register(w, operand))[lane];
}

#define EACH_LANE(l, mask)          \
    for (int l = 0; l < LANES; l++) \
        if ((mask) >> l & 1)
#define SHARED_TAG ((uint64_t)0x5a << 56)
#define LOCAL_TAG ((uint64_t)0x5b << 56)

/* driver.c, for test libraries that compute on device memory: enqueues the function with a copy of its parameters on a
 * stream (streams.h), or adds it to the graph that is being captured. False: the function failed. */
typedef bool emu_host_function(const void *parameters);
bool emu_enqueue(void *stream, emu_host_function *function, const void *parameters, size_t bytes);

#endif
