/* SPDX-License-Identifier: Apache-2.0
 * fuzz_ops.c: the fronts and the kernels of all ops under a fuzzer. An input picks one of the ops' own cases and spoils
 * it: dtypes, ranks, sizes, strides, memory, index data, options, struct_size, workspace. Whatever the front then says,
 *   - it says so without a crash or a sanitizer's report, and a refusal begins with the name of the call;
 *   - a call that it accepts is executed, and writes the elements of its outputs and nothing else;
 *   - a call that it refuses writes nothing at all;
 *   - the workspace query accepts what the call accepts, and the call needs no byte more.
 * Everything comes from the ops' tables: a new op is covered by its rows. Its argument struct may hold no pointer but
 * those of its tensors and its workspace. */
/* -max_len=256: tools/fuzz.sh reads it */
#include "core/cases.h"
#include "core/draw.h"
#include "core/queue.h"
#include "core/tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* What an executed call may have, so that it stays fast: elements of a tensor (sizes of 0 counted as 1), and bytes from
 * its first to its last. Longer calls are only validated. */
enum { MAX_ELEMENTS = 2048, MAX_BYTES = 1 << 16, MAX_OFFSET = 16 };

/* ---- the input: a row of decisions ------------------------------------------------------------------------- */

/* Where the input ends, pseudo-random bytes go on that depend on it: a short input is a whole call too. */
typedef struct reader {
    const uint8_t *next, *end;
    uint64_t more;
} reader;

static reader read_from(const uint8_t *data, size_t size)
{
    reader r = {data, data + size, 0xcbf29ce484222325u};
    for (size_t i = 0; i < size; i++)
        r.more = (r.more ^ data[i]) * 0x100000001b3u;
    return r;
}

static uint8_t take_byte(reader *r)
{
    return r->next < r->end ? *r->next++ : (uint8_t)(cot_draw(&r->more) >> 56);
}

static uint32_t take(reader *r, uint32_t bound)
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

/* ---- the cases: those of every op that are small enough to run in no time ------------------------------------- */

typedef struct small_case {
    const cot_op_cases *cases;
    cot_case c;
} small_case;

static small_case *all;
static uint32_t all_count;
static const cot_op_cases *collecting;
static cot_queue *queues[2]; /* 1 and 3 threads */
static char *forbidden;      /* memory that nobody may touch */

static bool small(const cot_tensor *tensor)
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

static bool all_small(const cot_direction *direction, const void *args)
{
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)args);
        if (cot_is_present(tensor) && !small(tensor))
            return false;
    }
    return true;
}

static bool collect(void *context, const cot_case *c)
{
    uint32_t *room = context;
    if (!all_small(&collecting->op->directions[c->direction], c->args))
        return true;
    if (all_count == *room) {
        *room += *room / 2 + 1024;
        all = realloc(all, *room * sizeof *all);
    }
    all[all_count++] = (small_case){collecting, *c};
    return true;
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    uint32_t room = 0;
    for (int op = 0; op < cot_op_count; op++) {
        collecting = cot_all_cases[op];
        collecting->each(collect, &room);
    }
    for (int q = 0; q < 2; q++) {
        cot_queue_options options;
        COT_INIT(&options);
        options.threads = q == 0 ? 1 : 3;
        options.kernels = ""; /* not the environment's */
        REQUIRE(cot_queue_create(&options, &queues[q]) == COT_OK, "%s", cot_error_message());
    }
    forbidden = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(forbidden != MAP_FAILED, "no memory");
    for (int op = 0; op < cot_op_count; op++) {
        for (int d = 0; d < cot_ops[op]->direction_count; d++) {
            uint32_t count = 0;
            for (uint32_t i = 0; i < all_count; i++)
                count += all[i].cases == cot_all_cases[op] && all[i].c.direction == d;
            REQUIRE(count > 0, "%s has no case that is small enough", cot_ops[op]->directions[d].call);
        }
    }
    return 0;
}

/* ---- spoiling the arguments ------------------------------------------------------------------------------------ */

static int64_t odd_size(reader *r)
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
    const uint32_t choice = take(r, 256);
    return choice < sizeof sizes / sizeof *sizes ? sizes[choice] : choice < 250 ? choice % 40 : (int64_t)take_bits(r);
}

