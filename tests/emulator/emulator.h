/* SPDX-License-Identifier: Apache-2.0
 * emulator.h: runs kernels on the CPU, from the PTX that nvcc made of them. A test tool: it is exact about what an
 * instruction means and reports what a GPU would not, and it knows no caches, no timing and no weak memory order.
 *
 * A warp executes an instruction for its 32 lanes at once. A register is a row of 32 words (64 bits: of 32 double words),
 * a predicate one word, a bit a lane; a constant is a row too. An operand is the row's place in the warp's registers,
 * or, where negative, the complement of its place among the kernel's constants. Lanes that have parted ways are a split
 * each, with a place of its own; splits that meet are one again. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES = 32, MAX_WARPS = 32, MAX_CLUSTER = 16, BARRIERS = 16, SHARED_BEGIN = 1024, MAX_OPERANDS = 160 };

/* What a handler says: go on; look at the splits again; not now: the same again later; done, but let others run. */
enum emu_step { NEXT, JUMP, PARK, RETRY, YIELD };

enum emu_space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

typedef struct emu_warp emu_warp;
typedef struct emu_ins emu_ins;
typedef enum emu_step emu_handler(emu_warp *warp, const emu_ins *ins, uint32_t mask);

struct emu_ins {
    emu_handler *run;
    int32_t *o;        /* operands in the order of the text, vectors and addresses laid flat */
    int64_t offset[3]; /* of the addresses */
    int32_t guard;     /* predicate, -1: none */
    int32_t target;    /* of a branch */
    int32_t order;     /* splits run lowest first; rises along every way that is not a loop's */
    int32_t line;
    const char *text;
    uint16_t count;                       /* operands */
    uint8_t space, size, vector, variant; /* of memory: bytes of an element, elements; variant: by handler */
    bool unless, wide[3], wide_data, is_signed, poll, leader;
};

typedef struct emu_kernel {
    char *name;
    emu_ins *code;
    int count;
    uint32_t *constants;
    int words; /* of a warp's registers */
    int shared_bytes, local_bytes, param_bytes;
    int param_count, param_at[64];
    int special_count;
    struct emu_special {
        int id, place;
        int64_t offset;
    } specials[64];
    int most_dynamic_shared;
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
    bool tired, parked;
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
    int barrier;                                     /* where it waits */
    bool passed;                                     /* the barrier at which it stands has been left: go on */
    uint32_t cluster_phase, carry, groups[2][LANES]; /* committed: of cp.async, of bulk copies */
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
        int arrived, wanted;
    } barrier[BARRIERS];
    bool ended;
};

typedef struct emu_grid {
    uint32_t blocks[3], threads[3], cluster, dynamic_shared;
} emu_grid;

/* ---- parse.c ------------------------------------------------------------------------------------------- */

/* The kernel of that name in the PTX text; NULL: there is none, or (with a message) it holds what is not known here. */
emu_kernel *emu_parse(const char *file, const char *text, const char *name);
/* What an opcode of a family is: sets the handler and its variant and returns how its operands are laid out, a letter
 * each (parse.c); NULL: unknown. */
const char *emu_find_arithmetic(const char *opcode, emu_ins *ins);
const char *emu_find_memory(const char *opcode, emu_ins *ins);
const char *emu_find_control(const char *opcode, emu_ins *ins);
const char *emu_find_matrix(const char *opcode, emu_ins *ins);
const char *emu_find_async(const char *opcode, emu_ins *ins);
bool emu_has(const char *opcode, const char *modifier); /* ".x" as a whole part */

/* ---- rows.c --------------------------------------------------------------------------------------------- */

enum emu_class { WORD, DOUBLE, PREDICATE };
enum { USED = 1, WRITTEN = 2 };

/* The operands of all instructions, a guard before its instruction's, while they are still numbers of registers; below 0:
 * constants. An instruction's `o` is an index until they are final. */
typedef struct emu_operands {
    int32_t *pool;
    const uint8_t *roles;   /* of each operand */
    const uint8_t *classes; /* of each register */
    int count, registers;
} emu_operands;

/* Puts rows in the place of the registers, and the instructions' order by which splits meet. */
void emu_give_rows(emu_kernel *k, emu_operands *all);
enum emu_step emu_exit(emu_warp *w, const emu_ins *i, uint32_t mask); /* parse.c: the instruction that ends a thread */

/* ---- execute.c ------------------------------------------------------------------------------------------ */

bool emu_launch(const emu_kernel *kernel, const emu_grid *grid, const void *parameters);
/* Ends the launch: the message names the instruction, and a thread of the mask. */
__attribute__((noreturn, format(printf, 4, 5))) void emu_fault(emu_warp *w, const emu_ins *i, uint32_t mask,
                                                               const char *format, ...);
extern char emu_message[1024]; /* of the last fault */
extern long emu_events;        /* whatever a waiting thread may wait for counts one up */
extern uint64_t emu_seed;      /* not 0: the schedule varies by it, and copies land late */
uint32_t emu_random(void);
enum emu_step emu_need(emu_warp *w, const emu_ins *i, uint32_t mask, uint32_t needed); /* NEXT or PARK */

/* ---- memory.c ------------------------------------------------------------------------------------------- */

void emu_add_memory(uint64_t at, size_t bytes);
bool emu_remove_memory(uint64_t at);
uint8_t *emu_global(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t lo, uint64_t hi, const char *what);
uint8_t *emu_shared(emu_warp *w, const emu_ins *i, uint32_t mask, uint64_t at, uint64_t bytes, unsigned align);
void emu_addresses(emu_warp *w, const emu_ins *i, uint32_t m, int operand, int which, uint64_t *at);

/* ---- async.c -------------------------------------------------------------------------------------------- */

/* A tensor map in our own words; fits cuda.h's 128 bytes. */
typedef struct emu_map {
    uint32_t magic, rank, element, swizzle; /* swizzle: 0, 32, 64, 128 bytes */
    uint64_t base, size[5], stride[5];      /* in bytes, of the first axis too */
    uint16_t box[5];
} emu_map;
enum { MAP_MAGIC = 0x70616d65 };

void emu_async_begin(void);
bool emu_async_land(void); /* what is still under way lands; false: there was nothing */

uint32_t emu_bf16(float x); /* arithmetic.c: 16-bit floats to and from float, to nearest even */
uint32_t emu_f16(float x);
float emu_from_bf16(uint32_t half);
float emu_from_f16(uint32_t half);

static inline void *emu_row(emu_warp *w, int32_t operand)
{
    return (void *)(operand >= 0 ? w->regs + operand : (uint32_t *)w->constants + ~operand);
}

static inline uint64_t emu_scalar(emu_warp *w, int32_t operand, bool wide, int lane)
{
    return wide ? ((uint64_t *)emu_row(w, operand))[lane] : ((uint32_t *)emu_row(w, operand))[lane];
}

#define EACH_LANE(l, mask)          \
    for (int l = 0; l < LANES; l++) \
        if ((mask) >> l & 1)
#define SHARED_TAG ((uint64_t)0x5a << 56)
#define LOCAL_TAG ((uint64_t)0x5b << 56)

#endif
