/* SPDX-License-Identifier: Apache-2.0
 * fuzz_ops.c: fuzzes the argument checks and the kernels of all ops. An input selects a case of an op and mutates it:
 * dtypes, ranks, sizes, strides, memory, index data, options, struct_size, workspace. The fuzzer requires that
 *   - no call crashes or causes a sanitizer's report, and a refusal begins with the name of the call;
 *   - an accepted call is executed and writes only the elements of its outputs;
 *   - a refused call writes nothing;
 *   - the workspace query accepts every call that is accepted, and the call needs no larger workspace.
 * The ops' tables define the cases, so that a new op is covered. Its argument struct must not hold pointers other than
 * those of its tensors and its workspace. */
/* -max_len=256: tools/fuzz.sh reads it */
#include "cases/cases.h"
#include "cases/draw.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Limits of an executed call, so that it is fast: elements of a tensor (a size of 0 counts as 1), and bytes between
 * its first and last element. Larger calls are only validated. */
enum { MAX_ELEMENTS = 2048, MAX_BYTES = 1 << 16, MAX_OFFSET = 16 };

/* ---- the input: a list of decisions ------------------------------------------------------------------------ */

/* After its end, the input continues with pseudo-random bytes that depend on it. So a short input is a complete
 * call. */
typedef struct reader {
    const uint8_t *next, *end;
    uint64_t random;
} reader;

static reader read_from(const uint8_t *data, size_t size)
{
    reader r = {data, data + size, 0xcbf29ce484222325u};
    for (size_t i = 0; i < size; i++)
        r.random = (r.random ^ data[i]) * 0x100000001b3u;
    return r;
}

static uint8_t take_byte(reader *r)
{
    return r->next < r->end ? *r->next++ : (uint8_t)(cot_draw(&r->random) >> 56);
}

static uint32_t take_number(reader *r, uint32_t bound)
{
    uint32_t value = 0;
    for (uint32_t reach = 1; reach < bound && reach < 1u << 24; reach <<= 8)
        value = value << 8 | take_byte(r);
    return bound > 0 ? value % bound : 0;
}

static uint64_t take_bits(reader *r)
{
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | take_byte(r);
    return bits;
}

#define REQUIRE(condition, ...)                        \
    do {                                               \
        if (!(condition)) {                            \
            fprintf(stderr, "fuzz_ops: " __VA_ARGS__); \
            fprintf(stderr, " (%s)\n", #condition);    \
            abort();                                   \
        }                                              \
    } while (0)

/* ---- the cases: the small cases of every op ------------------------------------------------------------------- */

typedef struct small_case {
    const cot_op_cases *cases;
    cot_case c;
} small_case;

static small_case *small_cases;
static uint32_t small_case_count;
static const cot_op_cases *current_cases;
static cot_queue *queues[2]; /* 1 and 3 threads */
static char *inaccessible;   /* memory without any access right */

static bool is_small(const cot_tensor *tensor)
{
    int64_t elements = 1, reach = 0;
    if (tensor->rank < 0 || tensor->rank > COT_MAX_RANK || cot_dtype_size(tensor->dtype) == 0)
        return false;
    for (int axis = 0; axis < tensor->rank; axis++) {
        const int64_t size = tensor->shape[axis], stride = tensor->stride[axis];
        if (size < 0 || size > MAX_ELEMENTS)
            return false;
        elements *= size > 1 ? size : 1;
        if (elements > MAX_ELEMENTS || stride > MAX_BYTES || stride < -MAX_BYTES)
            return false;
        reach += (size > 1 ? size - 1 : 0) * (stride < 0 ? -stride : stride);
    }
    return reach * (int64_t)cot_dtype_size(tensor->dtype) <= MAX_BYTES;
}

static bool all_are_small(const cot_direction *direction, const void *args)
{
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)args);
        if (cot_is_present(tensor) && !is_small(tensor))
            return false;
    }
    return true;
}

