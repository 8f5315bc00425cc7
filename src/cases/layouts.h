/* SPDX-License-Identifier: Apache-2.0
 * layouts.h: the memory layouts of [B,channels,T] tensors in test cases. */
#ifndef COT_CASES_LAYOUTS_H
#define COT_CASES_LAYOUTS_H

#include <cotangent/core.h>

#include <stdbool.h>
#include <string.h>

typedef enum cot_layout {
    COT_CHANNEL_FIRST, /* [B,channels,T] */
    COT_CHANNEL_LAST,  /* [B,T,channels] */
    COT_FIRST_SLICE,   /* channel-first, a slice of longer rows, beginning at an odd element */
    COT_LAST_SLICE,    /* channel-last, a slice of the channels of a wider array, beginning at an odd element */
    COT_STRIDED,       /* every second time step of every third channel */
    COT_LAYOUT_COUNT
} cot_layout;

static const char *const cot_layout_names[] = {"channel-first", "channel-last", "first-slice", "last-slice", "strided"};

/* A tensor of this layout with null data. *offset is the number of elements to skip before its first. */
static inline cot_tensor cot_tensor_with_layout(cot_dtype dtype, cot_layout layout, int64_t B, int64_t D, int64_t T,
                                                int64_t *offset)
{
    cot_tensor t = cot_tensor_contiguous(NULL, dtype, 3, (const int64_t[]){B, D, T});
    const int64_t pitch = layout == COT_FIRST_SLICE  ? T + 5
                          : layout == COT_LAST_SLICE ? 2 * D + 3
                          : layout == COT_STRIDED    ? 2 * T + 1
                                                     : 0;
    *offset = layout == COT_FIRST_SLICE || layout == COT_LAST_SLICE ? 1 : 0;
    switch (layout) {
    case COT_CHANNEL_LAST: t.stride[0] = T * D, t.stride[1] = 1, t.stride[2] = D; break;
    case COT_FIRST_SLICE: t.stride[0] = D * pitch, t.stride[1] = pitch; break;
    case COT_LAST_SLICE: t.stride[0] = T * pitch, t.stride[1] = 1, t.stride[2] = pitch; break;
    case COT_STRIDED: t.stride[0] = 3 * D * pitch, t.stride[1] = 3 * pitch, t.stride[2] = 2; break;
    default: break;
    }
    return t;
}

/* Parses the name of a layout, as the functions of words.h do. */
static inline bool cot_parse_layout(cot_layout *layout, const char *text)
{
    for (int i = 0; i < COT_LAYOUT_COUNT; i++)
        if (strcmp(cot_layout_names[i], text) == 0)
            return *layout = (cot_layout)i, true;
    return false;
}

#endif
