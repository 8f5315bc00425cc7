/* SPDX-License-Identifier: Apache-2.0
 * gnuplot.h: writes a drawing with gnuplot. */
#ifndef COT_BENCH_GNUPLOT_H
#define COT_BENCH_GNUPLOT_H

#include <stdio.h>

typedef struct drawing {
    FILE *gnuplot; /* a pipe for gnuplot's commands */
} drawing;

/* drawing_begin begins an SVG of that size in pixels in the file `path`. Both functions return NULL, or a message if
 * they fail. */
const char *drawing_begin(drawing *d, const char *path, int width, int height);
const char *drawing_end(drawing *d);

#endif