static bool collect(void *context, const cot_case *c)
{
    uint32_t *capacity = context;
    if (!all_are_small(&current_cases->op->directions[c->direction], c->args))
        return true;
    if (small_case_count == *capacity) {
        *capacity += *capacity / 2 + 1024;
        small_cases = realloc(small_cases, *capacity * sizeof *small_cases);
    }
    small_cases[small_case_count++] = (small_case){current_cases, *c};
    return true;
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    uint32_t capacity = 0;
    for (int op = 0; op < cot_op_count; op++) {
        current_cases = cot_all_cases[op];
        current_cases->each(collect, &capacity);
    }
    for (int q = 0; q < 2; q++) {
        cot_queue_options options;
        COT_INIT(&options);
        options.threads = q == 0 ? 1 : 3;
        options.kernels = ""; /* ignores the environment variable */
        REQUIRE(cot_queue_create(&options, &queues[q]) == COT_OK, "%s", cot_error_message());
    }
    inaccessible = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(inaccessible != MAP_FAILED, "no memory");
    for (int op = 0; op < cot_op_count; op++) {
        for (int d = 0; d < cot_ops[op]->direction_count; d++) {
            uint32_t count = 0;
            for (uint32_t i = 0; i < small_case_count; i++)
                count += small_cases[i].cases == cot_all_cases[op] && small_cases[i].c.direction == d;
            REQUIRE(count > 0, "%s has no case that is small enough", cot_ops[op]->directions[d].call);
        }
    }
    return 0;
}

/* ---- mutation of the arguments--------------------------------------------------------------------------------- */

static int64_t extreme_size(reader *r)
{
    static const int64_t sizes[] = {0,
                                    1,
                                    2,
                                    3,
                                    4,
                                    5,
                                    7,
                                    8,
                                    9,
                                    15,
                                    16,
                                    17,
                                    31,
                                    32,
                                    33,
                                    63,
                                    64,
                                    65,
                                    127,
                                    129,
                                    1000,
                                    -1,
                                    -7,
                                    INT32_MAX,
                                    (int64_t)1 << 31,
                                    (int64_t)1 << 40,
                                    (int64_t)1 << 55,
                                    INT64_MAX,
                                    INT64_MIN};
    const uint32_t choice = take_number(r, 256);
    return choice < sizeof sizes / sizeof *sizes ? sizes[choice] : choice < 250 ? choice % 40 : (int64_t)take_bits(r);
}

/* Sets row-major strides for an order of the axes, with gaps of `gap` elements. */
static void lay_out(cot_tensor *tensor, uint32_t order, int64_t gap)
{
    int64_t stride = gap;
    for (int n = tensor->rank - 1; n >= 0; n--) {
        const int axis = (int)((uint32_t)n + order) % tensor->rank;
        tensor->stride[axis] = stride;
        if (__builtin_mul_overflow(stride, tensor->shape[axis] > 1 ? tensor->shape[axis] : 1, &stride))
            stride = 1;
    }
}

static void mutate_strides(reader *r, cot_tensor *tensor)
{
    const int axis = (int)take_number(r, COT_MAX_RANK);
    switch (take_number(r, 6)) {
    case 0: tensor->stride[axis] = 0; break;
    case 1: tensor->stride[axis] = extreme_size(r); break;
    case 2: tensor->stride[axis] = (int64_t)(0 - (uint64_t)tensor->stride[axis]); break; /* reversed */
    case 3: tensor->stride[axis] = tensor->stride[(axis + 1) % COT_MAX_RANK]; break;
    default:
        if (tensor->rank > 0 && tensor->rank <= COT_MAX_RANK)
            lay_out(tensor, take_number(r, COT_MAX_RANK), 1 + take_number(r, 3));
    }
}

