/* SPDX-License-Identifier: Apache-2.0
 *
 * test_bench_report.c: tests the columns of bench's table. They depend on what bounds a case, and on the device. */
#include "support.h"

#include "bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Writes the output of bench_print for one row to `text`. */
static void print(const char *json, char *text, size_t size)
{
    FILE *file = tmpfile();
    json_t *rows = json_loads(json, 0, NULL);
    assert_non_null(file);
    assert_non_null(rows);
    fflush(stdout);
    const int saved = dup(STDOUT_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    bench_print(rows);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    rewind(file);
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
    json_decref(rows);
}

#define ROW(backend, op, bytes, flops, more)                                                                                           \
    "[{\"op\": \"" op "\", \"direction\": \"forward\", \"kernel\": \"k\", \"backend\": \"" backend                                     \
    "\", \"dtype\": \"bf16\", \"layout\": \"l\", \"shape\": \"s\", \"options\": \"o\", \"threads\": 2, \"ms\": 1.5, \"bytes\": " bytes \
    ", \"flops\": " flops                                                                                                              \
    ", \"gbps\": 37.5, \"tflops\": 0.25, \"ceiling\": 1000, \"ratio\": 0.0375, \"cycles16\": 77.7, "                                   \
    "\"workspace_bytes\": 2048, \"chosen\": true, \"device\": \"Toy\", \"clock_ghz\": 2.5, \"commit\": \"c\", \"date\": \"d\"" more    \
    "}]"

static void check_line(const char *json, const char *const *expected, const char *const *absent)
{
    char text[4096];
    print(json, text, sizeof text);
    for (; *expected != NULL; expected++)
        if (strstr(text, *expected) == NULL)
            fail_msg("\"%s\" is missing in\n%s", *expected, text);
    for (; *absent != NULL; absent++)
        if (strstr(text, *absent) != NULL)
            fail_msg("\"%s\" does not belong in\n%s", *absent, text);
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void bound_by_products(void **state)
{
    (void)state;
    check_line(
        ROW("cpu", "attention", "1e6", "1e9", ", \"product_ceiling\": 0.5, \"product_ratio\": 0.5"),
        WORDS("1.0 GFLOP, products 0.500 TFLOP/s", "TFLOP/s", "of products", "0.250", "50.0%", "2 threads", "2.50 GHz"),
        WORDS("GB/s", "of copy", "3.8%", "cycles"));
    check_line(ROW("cuda", "attention", "1e6", "1e9", ""), WORDS("1.0 GFLOP", "TFLOP/s", "0.250", "chosen"),
               WORDS("of products", "GB/s", "of copy", "threads", "GHz", "cycles"));
    check_line(ROW("cuda", "attention", "1e6", "1e9", ", \"product_ceiling\": 0.5, \"product_ratio\": 0.5"),
               WORDS("products 0.500 TFLOP/s", "of products", "50.0%"), WORDS("GB/s", "threads", "GHz", "cycles"));
}

static void bound_by_memory(void **state)
{
    (void)state;
    check_line(ROW("cpu", "dropout", "1e8", "1e8", ""),
               WORDS("100.0 MB, copy 1000.0 GB/s", "of copy", "3.8%", "cycles/16", "77.7", "2 threads"),
               WORDS("FLOP", "products"));
    /* A ceiling of products is there, but it does not bound the case: mhc_pre. */
    check_line(ROW("cpu", "mhc_pre", "1e8", "2e9", ", \"product_ceiling\": 50, \"product_ratio\": 0.005"),
               WORDS("GB/s", "of copy"), WORDS("FLOP", "products"));
    check_line(ROW("cuda", "mhc_pre", "1e8", "3e9", ""), WORDS("of copy", "workspace KB", "2.0"),
               WORDS("cycles", "77.7", "threads", "GHz", "FLOP"));
}

/* The drawing shows the share of the rate that bounds the case. */
static void drawn_share(void **state)
{
    (void)state;
    char path[] = "/tmp/test_bench_report_XXXXXX", text[32768] = "";
    const int file = mkstemp(path);
    json_t *rows = json_loads(
        ROW("cuda", "attention", "1e6", "1e9", ", \"product_ceiling\": 0.5, \"product_ratio\": 0.71"), 0, NULL);
    assert_true(file >= 0);
    close(file);
    assert_null(bench_plot(rows, path));
    FILE *drawing = fopen(path, "r");
    assert_non_null(drawing);
    text[fread(text, 1, sizeof text - 1, drawing)] = '\0';
    fclose(drawing);
    remove(path);
    json_decref(rows);
    assert_non_null(strstr(text, "(products)"));
    assert_non_null(strstr(text, ">0.71<"));
    assert_null(strstr(text, ">0.04<"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bound_by_products),
        cmocka_unit_test(bound_by_memory),
        cmocka_unit_test(drawn_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