/* Row-major strides in some order of the axes, with `gap` elements between one and the next. */
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

static void spoil_strides(reader *r, cot_tensor *tensor)
{
    const int axis = (int)take(r, COT_MAX_RANK);
    switch (take(r, 6)) {
    case 0: tensor->stride[axis] = 0; break;
    case 1: tensor->stride[axis] = odd_size(r); break;
    case 2: tensor->stride[axis] = (int64_t)(0 - (uint64_t)tensor->stride[axis]); break; /* backwards */
    case 3: tensor->stride[axis] = tensor->stride[(axis + 1) % COT_MAX_RANK]; break;
    default:
        if (tensor->rank > 0 && tensor->rank <= COT_MAX_RANK)
            lay_out(tensor, take(r, COT_MAX_RANK), 1 + take(r, 3));
    }
}

/* One size becomes another one wherever it stands, so that the tensors go on fitting each other. */
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

/* The members that are no tensors: every four bytes outside of the tensors, the workspace and struct_size. */
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

static void spoil_option(reader *r, const cot_direction *direction, char *args)
{
    static const uint32_t values[] = {0,           1,           2,           3,           0xffffffffu,
                                      0x7fffffffu, 0x80000000u, 0x3f000000u, 0x3f800000u, 0x7f800000u,
                                      0x7fc00000u, 0xbf800000u, 0x3dcccccdu};
    const uint32_t choice = take(r, 32);
    const uint32_t value = choice < sizeof values / sizeof *values ? values[choice] : (uint32_t)take_bits(r);
    size_t slots[COT_MAX_ARGS / 4];
    const uint32_t count = option_slots(direction, slots);
    if (count > 0)
        memcpy(args + slots[take(r, count)], &value, sizeof value);
}

/* May an option make the call long, as a number of iterations can? One that was small in the case and is large now. */
static bool long_option(const cot_direction *direction, const char *own, const char *args)
{
    enum { FEW = 64, COUNT = 1 << 16 };
    size_t slots[COT_MAX_ARGS / 4];
    const uint32_t count = option_slots(direction, slots);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t before, now;
        memcpy(&before, own + slots[i], sizeof before);
        memcpy(&now, args + slots[i], sizeof now);
        if (now != before && now > FEW && before <= COUNT)
            return true;
    }
    return false;
}

static void spoil(reader *r, const cot_direction *direction, char *args)
{
    cot_tensor *tensor = cot_field_tensor(&direction->fields[take(r, (uint32_t)direction->field_count)], args);
    const cot_tensor *other = cot_field_tensor(&direction->fields[take(r, (uint32_t)direction->field_count)], args);
    const int axis = (int)take(r, COT_MAX_RANK);
    switch (take(r, 12)) {
    case 0: tensor->dtype = (cot_dtype)take(r, 9); break;
    case 1: tensor->rank = (int32_t)take(r, COT_MAX_RANK + 3) - 1; break;
    case 2: tensor->shape[axis] = odd_size(r); break;
    case 3: memset(tensor, 0, sizeof *tensor); break;
    case 4: *tensor = *other; break; /* makes an absent one present */
    case 5: {                        /* the dtype of all floats that have this one's */
        const cot_dtype from = tensor->dtype, to = (cot_dtype)(1 + take(r, 4));
        for (int f = 0; f < direction->field_count; f++) {
            cot_tensor *t = cot_field_tensor(&direction->fields[f], args);
            t->dtype = t->dtype == from ? to : t->dtype;
        }
        break;
    }
    case 6:
    case 7: resize_all(direction, args, tensor->shape[axis], odd_size(r), take(r, COT_MAX_RANK)); break;
    case 8:
    case 9: spoil_option(r, direction, args); break;
    default: spoil_strides(r, tensor);
    }
}

/* ---- memory ---------------------------------------------------------------------------------------------------- *
 * Every tensor gets the bytes from its first to its last element and not one more, so that AddressSanitizer sees a step
 * to either side; except that it may begin some elements into its block, or lie within another one's block. */