/* Replaces a size in all tensors, so that the tensors still match each other. */
static void resize_all(const cot_direction *direction, void *args, int64_t from, int64_t to, uint32_t order)
{
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        bool changed = false;
        for (int axis = 0; axis < COT_MAX_RANK && axis < tensor->rank; axis++) {
            changed = changed || tensor->shape[axis] == from;
            tensor->shape[axis] = tensor->shape[axis] == from ? to : tensor->shape[axis];
        }
        if (changed && tensor->rank <= COT_MAX_RANK)
            lay_out(tensor, order, 1);
    }
}

/* Offsets of the members that are no tensors: every 4 bytes outside of tensors, workspace and struct_size. */
static uint32_t option_slots(const cot_direction *direction, size_t slots[COT_MAX_ARGS / 4])
{
    uint32_t count = 0;
    for (size_t at = sizeof(size_t); at + 4 <= direction->args_size; at += 4) {
        bool taken =
            (at >= direction->workspace_offset && at < direction->workspace_offset + sizeof(void *)) ||
            (at >= direction->workspace_bytes_offset && at < direction->workspace_bytes_offset + sizeof(size_t));
        for (int f = 0; f < direction->field_count; f++)
            taken =
                taken || (at >= direction->fields[f].offset && at < direction->fields[f].offset + sizeof(cot_tensor));
        if (!taken)
            slots[count++] = at;
    }
    return count;
}

static void mutate_option(reader *r, const cot_direction *direction, char *args)
{
    static const uint32_t values[] = {0,           1,           2,           3,           0xffffffffu,
                                      0x7fffffffu, 0x80000000u, 0x3f000000u, 0x3f800000u, 0x7f800000u,
                                      0x7fc00000u, 0xbf800000u, 0x3dcccccdu};
    const uint32_t choice = take_number(r, 32);
    const uint32_t value = choice < sizeof values / sizeof *values ? values[choice] : (uint32_t)take_bits(r);
    size_t slots[COT_MAX_ARGS / 4];
    const uint32_t count = option_slots(direction, slots);
    if (count > 0)
        memcpy(args + slots[take_number(r, count)], &value, sizeof value);
}

/* Whether an option, such as a number of iterations, may make the call slow: it was small in the case and is large
 * now. */
static bool is_long_option(const cot_direction *direction, const char *original, const char *args)
{
    enum { FEW = 64, COUNT = 1 << 16 };
    size_t slots[COT_MAX_ARGS / 4];
    const uint32_t count = option_slots(direction, slots);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t initial, changed_value;
        memcpy(&initial, original + slots[i], sizeof initial);
        memcpy(&changed_value, args + slots[i], sizeof changed_value);
        if (changed_value != initial && changed_value > FEW && initial <= COUNT)
            return true;
    }
    return false;
}

static void mutate(reader *r, const cot_direction *direction, char *args)
{
    cot_tensor *tensor = cot_field_tensor(&direction->fields[take_number(r, (uint32_t)direction->field_count)], args);
    const cot_tensor *other =
        cot_field_tensor(&direction->fields[take_number(r, (uint32_t)direction->field_count)], args);
    const int axis = (int)take_number(r, COT_MAX_RANK);
    switch (take_number(r, 12)) {
    case 0: tensor->dtype = (cot_dtype)take_number(r, 9); break;
    case 1: tensor->rank = (int32_t)take_number(r, COT_MAX_RANK + 3) - 1; break;
    case 2: tensor->shape[axis] = extreme_size(r); break;
    case 3: memset(tensor, 0, sizeof *tensor); break;
    case 4: *tensor = *other; break; /* may add an absent tensor */
    case 5: {                        /* changes the dtype of all tensors with this dtype */
        const cot_dtype from = tensor->dtype, to = (cot_dtype)(1 + take_number(r, 4));
        for (int f = 0; f < direction->field_count; f++) {
            cot_tensor *t = cot_field_tensor(&direction->fields[f], args);
            t->dtype = t->dtype == from ? to : t->dtype;
        }
        break;
    }
    case 6:
    case 7: resize_all(direction, args, tensor->shape[axis], extreme_size(r), take_number(r, COT_MAX_RANK)); break;
    case 8:
    case 9: mutate_option(r, direction, args); break;
    default: mutate_strides(r, tensor);
    }
}

