/* SPDX-License-Identifier: Apache-2.0
 * gnuplot.h: a drawing through gnuplot. */
#ifndef COT_CHECK_GNUPLOT_H
#define COT_CHECK_GNUPLOT_H

#include <stdio.h>

typedef struct drawing {
    FILE *gnuplot; /* commands go here */
} drawing;

/* Begins an SVG of that size in pixels, in the file `path`. Both return NULL, or what failed. */
const char *drawing_begin(drawing *d, const char *path, int width, int height);
const char *drawing_end(drawing *d);

#endif