typedef struct block {
    char *memory, *before, *writable; /* the bytes, as they were, and which of them an accepted call may write */
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

/* Index data: what the op's case would have, if it fits; small numbers, ascending or in any order; or any at all. */
static void fill_index(reader *r, const small_case *s, const cot_field *field, const cot_tensor *tensor,
                       uint64_t *random)
{
    const int64_t elements = cot_elements(tensor);
    int32_t *data = calloc((size_t)elements + 1, sizeof *data), next = 0;
    const cot_tensor *own = cot_field_tensor(field, (void *)s->c.args);
    const uint32_t kind = take(r, 8);
    if (kind < 5 && elements > 0 && own->dtype == COT_I32 && cot_elements(own) == elements) {
        s->cases->fill(&s->c, field->name, data, elements);
        for (uint32_t change = kind; change > 2; change--) /* with an entry or two that are wrong */
            data[take(r, (uint32_t)elements)] = (int32_t)odd_size(r);
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

/* Any bits: infinities, NaN and subnormals too; or values near 1, of which sums can be made. */
static void fill_bytes(char *memory, size_t bytes, bool tame, uint64_t *random)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = cot_draw(random);
        if (tame)
            bits = (bits & 0x8fff8fff8fff8fffu) | 0x3000300030003000u;
        memcpy(memory + at, &bits, bytes - at < 8 ? bytes - at : 8);
    }
}

static void bind(reader *r, const small_case *s, const cot_direction *direction, char *args,
                 block blocks[COT_MAX_FIELDS])
{
    const uint32_t wish = take(r, 256);
    uint64_t random = take_bits(r);
    for (int f = 0; f < direction->field_count; f++) {
        cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
        if (!cot_is_present(tensor))
            continue;
        int64_t low;
        const size_t bytes = extent(tensor, &low);
        const int owner = wish % 8 == 1 && f > 0 ? (int)take(r, (uint32_t)f) : f;
        if (owner != f && blocks[owner].bytes >= bytes && bytes > 0) { /* within another one's memory */
            tensor->data = blocks[owner].memory + take(r, (uint32_t)(blocks[owner].bytes - bytes) + 1) - low;
        } else {
            const size_t offset = wish & 16 ? cot_dtype_size(tensor->dtype) * take(r, MAX_OFFSET) : wish % 8 == 2;
            block *b = &blocks[f];
            b->bytes = bytes + offset;
            b->memory = malloc(b->bytes);
            fill_bytes(b->memory, b->bytes, (wish & 32) != 0, &random);
            tensor->data = bytes > 0 || wish & 64 ? b->memory + offset - low : NULL;
        }
        if (wish % 8 == 3 && take(r, 4) == 0)
            tensor->data = NULL;
        else if (tensor->dtype == COT_I32 && bytes > 0 && (uintptr_t)tensor->data % sizeof(int32_t) == 0)
            fill_index(r, s, &direction->fields[f], tensor, &random);
    }
    for (int f = 0; f < direction->field_count; f++) {
        blocks[f].before = malloc(blocks[f].bytes);
        blocks[f].writable = calloc(blocks[f].bytes + 1, 1);
        if (blocks[f].bytes > 0)
            memcpy(blocks[f].before, blocks[f].memory, blocks[f].bytes);
    }
}

/* Marks what the outputs may write. No element of an output lies on another one's, or on an input's unless the two are
 * one and the same view, which a header may allow. */
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

static void require_untouched(const cot_direction *direction, const block blocks[COT_MAX_FIELDS], const char *when)
{
    for (int f = 0; f < direction->field_count; f++)
        for (size_t i = 0; i < blocks[f].bytes; i++)
            REQUIRE(blocks[f].writable[i] || blocks[f].memory[i] == blocks[f].before[i],
                    "%s: byte %zu of %zu of %s's memory was written by a call that %s", direction->call, i,
                    blocks[f].bytes, direction->fields[f].name, when);
}

/* ---- the call
 * ----------------------------------------------------------------------------------------------------- */

static void require_message(const cot_direction *direction, cot_status status)
{
    const char *message = cot_error_message();
    REQUIRE(status == COT_OUT_OF_MEMORY || strncmp(message, direction->call, strlen(direction->call)) == 0,
            "%s: the message is: %s", direction->call, message);
    REQUIRE(strcmp(cot_status_name(status), "COT_?") != 0, "%s: status %d", direction->call, (int)status);
}

/* The arguments where the sanitizer sees a byte that is read beyond struct_size. */
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

/* Any row that admits the call, not only the cheapest: its name is forced. */
static void force_row(reader *r, const cot_direction *direction, cot_queue *queue, const char *args, char text[256])
{
    cot_choice choices[COT_MAX_KERNELS];
    int count = 0;
    queue->forced = NULL;
    const uint32_t wish = take(r, 64);
    if (wish == 0 || cot_op_explain(direction, queue, args, choices, &count) != COT_OK)
        return;
    const cot_choice *choice = &choices[wish % (uint32_t)count];
    if (choice->refusal != NULL && wish < 48)
        return;
    snprintf(text, 256, "%s=%s", direction->op->name, choice->kernel->name);
    queue->forced = text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = read_from(data, size);
    const small_case *s = &all[take(&r, all_count)];
    const cot_direction *direction = &s->cases->op->directions[s->c.direction];
    _Alignas(16) char args[COT_MAX_ARGS];
    memcpy(args, s->c.args, sizeof args);
    for (uint32_t n = take(&r, 6); n > 0; n--)
        spoil(&r, direction, args);
    size_t struct_size = direction->args_size;
    if (take(&r, 16) == 1)
        struct_size = take(&r, 4) == 0 ? (size_t)take_bits(&r) : struct_size - 64 + take(&r, 256);
    const bool cut = struct_size < direction->args_size; /* what is cut off is absent */
    if (cut && struct_size > sizeof struct_size)
        memset(args + struct_size, 0, direction->args_size - struct_size);
    memcpy(args, &struct_size, sizeof struct_size);

    cot_queue *queue = queues[take(&r, 8) == 1];
    char forced[256];
    force_row(&r, direction, queue, args, forced);
    size_t needed = 0;
    const cot_status query = cot_op_workspace(direction, queue, args, &needed);
    if (query != COT_OK)
        require_message(direction, query);

    if (!all_small(direction, args) || long_option(direction, s->c.args, args)) {
        /* Too large to be executed: only what is refused before any is looked at can be called. */
        for (int f = 0; f < direction->field_count; f++) {
            cot_tensor *tensor = cot_field_tensor(&direction->fields[f], args);
            if (cot_is_present(tensor))
                tensor->data = forbidden + (1 << 19);
        }
        if (query != COT_OK)
            REQUIRE(run(direction, queue, args) != COT_OK, "%s: refused by the query alone", direction->call);
        queue->forced = NULL;
        return 0;
    }

    block blocks[COT_MAX_FIELDS] = {{0}};
    bind(&r, s, direction, args, blocks);
    void *workspace = NULL;
    const uint32_t wish = take(&r, 8);
    size_t given = wish == 0 || cut || query != COT_OK ? 0 : needed - (wish == 1 && needed > 0);
    if (given > 0 && posix_memalign(&workspace, COT_ALIGNMENT, given) != 0)
        abort();
    if (workspace != NULL)
        memset(workspace, 0xff, given);
    memcpy(args + direction->workspace_offset, &workspace, sizeof workspace);
    memcpy(args + direction->workspace_bytes_offset, &given, sizeof given);

    const cot_status status = run(direction, queue, args);
    REQUIRE(status != COT_OK || query == COT_OK, "%s: accepted, though the query refused", direction->call);
    REQUIRE(status != COT_OK || workspace == NULL || given >= needed,
            "%s: ran in less workspace than the query asked for", direction->call);
    REQUIRE(status != COT_WORKSPACE_TOO_SMALL || given < needed,
            "%s: %zu bytes of workspace are too few, the query said %zu", direction->call, given, needed);
    if (status == COT_OK)
        allow_outputs(direction, args, blocks);
    require_untouched(direction, blocks, status == COT_OK ? "has no output there" : "was refused");

    free(workspace);
    for (int f = 0; f < direction->field_count; f++) {
        free(blocks[f].memory);
        free(blocks[f].before);
        free(blocks[f].writable);
    }
    queue->forced = NULL;
    return 0;
}
