/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_report.c: prints profile's rows as a table and draws them. */
#include "gnuplot.h"
#include "profile.h"

#include <string.h>

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

/* The phases of a call, in their order. */
static const struct {
    const char *key, *name, *colour;
} phases[] = {
    {"allocation_ms", "allocation", "#cc6677"},
    {"to_device_ms", "copy to the device", "#88ccee"},
    {"kernels_ms", "kernels", "#117733"},
    {"to_host_ms", "copy to the host", "#ddcc77"},
};
enum { PHASES = sizeof phases / sizeof *phases, ALLOCATION_PHASE = 0 };

/* ---- files -------------------------------------------------------------------------------------------- */

static bool has_members(const json_t *row, const char *const *texts, const char *const *numbers)
{
    for (; *texts != NULL; texts++)
        if (!json_is_string(json_object_get(row, *texts)))
            return false;
    for (; *numbers != NULL; numbers++)
        if (!json_is_number(json_object_get(row, *numbers)))
            return false;
    return true;
}

json_t *profile_load(const char *path, const char **why)
{
    static const char *const texts[] = {"op",     "direction", "kernel", "dtype", "layout", "shape", "options",
                                        "memory", "batch",     "device", "date",  "commit", NULL};
    static const char *const numbers[] = {"streams",       "pieces",     "total_ms",   "allocation_ms",
                                          "to_device_ms",  "kernels_ms", "to_host_ms", "bytes_to_device",
                                          "bytes_to_host", NULL};
    static const char *const launch_texts[] = {"name", NULL};
    static const char *const launch_numbers[] = {"blocks",
                                                 "threads",
                                                 "registers",
                                                 "local_bytes",
                                                 "static_shared",
                                                 "dynamic_shared",
                                                 "blocks_per_multiprocessor",
                                                 "occupancy",
                                                 "waves",
                                                 NULL};
    json_t *rows = json_load_file(path, 0, NULL);
    const json_t *row, *launch;
    size_t index, number;
    *why = rows == NULL ? "it cannot be read, or is no JSON" : "it holds no rows of `cotangent profile --json`";
    bool valid = json_array_size(rows) > 0;
    json_array_foreach(rows, index, row)
    {
        valid = valid && has_members(row, texts, numbers) && json_is_array(json_object_get(row, "launches"));
        json_array_foreach(json_object_get(row, "launches"), number, launch)
        {
            valid = valid && has_members(launch, launch_texts, launch_numbers);
        }
    }
    if (valid)
        return rows;
    json_decref(rows);
    return NULL;
}

/* ---- table -------------------------------------------------------------------------------------------- */

/* Prints the launches of the mode with the fewest calls. */
static void print_launches(const json_t *rows, size_t first)
{
    size_t index;
    const json_t *l, *row = json_array_get(rows, first);
    for (size_t i = first; i < json_array_size(rows) && same_case(row, json_array_get(rows, i)); i++)
        if (number_of(json_array_get(rows, i), "pieces") < number_of(row, "pieces"))
            row = json_array_get(rows, i);
    printf("%-46s %9s %7s %9s %5s %12s %9s %9s %6s\n", "  launched", "blocks", "threads", "registers", "local",
           "shared bytes", "blocks/SM", "occupancy", "waves");
    json_array_foreach(json_object_get(row, "launches"), index, l)
    {
        printf("  %-44s %9.0f %7.0f %9.0f %5.0f %12.0f %9.0f %8.0f%% %6.1f\n", text_of(l, "name"),
               number_of(l, "blocks"), number_of(l, "threads"), number_of(l, "registers"), number_of(l, "local_bytes"),
               number_of(l, "static_shared") + number_of(l, "dynamic_shared"),
               number_of(l, "blocks_per_multiprocessor"), 100 * number_of(l, "occupancy"), number_of(l, "waves"));
    }
}

static double rate(double bytes, double milliseconds)
{
    return milliseconds > 0 ? 1e-6 * bytes / milliseconds : 0;
}

void profile_print(const json_t *rows)
{
    size_t index;
    const json_t *row, *previous = NULL;
    json_array_foreach((json_t *)rows, index, row)
    {
        if (previous == NULL)
            printf("%s, commit %s, %s\n", text_of(row, "device"), text_of(row, "commit"), text_of(row, "date"));
        if (!same_case(previous, row)) {
            printf("\n%s %s %s %s %s, %s: %s\n%.1f MB to the device, %.1f MB back; times in ms, medians\n",
                   text_of(row, "op"), text_of(row, "direction"), text_of(row, "dtype"), text_of(row, "layout"),
                   text_of(row, "shape"), text_of(row, "options"), text_of(row, "kernel"),
                   1e-6 * number_of(row, "bytes_to_device"), 1e-6 * number_of(row, "bytes_to_host"));
            print_launches(rows, index);
            printf("  %-6s %7s %6s %6s %10s %10s %10s %8s %10s %8s %10s\n", "memory", "streams", "batch", "pieces",
                   "total", "allocation", "to device", "GB/s", "kernels", "to host", "GB/s");
        }
        printf("  %-6s %7.0f %6s %6.0f %10.4f %10.4f %10.4f %8.1f %10.4f %8.4f %10.1f\n", text_of(row, "memory"),
               number_of(row, "streams"), text_of(row, "batch"), number_of(row, "pieces"), number_of(row, "total_ms"),
               number_of(row, "allocation_ms"), number_of(row, "to_device_ms"),
               rate(number_of(row, "bytes_to_device"), number_of(row, "to_device_ms")), number_of(row, "kernels_ms"),
               number_of(row, "to_host_ms"), rate(number_of(row, "bytes_to_host"), number_of(row, "to_host_ms")));
        previous = row;
    }
}

