/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_report.c: prints bench's rows as a table and draws them. */
#include "bench.h"
#include "gnuplot.h"
#include "measurement.h"

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

static bool is_product_bound(const json_t *row)
{
    return number_of(row, "flops") > PRODUCTS_BOUND * number_of(row, "bytes");
}

static bool on_device(const json_t *row)
{
    return strcmp(text_of(row, "backend"), "cpu") != 0;
}

static void print_machine(const json_t *row)
{
    printf("%s, ", text_of(row, "device"));
    if (!on_device(row))
        printf("clock %.2f GHz, %d threads, ", number_of(row, "clock_ghz"), (int)number_of(row, "threads"));
    printf("commit %s, %s\n", text_of(row, "commit"), text_of(row, "date"));
}

/* Prints the case, its ceiling and the names of the columns. */
static void print_case(const json_t *row, bool product_bound)
{
    const bool has_ceiling = number_of(row, "product_ceiling") > 0;
    printf("\n%s %s %s %s %s, %s: ", text_of(row, "op"), text_of(row, "direction"), text_of(row, "dtype"),
           text_of(row, "layout"), text_of(row, "shape"), text_of(row, "options"));
    if (!product_bound)
        printf("%.1f MB, copy %.1f GB/s\n", 1e-6 * number_of(row, "bytes"), number_of(row, "ceiling"));
    else if (has_ceiling)
        printf("%.1f GFLOP, products %.3f TFLOP/s\n", 1e-9 * number_of(row, "flops"),
               number_of(row, "product_ceiling"));
    else
        printf("%.1f GFLOP\n", 1e-9 * number_of(row, "flops"));
    printf("%-46s %10s ", "kernel", "ms");
    if (product_bound)
        printf("%9s %s", "TFLOP/s", has_ceiling ? "of products " : "");
    else
        printf("%9s %8s %s", "GB/s", "of copy", on_device(row) ? "" : " cycles/16 ");
    printf("%12s\n", "workspace KB");
}

static void print_row(const json_t *row, bool product_bound)
{
    printf("%-46s %10.4f ", text_of(row, "kernel"), number_of(row, "ms"));
    if (product_bound) {
        printf("%9.3f ", number_of(row, "tflops"));
        if (number_of(row, "product_ceiling") > 0)
            printf("%10.1f%% ", 100 * number_of(row, "product_ratio"));
    } else {
        printf("%9.2f %7.1f%% ", number_of(row, "gbps"), 100 * number_of(row, "ratio"));
        if (!on_device(row))
            printf("%10.1f ", number_of(row, "cycles16"));
    }
    printf("%12.1f%s\n", number_of(row, "workspace_bytes") / 1024,
           json_is_true(json_object_get(row, "chosen")) ? "  chosen" : "");
}

void bench_print(const json_t *rows)
{
    size_t index;
    const json_t *row, *previous = NULL;
    bool product_bound = false; /* of the current case, by its first row */
    json_array_foreach((json_t *)rows, index, row)
    {
        if (previous == NULL)
            print_machine(row);
        if (!same_case(previous, row))
            print_case(row, product_bound = is_product_bound(row));
        print_row(row, product_bound);
        previous = row;
    }
}

/* Writes the data of the drawing: label, fraction of the ceiling, colour. The ceiling is the rate of matrix products alone
 * where products bound the row and their rate was measured, and else the copy. Only chosen kernels if there are many rows.
 * Returns the number of bars. */
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
        const bool products = is_product_bound(row) && number_of(row, "product_ratio") > 0;
        fprintf(gnuplot, "\"%s %s %s %s %s%s\" %.4f %d\n", text_of(row, "kernel"), text_of(row, "dtype"),
                text_of(row, "layout"), text_of(row, "shape"), strstr(text_of(row, "options"), "silu") ? "SiLU" : "",
                products ? " (products)" : "", number_of(row, products ? "product_ratio" : "ratio"), chosen ? 2 : 1);
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
        fprintf(
            d.gnuplot,
            "%sset title \"Share of the rate of a copy of the same bytes, or of matrix products alone (products)\\n%s, %d threads, commit %s, %s\" "
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