/* ---- memory ---------------------------------------------------------------------------------------------------- *
 * Every tensor gets exactly the bytes from its first to its last element, so that AddressSanitizer detects an access
 * outside of them. Exceptions: it may start at an offset into its block, or lie within the block of another tensor. */

typedef struct block {
    char *memory, *initial,
        *writable; /* the bytes, their initial values, and marks of those that an accepted call may write */
    size_t bytes;
} block;

static size_t extent(const cot_tensor *tensor, int64_t *low)
{
    int64_t high;
    cot_extent(tensor, low, &high);
    return (size_t)(high - *low);
}

static int64_t position(const cot_tensor *tensor, int64_t number)
{
    int64_t at = 0;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        at += number % tensor->shape[axis] * tensor->stride[axis];
        number /= tensor->shape[axis];
    }
    return at;
}

/* Fills index data: as in the op's case, if the size matches; small numbers, ascending or in any order; or any
 * numbers. */
static void fill_index(reader *r, const small_case *s, const cot_field *field, const cot_tensor *tensor,
                       uint64_t *random)
{
    const int64_t elements = cot_elements(tensor);
    int32_t *data = calloc((size_t)elements + 1, sizeof *data), next = 0;
    const cot_tensor *original = cot_field_tensor(field, (void *)s->c.args);
    const uint32_t kind = take_number(r, 8);
    if (kind < 5 && elements > 0 && original->dtype == COT_I32 && cot_elements(original) == elements) {
        s->cases->fill(&s->c, field->name, data, elements);
        for (uint32_t change = kind; change > 2; change--) /* with up to two wrong entries */
            data[take_number(r, (uint32_t)elements)] = (int32_t)extreme_size(r);
    } else {
        for (int64_t i = 0; i < elements; i++) {
            const uint64_t bits = cot_draw(random);
            next += (int32_t)(bits % 4);
            data[i] = kind < 6 ? next - (kind == 5) : kind == 6 ? (int32_t)(bits % 40) - 2 : (int32_t)bits;
        }
    }
    for (int64_t n = 0; n < elements; n++)
        memcpy((int32_t *)tensor->data + position(tensor, n), &data[n], sizeof *data);
    free(data);
}

/* Fills with any bits, including infinities, NaN and subnormals; or with values near 1, whose sums are finite. */
static void fill_bytes(char *memory, size_t bytes, bool bounded, uint64_t *random)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = cot_draw(random);
        if (bounded)
            bits = (bits & 0x8fff8fff8fff8fffu) | 0x3000300030003000u;
        memcpy(memory + at, &bits, bytes - at < 8 ? bytes - at : 8);
    }
}

static void bind(reader *r, const small_case *s, const cot_direction *direction, char *args,
                 block blocks[COT_MAX_FIELDS])
{
    const uint32_t variant = take_number(r, 256);
    uint64_t random = take_bits(r);
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (!cot_is_present(tensor))
            continue;
        int64_t low;
        const size_t bytes = extent(tensor, &low);
        const int owner = variant % 8 == 1 && f > 0 ? (int)take_number(r, (uint32_t)f) : f;
        if (owner != f && blocks[owner].bytes >= bytes && bytes > 0) { /* within the memory of another tensor */
            tensor->data = blocks[owner].memory + take_number(r, (uint32_t)(blocks[owner].bytes - bytes) + 1) - low;
        } else {
            const size_t offset =
                variant & 16 ? cot_dtype_size(tensor->dtype) * take_number(r, MAX_OFFSET) : variant % 8 == 2;
            block *b = &blocks[f];
            b->bytes = bytes + offset;
            b->memory = malloc(b->bytes);
            fill_bytes(b->memory, b->bytes, (variant & 32) != 0, &random);
            tensor->data = bytes > 0 || variant & 64 ? b->memory + offset - low : NULL;
        }
        if (variant % 8 == 3 && take_number(r, 4) == 0)
            tensor->data = NULL;
        else if (tensor->dtype == COT_I32 && bytes > 0 && (uintptr_t)tensor->data % sizeof(int32_t) == 0)
            fill_index(r, s, &direction->fields[f], tensor, &random);
    }
    for (int f = 0; f < direction->field_count; f++) {
        blocks[f].initial = malloc(blocks[f].bytes);
        blocks[f].writable = calloc(blocks[f].bytes + 1, 1);
        if (blocks[f].bytes > 0)
            memcpy(blocks[f].initial, blocks[f].memory, blocks[f].bytes);
    }
}