/* ---- drawing ------------------------------------------------------------------------------------------ */

/* Writes one phase of a row's bar, at height y. The phases lie end to end. If they overlap, those after the allocation
 * lie side by side. */
static void write_bar(FILE *gnuplot, const json_t *row, int y, size_t phase)
{
    const bool overlapped = number_of(row, "streams") > 1;
    double begin = 0, low = y - 0.38, high = y + 0.38;
    const double length = number_of(row, phases[phase].key);
    for (size_t i = 0; i < phase && (!overlapped || i <= ALLOCATION_PHASE); i++)
        begin += number_of(row, phases[i].key);
    if (overlapped && phase != ALLOCATION_PHASE) {
        low = y - 0.38 + 0.76 * (double)(phase - 1) / (PHASES - 1);
        high = low + 0.76 / (PHASES - 1);
    }
    fprintf(gnuplot, "%g %g %g %g %g %g\n", begin + length / 2, (low + high) / 2, begin, begin + length, low, high);
}

/* Returns the number of rows from `first` on that show the same case. */
static size_t rows_of_case(const json_t *rows, size_t first)
{
    size_t end = first + 1;
    while (end < json_array_size(rows) && same_case(json_array_get(rows, first), json_array_get(rows, end)))
        end++;
    return end - first;
}

static void draw_case(FILE *gnuplot, const json_t *rows, size_t first, size_t count)
{
    for (size_t phase = 0; phase < PHASES; phase++) {
        fprintf(gnuplot, "$share%zu << END\n", phase);
        for (size_t i = 0; i < count; i++)
            write_bar(gnuplot, json_array_get(rows, first + i), (int)i, phase);
        fprintf(gnuplot, "END\n");
    }
    double longest = 0;
    fprintf(gnuplot, "$total << END\n");
    for (size_t i = 0; i < count; i++) {
        const double total = number_of(json_array_get(rows, first + i), "total_ms");
        fprintf(gnuplot, "%g %zu\n", total, i);
        longest = total > longest ? total : longest;
    }
    fprintf(gnuplot, "END\n");
    const json_t *row = json_array_get(rows, first);
    fprintf(gnuplot, "set title \"%s %s %s %s %s, %s\\n%s, commit %s, %s\" noenhanced\n", text_of(row, "op"),
            text_of(row, "direction"), text_of(row, "dtype"), text_of(row, "layout"), text_of(row, "shape"),
            text_of(row, "options"), text_of(row, "device"), text_of(row, "commit"), text_of(row, "date"));
    fprintf(gnuplot, "set ytics (");
    for (size_t i = 0; i < count; i++) {
        row = json_array_get(rows, first + i);
        fprintf(gnuplot, "%s'%s memory, %.0f stream%s, %s' %zu", i > 0 ? ", " : "", text_of(row, "memory"),
                number_of(row, "streams"), number_of(row, "streams") > 1 ? "s" : "", text_of(row, "batch"), i);
    }
    fprintf(gnuplot,
            ")\nset yrange [%zu:-0.6]\nset xrange [0:%g]\nset xlabel 'ms, from host to host'\nset grid xtics\n"
            "set key outside right top\nset lmargin 32\nset style fill solid 0.9 noborder\nplot ",
            count, 1.12 * longest); /* space for the numbers */
    for (size_t phase = 0; phase < PHASES; phase++)
        fprintf(gnuplot, "$share%zu using 1:2:3:4:5:6 with boxxyerror lc rgb '%s' title '%s', ", phase,
                phases[phase].colour, phases[phase].name);
    fprintf(gnuplot, "$total using 1:2:(0.44) with yerrorbars pt 0 lw 2 lc rgb 'black' title 'total', "
                     "'' using 1:2:(sprintf('%%.4g', $1)) with labels left offset 0.6,0 notitle\n");
}

const char *profile_plot(const json_t *rows, const char *path)
{
    enum { WIDTH = 1100, FRAME = 130, BAR = 34 };
    size_t panels = 0, max_rows = 0;
    for (size_t first = 0; first < json_array_size(rows); first += rows_of_case(rows, first), panels++)
        max_rows = rows_of_case(rows, first) > max_rows ? rows_of_case(rows, first) : max_rows;
    if (panels == 0)
        return "there are no rows to draw";
    drawing d;
    const char *failed = drawing_begin(&d, path, WIDTH, (int)(panels * (FRAME + BAR * max_rows)));
    if (failed != NULL)
        return failed;
    fprintf(d.gnuplot, "set multiplot layout %zu,1\n", panels);
    for (size_t first = 0; first < json_array_size(rows); first += rows_of_case(rows, first))
        draw_case(d.gnuplot, rows, first, rows_of_case(rows, first));
    fprintf(d.gnuplot, "unset multiplot\n");
    return drawing_end(&d);
}
