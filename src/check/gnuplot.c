/* SPDX-License-Identifier: Apache-2.0 */
#include "gnuplot.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *drawing_begin(drawing *d, const char *path, int width, int height)
{
    d->path = path;
    if (system("command -v gnuplot >/dev/null 2>&1") != 0)
        return "gnuplot is not installed";
    if (snprintf(d->partial, sizeof d->partial, "%s.partial", path) >= (int)sizeof d->partial ||
        strchr(path, '\'') != NULL)
        return "the file name is too long or has a quote in it";
    d->gnuplot = popen("gnuplot", "w");
    if (d->gnuplot == NULL)
        return "gnuplot cannot be started";
    fprintf(d->gnuplot, "set terminal svg size %d,%d font 'sans,12' background '#ffffff'\nset output '%s'\n", width,
            height, d->partial);
    return NULL;
}

const char *drawing_end(drawing *d)
{
    const int failed = pclose(d->gnuplot) != 0 || rename(d->partial, d->path) != 0;
    if (failed)
        unlink(d->partial);
    return failed ? "gnuplot failed, or the file cannot be written" : NULL;
}