/* Marks the bytes that the outputs may write. Requires that no two outputs overlap. An output may overlap an input
 * only if both are the same view, which a header may allow. */
static void allow_outputs(const cot_direction *direction, char *args, block blocks[COT_MAX_FIELDS])
{
    for (int f = 0; f < 2 * direction->field_count; f++) { /* the outputs, then the inputs */
        const cot_field *field = &direction->fields[f % direction->field_count];
        const cot_tensor *tensor = cot_field_tensor(field, args);
        const bool output = f < direction->field_count;
        if (!cot_is_present(tensor) || (field->role != COT_INPUT) != output)
            continue;
        const size_t size = cot_dtype_size(tensor->dtype);
        for (int64_t n = 0; n < cot_elements(tensor); n++) {
            const char *element = (char *)tensor->data + position(tensor, n) * (int64_t)size;
            for (int b = 0; b < direction->field_count; b++) {
                if (blocks[b].bytes == 0 || element < blocks[b].memory || element >= blocks[b].memory + blocks[b].bytes)
                    continue;
                char *mark = blocks[b].writable + (element - blocks[b].memory);
                REQUIRE(mark[0] == 0 ||
                            (!output && cot_same_view(tensor, cot_field_tensor(&direction->fields[mark[0] - 1], args))),
                        "%s: accepted, though %s overlaps %s", direction->call, field->name,
                        direction->fields[mark[0] - 1].name);
                if (output)
                    memset(mark, f + 1, size);
            }
        }
    }
}

