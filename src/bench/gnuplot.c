/* SPDX-License-Identifier: Apache-2.0 */
#include "gnuplot.h"

#include <stdlib.h>
#include <string.h>

const char *drawing_begin(drawing *d, const char *path, int width, int height)
{
    if (system("command -v gnuplot >/dev/null 2>&1") != 0)
        return "gnuplot is not installed";
    if (strchr(path, '\'') != NULL)
        return "the file name has a quote in it";
    d->gnuplot = popen("gnuplot", "w");
    if (d->gnuplot == NULL)
        return "gnuplot cannot be started";
    fprintf(d->gnuplot, "set terminal svg size %d,%d font 'sans,12' background '#ffffff'\nset output '%s'\n", width,
            height, path);
    return NULL;
}

const char *drawing_end(drawing *d)
{
    return pclose(d->gnuplot) != 0 ? "gnuplot failed, or the file cannot be written" : NULL;
}
