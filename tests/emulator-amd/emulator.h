/* SPDX-License-Identifier: Apache-2.0
 * emulator.h: a libamdhip64.so that runs kernels for gfx90a and gfx942 on the CPU. LLVM's disassembler decodes the code
 * object, so that there is no second decoder that could be wrong in the same way as the first. code.c reads the
 * disassembly, execute.c runs its instructions, driver.c is the interface of HIP.
 *
 * A kernel stops with a message that names the kernel, the instruction, the block, the wave and the lane
 *   - at an access outside of a device allocation or of the block's LDS,
 *   - where an instruction uses a register that a load has not filled yet (a missing s_waitcnt),
 *   - at a barrier with LDS writes of the wave that no s_waitcnt has waited for,
 *   - at an instruction or a modifier that the emulator does not have.
 * There is no timing, no cache, no weak memory order, and no check of the s_nop that some instructions need between
 * them. */
#ifndef COT_TESTS_EMULATOR_AMD_H
#define COT_TESTS_EMULATOR_AMD_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EMU_LANES = 64,
    EMU_OPERANDS = 6,
    EMU_VECTORS = 512, /* v0 to v255, then a0 to a255 */
    EMU_SCALARS = 128,
    EMU_VCC = 106, /* numbers of the scalar registers with names */
    EMU_M0 = 124,
    EMU_EXEC = 126,
    EMU_MAX_LDS = 65536
};

typedef enum emu_kind { EMU_NONE, EMU_SCALAR, EMU_VECTOR, EMU_CONSTANT, EMU_OFF } emu_kind;

typedef struct emu_operand {
    emu_kind kind;
    int index, count; /* registers */
    bool negated, absolute;
    bool decimal; /* an inline constant with a point, whose bits depend on the type of the instruction */
    double number;
    uint64_t value; /* the bits as 32 or 64 bits of an integer, or as float32 */
} emu_operand;

typedef struct emu_wave emu_wave;
typedef struct emu_instruction emu_instruction;
typedef void emu_handler(emu_wave *w, const emu_instruction *i);

/* Which accesses complete in the order in which they began. */
typedef enum emu_order { EMU_ANY_ORDER, EMU_GLOBAL_LOAD, EMU_LDS_LOAD } emu_order;

struct emu_instruction {
    emu_handler *run; /* NULL: unknown */
    const char *text;
    uint64_t address;
    emu_operand operand[EMU_OPERANDS];
    int operands;
    int64_t offset, offset0, offset1;   /* modifiers of memory instructions */
    int wait_vector, wait_scalar;       /* s_waitcnt: vmcnt and lgkmcnt, -1 = no wait */
    unsigned select, select_high;       /* op_sel and op_sel_hi: a bit per source */
    unsigned negated_low, negated_high; /* neg_lo and neg_hi */
    emu_order order;
    bool returns;   /* an atomic that returns the old value */
    unsigned width; /* of a memory instruction: bytes per lane and address */
    int target;     /* a branch: the index of the next instruction */
};

typedef struct emu_kernel {
    char name[128];
    int entry; /* index of the first instruction */
    uint32_t lds_bytes, private_bytes, argument_bytes;
    uint32_t registers; /* COMPUTE_PGM_RSRC2 */
    int vectors;        /* vector and accumulation registers of a lane */
    uint16_t properties;
} emu_kernel;

/* A code object for one target. */
typedef struct emu_code {
    char *text; /* the disassembly, cut into lines */
    emu_instruction *instructions;
    int count;
    emu_kernel *kernels;
    int kernel_count;
} emu_code;

/* A load whose registers are not filled yet, or a write that is under way. */
typedef struct emu_access {
    uint16_t first, count; /* registers; count 0: a write */
    bool vector, scalar_load, lds_write, lds_load;
} emu_access;

typedef struct emu_queue {
    emu_access access[256];
    int count;
} emu_queue;

typedef struct emu_block {
    const emu_code *code;
    const emu_kernel *kernel;
    uint32_t number[3];
    int waves;
    unsigned char lds[EMU_MAX_LDS];
    uint32_t lds_bytes;
    jmp_buf stop;
    char message[512];
} emu_block;

struct emu_wave {
    uint32_t v[EMU_VECTORS][EMU_LANES];
    _Alignas(8) uint32_t s[EMU_SCALARS];
    bool scc, done, at_barrier;
    int next, number;
    emu_queue vector_queue, scalar_queue;
    uint8_t pending_v[2][EMU_VECTORS], pending_s[EMU_SCALARS]; /* loads under way to each register; 1: from LDS */
    int pending;
    emu_block *block;
};

/* code.c. emu_load reads a bundle of code objects and takes the one for `target`. Returns NULL and writes the reason if
 * that fails; *missing is then whether the bundle lacks the target. */
emu_code *emu_load(const void *image, const char *target, bool *missing, char *why, size_t size);
void emu_unload(emu_code *code);
/* Reads a line of the disassembly. i->text points into it. */
void emu_read_line(char *line, emu_instruction *i);
const emu_kernel *emu_find_kernel(const emu_code *code, const char *name);

/* execute.c. Finds the handler of a mnemonic, without its _e32 or _e64. */
emu_handler *emu_find_handler(const char *mnemonic);
/* Runs a kernel. Returns false and writes the message if it stopped. */
bool emu_run(const emu_code *code, const emu_kernel *kernel, const uint32_t blocks[3], uint32_t threads,
             const void *arguments, unsigned seed, char *message, size_t size);

/* driver.c. Whether all bytes lie in one allocation. */
bool emu_is_allocated(uint64_t address, size_t bytes);
void emu_add_allocation(void *memory, size_t bytes);
void emu_remove_allocation(void *memory);

#endif