static void require_unchanged(const cot_direction *direction, const block blocks[COT_MAX_FIELDS], const char *when)
{
    for (int f = 0; f < direction->field_count; f++)
        for (size_t i = 0; i < blocks[f].bytes; i++)
            REQUIRE(blocks[f].writable[i] || blocks[f].memory[i] == blocks[f].initial[i],
                    "%s: byte %zu of %zu of %s's memory was written by a call that %s", direction->call, i,
                    blocks[f].bytes, direction->fields[f].name, when);
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

static void require_message(const cot_direction *direction, cot_status status)
{
    const char *message = cot_error_message();
    REQUIRE(status == COT_OUT_OF_MEMORY || strncmp(message, direction->call, strlen(direction->call)) == 0,
            "%s: the message is: %s", direction->call, message);
    REQUIRE(strcmp(cot_status_name(status), "COT_?") != 0, "%s: status %d", direction->call, (int)status);
}

/* Runs a call with a copy of the arguments, so that the sanitizer detects a read beyond struct_size. */
static cot_status run(const cot_direction *direction, cot_queue *queue, const char *args)
{
    size_t size;
    memcpy(&size, args, sizeof size);
    size = size < sizeof size ? sizeof size : size > COT_MAX_ARGS ? COT_MAX_ARGS : size;
    char *copy = malloc(size);
    memcpy(copy, args, size);
    const cot_status status = cot_op_run(direction, queue, copy);
    free(copy);
    if (status != COT_OK)
        require_message(direction, status);
    return status;
}

/* Forces a random kernel that admits the call, not only the cheapest one. */
static void force_kernel(reader *r, const cot_direction *direction, cot_queue *queue, const char *args, char text[256])
{
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    queue->forced = NULL;
    const uint32_t variant = take_number(r, 64);
    if (variant == 0 || cot_op_explain(direction, queue, args, choices, &count) != COT_OK)
        return;
    const cot_choice *choice = &choices[variant % (uint32_t)count];
    if (choice->refusal != NULL && variant < 48)
        return;
    snprintf(text, 256, "%s=%s", direction->op->name, choice->kernel->name);
    queue->forced = text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = read_from(data, size);
    const small_case *s = &small_cases[take_number(&r, small_case_count)];
    const cot_direction *direction = &s->cases->op->directions[s->c.direction];
    _Alignas(16) char args[COT_MAX_ARGS];
    memcpy(args, s->c.args, sizeof args);
    for (uint32_t n = take_number(&r, 6); n > 0; n--)
        mutate(&r, direction, args);
    size_t struct_size = direction->args_size;
    if (take_number(&r, 16) == 1)
        struct_size = take_number(&r, 4) == 0 ? (size_t)take_bits(&r) : struct_size - 64 + take_number(&r, 256);
    const bool cut = struct_size < direction->args_size; /* members beyond struct_size are absent */
    if (cut && struct_size > sizeof struct_size)
        memset(args + struct_size, 0, direction->args_size - struct_size);
    memcpy(args, &struct_size, sizeof struct_size);

    cot_queue *queue = queues[take_number(&r, 8) == 1];
    char forced[256];
    force_kernel(&r, direction, queue, args, forced);
    size_t needed = 0;
    const cot_status query = cot_op_workspace(direction, queue, args, &needed);
    if (query != COT_OK)
        require_message(direction, query);

    if (!all_are_small(direction, args) || is_long_option(direction, s->c.args, args)) {
        /* Too large to be executed: the call is made only if it is refused before its data is read. */
        for (int f = 0; f < direction->field_count; f++) {
            cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
            if (cot_is_present(tensor))
                tensor->data = inaccessible + (1 << 19);
        }
        if (query != COT_OK)
            REQUIRE(run(direction, queue, args) != COT_OK, "%s: refused by the query alone", direction->call);
        queue->forced = NULL;
        return 0;
    }

    block blocks[COT_MAX_FIELDS] = {{0}};
    bind(&r, s, direction, args, blocks);
    void *workspace = NULL;
    const uint32_t variant = take_number(&r, 8);
    size_t workspace_bytes = variant == 0 || cut || query != COT_OK ? 0 : needed - (variant == 1 && needed > 0);
    if (workspace_bytes > 0 && posix_memalign(&workspace, COT_ALIGNMENT, workspace_bytes) != 0)
        abort();
    if (workspace != NULL)
        memset(workspace, 0xff, workspace_bytes);
    memcpy(args + direction->workspace_offset, &workspace, sizeof workspace);
    memcpy(args + direction->workspace_bytes_offset, &workspace_bytes, sizeof workspace_bytes);

    const cot_status status = run(direction, queue, args);
    REQUIRE(status != COT_OK || query == COT_OK, "%s: accepted, though the query refused", direction->call);
    REQUIRE(status != COT_OK || workspace == NULL || workspace_bytes >= needed,
            "%s: ran in less workspace than the query asked for", direction->call);
    REQUIRE(status != COT_WORKSPACE_TOO_SMALL || workspace_bytes < needed,
            "%s: %zu bytes of workspace are too few, the query said %zu", direction->call, workspace_bytes, needed);
    if (status == COT_OK)
        allow_outputs(direction, args, blocks);
    require_unchanged(direction, blocks, status == COT_OK ? "has no output there" : "was refused");

    free(workspace);
    for (int f = 0; f < direction->field_count; f++) {
        free(blocks[f].memory);
        free(blocks[f].initial);
        free(blocks[f].writable);
    }
    queue->forced = NULL;
    return 0;
}
