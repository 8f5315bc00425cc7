/* SPDX-License-Identifier: Apache-2.0 */
#include "runs.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static const double LN2 = 0.69314718055994530942;

void runs_print(const finished_run *runs, int count, const options *o)
{
    printf("\n%-12s %10s %10s", "", "parameters", "tokens/s");
    for (int64_t seed = 0; seed < o->seeds; seed++) {
        char name[32];
        snprintf(name, sizeof name, "seed %lld", (long long)(o->seed + seed));
        printf(" %10s", name);
    }
    printf(" %9s %10s\n", "mean", "bits/byte");
    for (int i = 0; i < count; i += (int)o->seeds) {
        double sum = 0, rate = 0;
        for (int64_t seed = 0; seed < o->seeds; seed++) {
            sum += runs[i + seed].validation;
            rate += runs[i + seed].tokens_per_second;
        }
        const double mean = sum / (double)o->seeds;
        printf("%-12s %10lld %10.0f", runs[i].arch->name, (long long)runs[i].parameters, rate / (double)o->seeds);
        for (int64_t seed = 0; seed < o->seeds; seed++)
            printf(" %10.4f", runs[i + seed].validation);
        printf(" %9.4f %10.4f\n", mean, mean / LN2);
    }
    printf("%-12s %21s%*s %9.4f %10.4f\n", "byte bigrams", "", 11 * (int)o->seeds, "", runs[0].bigram,
           runs[0].bigram / LN2);
    printf("Validation losses in nats/byte over the same %lld held-out bytes, after %lld tokens each.\n",
           (long long)runs[0].validation_bytes, (long long)(o->steps * o->batch * o->context));
}

/* For example "Intel(R) Xeon(R) Processor, 2 cores", without characters that JSON escapes. False if there is no
 * memory. */
static bool device_name(char *text, size_t size)
{
    char line[256], name[200] = "unknown processor";
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL && errno == ENOMEM)
        return false;
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "model name : %199[^\n\"\\]", name) == 1)
            break;
    if (file != NULL)
        fclose(file);
    snprintf(text, size, "%s, %ld cores", name, sysconf(_SC_NPROCESSORS_ONLN));
    return true;
}

static bool write_runs(io_writer *writer, const finished_run *runs, int count, const options *o, int threads,
                       io_error *error)
{
    char device[256], date[16];
    const time_t now = time(NULL);
    bool good = device_name(device, sizeof device) || io_no_memory(error, o->json, "for the processor's name");
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    for (int i = 0; good && i < count; i++) {
        const finished_run *r = &runs[i];
        good =
            io_print(writer, error,
                     "%s{\"trained\": \"%s\", \"seed\": %lld, \"parameters\": %lld, \"tokens\": %lld, \"train\": %.9g, "
                     "\"validation\": %.9g, \"bigram\": %.9g,\n  \"tokens_per_second\": %.6g, \"threads\": %d, "
                     "\"device\": \"%s\", \"date\": \"%s\", \"version\": \"%s\"}",
                     i == 0 ? "[" : ",\n ", r->arch->name, (long long)r->seed, (long long)r->parameters,
                     (long long)(o->steps * o->batch * o->context), r->train, r->validation, r->bigram,
                     r->tokens_per_second, threads, device, date, cot_version());
    }
    return good && io_print(writer, error, "]\n");
}

bool runs_write_json(const finished_run *runs, int count, const options *o, int threads, io_error *error)
{
    io_writer writer;
    if (!io_open(&writer, o->json, error))
        return false;
    const bool good = write_runs(&writer, runs, count, o, threads, error) && io_publish(&writer, 1, error);
    io_abandon(&writer);
    return good;
}
