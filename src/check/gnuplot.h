/* SPDX-License-Identifier: Apache-2.0
 * gnuplot.h: a drawing through gnuplot, written beside its place and renamed. */
#ifndef COT_CHECK_GNUPLOT_H
#define COT_CHECK_GNUPLOT_H

#include <stdio.h>

typedef struct drawing {
    const char *path;
    char partial[4096];
    FILE *gnuplot; /* commands go here */
} drawing;

/* Begins an SVG of that size in pixels. Both return NULL, or what failed. */
const char *drawing_begin(drawing *d, const char *path, int width, int height);
const char *drawing_end(drawing *d);

#endif
