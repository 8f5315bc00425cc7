/* SPDX-License-Identifier: Apache-2.0 */
#include "shard.h"

#include "rows.h"

#include "core/argument_checks.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"

#include <inttypes.h>
#include <stdlib.h>

enum { MAX_RANKS = 1 << 16 };

#define MAX_LENGTH ((int64_t)1 << 40) /* length * 2 * ranks does not overflow */

cot_status cot_copy_options(const char *call, const cot_parallel_options *options, cot_parallel_options *copy)
{
    COT_INIT(copy);
    return options != NULL ? cot_copy_args(call, "options.struct_size", options, sizeof *copy, copy) : COT_OK;
}

cot_status cot_check_cut(const char *call, const cot_parallel_options *options, int64_t length)
{
    if (options->cut != COT_CUT_CONTIGUOUS && options->cut != COT_CUT_ZIGZAG && options->cut != COT_CUT_STRIPED)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: cut is %d, expected 0 (contiguous), 1 (zigzag) or 2 (striped)", call,
                        (int)options->cut);
    if (options->cut == COT_CUT_STRIPED ? options->stripe < 1 || options->stripe > MAX_LENGTH : options->stripe != 0)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: stripe is %" PRId64 ", expected %s", call, options->stripe,
                        options->cut == COT_CUT_STRIPED ? "1 to 2^40 with the striped cut"
                                                        : "0 without the striped cut");
    if (length < 0 || length > MAX_LENGTH)
        return cot_fail(COT_INVALID_SHAPE, "%s: the whole sequence has %" PRId64 " rows, expected 0 to 2^40", call,
                        length);
    return COT_OK;
}

/* Row i of the cut into `parts` equal parts; parts differ by at most one row. */
static int64_t bound(int64_t length, int64_t parts, int64_t i)
{
    return length * i / parts;
}

/* Appends rows [begin, end), joined to the last segment if they meet. */
static void append(cot_segments *s, int64_t begin, int64_t end)
{
    cot_segment *last = s->count > 0 ? &s->list[s->count - 1] : NULL;
    if (begin >= end)
        return;
    if (last != NULL && last->begin + last->rows == begin)
        last->rows += end - begin;
    else
        s->list[s->count++] = (cot_segment){begin, end - begin, s->rows};
    s->rows += end - begin;
}

cot_segments cot_segments_of(const cot_parallel_options *options, int64_t length, int64_t ranks, int64_t first,
                             int64_t count)
{
    cot_segments s = {0};
    const int64_t stripe = options->stripe;
    const int64_t cycles = options->cut == COT_CUT_STRIPED ? cot_ceil_div(length, stripe * ranks) : 0;
    s.list = calloc((size_t)(cycles + 2), sizeof *s.list);
    if (s.list == NULL)
        return s;
    if (options->cut == COT_CUT_CONTIGUOUS) {
        append(&s, bound(length, ranks, first), bound(length, ranks, first + count));
    } else if (options->cut == COT_CUT_ZIGZAG) {
        append(&s, bound(length, 2 * ranks, first), bound(length, 2 * ranks, first + count));
        append(&s, bound(length, 2 * ranks, 2 * ranks - first - count), bound(length, 2 * ranks, 2 * ranks - first));
    } else {
        for (int64_t cycle = 0; cycle < cycles; cycle++)
            append(&s, cot_min(length, (cycle * ranks + first) * stripe),
                   cot_min(length, (cycle * ranks + first + count) * stripe));
    }
    return s;
}

