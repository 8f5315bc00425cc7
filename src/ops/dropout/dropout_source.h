/* SPDX-License-Identifier: Apache-2.0
 * dropout_source.h: where the mask comes from. For C and device code. */
#ifndef COT_DROPOUT_SOURCE_H
#define COT_DROPOUT_SOURCE_H

typedef enum dropout_source {
    DROPOUT_KEEP_ALL,  /* threshold 0: no mask */
    DROPOUT_GENERATED, /* by Philox from seed and offset */
    DROPOUT_DROP_ALL,  /* threshold 65536: every element is dropped */
    DROPOUT_BYTES,     /* the caller's `mask` */
    DROPOUT_BITS       /* the caller's `mask_bits` */
} dropout_source;

#endif
