/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_report.c: bench's rows as a table and as a drawing. */
#include "bench.h"
#include "gnuplot.h"

#include <stdio.h>
#include <stdlib.h>

static const char *text_of(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

static double number_of(const json_t *row, const char *key)
{
    return json_number_value(json_object_get(row, key));
}

static bool same_case(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"op", "direction", "dtype", "layout", "shape", "options"};
    for (size_t i = 0; a != NULL && i < sizeof keys / sizeof *keys; i++)
        if (strcmp(text_of(a, keys[i]), text_of(b, keys[i])) != 0)
            return false;
    return a != NULL;
}

void bench_print(const json_t *rows)
{
    size_t index;
    const json_t *row, *before = NULL;
    json_array_foreach((json_t *)rows, index, row)
    {
        if (before == NULL)
            printf("%s, clock %.2f GHz, %d threads, commit %s, %s\n", text_of(row, "device"),
                   number_of(row, "clock_ghz"), (int)number_of(row, "threads"), text_of(row, "commit"),
                   text_of(row, "date"));
        if (!same_case(before, row))
            printf("\n%s %s %s %s %s, %s: %.1f MB, copy %.1f GB/s\n%-46s %10s %8s %8s %10s %12s\n", text_of(row, "op"),
                   text_of(row, "direction"), text_of(row, "dtype"), text_of(row, "layout"), text_of(row, "shape"),
                   text_of(row, "options"), 1e-6 * number_of(row, "bytes"), number_of(row, "ceiling"), "kernel", "ms",
                   "GB/s", "of copy", "cycles/16", "workspace KB");
        const bool products = json_object_get(row, "product_ceiling") != NULL;
        char rate[64] = "";
        if (products)
            snprintf(rate, sizeof rate, "  %.3f TFLOP/s, %.2f of products", number_of(row, "tflops"),
                     number_of(row, "product_ratio"));
        printf("%-46s %10.4f %8.2f %7.1f%% %10.1f %12.1f%s%s\n", text_of(row, "kernel"), number_of(row, "ms"),
               number_of(row, "gbps"), 100 * number_of(row, "ratio"), number_of(row, "cycles16"),
               number_of(row, "workspace_bytes") / 1024, rate,
               json_is_true(json_object_get(row, "chosen")) ? "  chosen" : "");
        before = row;
    }
}

/* The data of the drawing: label, share of the ceiling, colour; the chosen kernels alone where there are many rows. */
static int write_bars(FILE *gnuplot, const json_t *rows)
{
    size_t index;
    const json_t *row;
    int bars = 0;
    const bool chosen_only = json_array_size(rows) > 24;
    fprintf(gnuplot, "$bars << END\n");
    json_array_foreach((json_t *)rows, index, row)
    {
        const bool chosen = json_is_true(json_object_get(row, "chosen"));
        if (chosen_only && !chosen)
            continue;
        fprintf(gnuplot, "\"%s %s %s %s %s\" %.4f %d\n", text_of(row, "kernel"), text_of(row, "dtype"),
                text_of(row, "layout"), text_of(row, "shape"), strstr(text_of(row, "options"), "silu") ? "SiLU" : "",
                number_of(row, "ratio"), chosen ? 2 : 1);
        bars++;
    }
    fprintf(gnuplot, "END\n");
    return bars;
}

const char *bench_plot(const json_t *rows, const char *path)
{
    if (json_array_size(rows) == 0)
        return "there are no rows to draw";
    drawing d;
    int bars = 0;
    char *data = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&data, &size);
    if (memory == NULL)
        return "there is no memory";
    bars = write_bars(memory, rows);
    fclose(memory);
    const char *failed = drawing_begin(&d, path, 1100, 110 + 22 * bars);
    if (failed == NULL) {
        const json_t *first = json_array_get(rows, 0);
        fprintf(d.gnuplot,
                "%sset title \"Share of the copy bandwidth at the same footprint\\n%s, %d threads, commit %s, %s\" "
                "noenhanced\n",
                data, text_of(first, "device"), (int)number_of(first, "threads"), text_of(first, "commit"),
                text_of(first, "date"));
        fprintf(d.gnuplot,
                "set yrange [%d:-1]\nset xrange [0:*]\nset xtics 0.2\nset grid xtics\nset ytics noenhanced\nset key "
                "off\nset lmargin 70\nset style fill solid 0.8\nset arrow from 1,graph 0 to 1,graph 1 nohead dt 2\n",
                bars);
        fprintf(d.gnuplot, "plot $bars using ($2/2):0:($2/2):(0.38):ytic(1) with boxxyerror lc rgb '#4477aa' notitle, "
                           "'' using ($2):0:(sprintf('%%.2f', $2)) with labels left offset 0.5,0 notitle\n");
        failed = drawing_end(&d);
    }
    free(data);
    return failed;
}