int64_t cot_segments_find(const cot_segments *segments, int64_t position)
{
    int64_t low = 0, high = segments->count;
    while (low < high) { /* the last segment that begins at `position` or before it */
        const int64_t middle = (low + high) / 2;
        if (segments->list[middle].begin <= position)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return -1;
    const cot_segment *s = &segments->list[low - 1];
    return position < s->begin + s->rows ? s->row + position - s->begin : -1;
}

/* ---- the public functions ------------------------------------------------------------------------------------ */

static cot_status segments_of_rank(const char *call, const cot_parallel_options *options, int64_t length, int32_t ranks,
                                   int32_t rank, cot_segments *segments)
{
    cot_parallel_options copy;
    CHECK(cot_copy_options(call, options, &copy));
    CHECK(cot_check_cut(call, &copy, length));
    if (ranks < 1 || ranks > MAX_RANKS)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: ranks is %d, expected 1 to %d", call, (int)ranks, MAX_RANKS);
    if (rank < 0 || rank >= ranks)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: rank is %d, expected 0 to %d", call, (int)rank, (int)ranks - 1);
    *segments = cot_segments_of(&copy, length, ranks, rank, 1);
    return segments->list != NULL ? COT_OK : cot_fail(COT_OUT_OF_MEMORY, "%s: no memory for the segments", call);
}

cot_status cot_shard_rows(const cot_parallel_options *options, int64_t length, int32_t ranks, int32_t rank,
                          int64_t *rows)
{
    static const char call[] = "cot_shard_rows";
    cot_segments segments;
    if (rows == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: rows is null", call);
    CHECK(segments_of_rank(call, options, length, ranks, rank, &segments));
    *rows = segments.rows;
    free(segments.list);
    return COT_OK;
}

cot_status cot_shard_positions(const cot_parallel_options *options, int64_t length, int32_t ranks, int32_t rank,
                               int64_t *positions)
{
    static const char call[] = "cot_shard_positions";
    cot_segments segments;
    if (positions == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: positions is null", call);
    CHECK(segments_of_rank(call, options, length, ranks, rank, &segments));
    for (int64_t n = 0; n < segments.count; n++)
        for (int64_t i = 0; i < segments.list[n].rows; i++)
            positions[segments.list[n].row + i] = segments.list[n].begin + i;
    free(segments.list);
    return COT_OK;
}

static cot_status check_shard(const char *call, const cot_parallel_options *options, int32_t ranks, int32_t rank,
                              int32_t axis, const cot_tensor *whole, const cot_tensor *part, cot_segments *segments)
{
    const unsigned any = COT_FLOATS | COT_DTYPE_BIT(COT_I32) | COT_DTYPE_BIT(COT_U8);
    CHECK(cot_check_required(call, "whole", whole));
    CHECK(cot_check_tensor(call, "whole", whole, any, 1, COT_MAX_RANK));
    CHECK(cot_check_required(call, "part", part));
    CHECK(cot_check_tensor(call, "part", part, any, whole->rank, whole->rank));
    if (part->dtype != whole->dtype)
        return cot_fail(COT_INVALID_DTYPE, "%s: part has dtype %s, whole has %s", call, cot_dtype_name(part->dtype),
                        cot_dtype_name(whole->dtype));
    if (axis < 0 || axis >= whole->rank)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: axis is %d, expected 0 to %d", call, (int)axis, whole->rank - 1);
    CHECK(segments_of_rank(call, options, whole->shape[axis], ranks, rank, segments));
    cot_status status = COT_OK;
    for (int i = 0; status == COT_OK && i < whole->rank; i++) {
        const int64_t expected = i == axis ? segments->rows : whole->shape[i];
        if (part->shape[i] != expected)
            status = cot_fail(COT_INVALID_SHAPE, "%s: part has %" PRId64 " on axis %d, expected %" PRId64, call,
                              part->shape[i], i, expected);
    }
    if (status != COT_OK)
        free(segments->list);
    return status;
}

/* Copies between the part and the rows of the whole that it holds. */
static cot_status copy_shard(const char *call, const cot_parallel_options *options, int32_t ranks, int32_t rank,
                             int32_t axis, const cot_tensor *whole, const cot_tensor *part, bool to_part)
{
    cot_segments segments;
    if (whole == NULL || part == NULL)
        return cot_fail(COT_INVALID_ARGUMENT, "%s: %s is null", call, whole == NULL ? "whole" : "part");
    CHECK(check_shard(call, options, ranks, rank, axis, whole, part, &segments));
    const cot_named_tensor memory[] = {{"whole", whole, !to_part, false}, {"part", part, to_part, false}};
    const cot_status status = cot_check_memory(call, memory, 2);
    for (int64_t n = 0; status == COT_OK && n < segments.count; n++) {
        const cot_segment *s = &segments.list[n];
        const cot_tensor in_whole = cot_slice(whole, axis, s->begin, s->rows);
        const cot_tensor in_part = cot_slice(part, axis, s->row, s->rows);
        cot_copy_tensor(to_part ? &in_part : &in_whole, to_part ? &in_whole : &in_part, false);
    }
    free(segments.list);
    return status;
}

cot_status cot_shard(const cot_parallel_options *options, int32_t ranks, int32_t rank, int32_t axis,
                     const cot_tensor *whole, const cot_tensor *part)
{
    return copy_shard("cot_shard", options, ranks, rank, axis, whole, part, true);
}

cot_status cot_unshard(const cot_parallel_options *options, int32_t ranks, int32_t rank, int32_t axis,
                       const cot_tensor *part, const cot_tensor *whole)
{
    return copy_shard("cot_unshard", options, ranks, rank, axis, whole, part, false);
}
