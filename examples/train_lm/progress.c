/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { BAR_CELLS = 30, PLAIN_LINES = 10 };

static const double REDRAW_SECONDS = 0.1, LOSS_DECAY = 0.95;
static const char CLEAR_LINE[] = "\r\033[K";

double progress_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_start(progress *p, int64_t steps, int64_t tokens_per_step, bool quiet)
{
    *p = (progress){.flops = p->flops,
                    .peak_flops = p->peak_flops,
                    .gigabytes = p->gigabytes,
                    .quiet = quiet,
                    .terminal = isatty(STDOUT_FILENO),
                    .steps = steps,
                    .tokens_per_step = tokens_per_step,
                    .start = progress_now()};
}

static double tokens_per_second(const progress *p, int64_t step)
{
    return (double)((step - p->resumed_at) * p->tokens_per_step) / (progress_now() - p->start + 1e-9);
}

/* "  470000 tokens/s", on a GPU with its utilisation and memory. */
static void print_speed(const progress *p, int64_t step)
{
    const double rate = tokens_per_second(p, step);
    printf("  %.0f tokens/s", rate);
    if (p->peak_flops > 0)
        printf("  %.1f %% MFU", 100 * rate * p->flops / p->peak_flops);
    if (p->gigabytes > 0)
        printf("  %.1f GB", p->gigabytes);
}

static double seconds_left(const progress *p, int64_t step)
{
    return (progress_now() - p->start) / (double)(step - p->resumed_at) * (double)(p->steps - step);
}

static void draw_bar(progress *p, int64_t step)
{
    const double now = progress_now();
    if (now - p->drawn < REDRAW_SECONDS && step < p->steps)
        return;
    p->drawn = now;
    const int filled = (int)(step * BAR_CELLS / p->steps);
    printf("%s[", CLEAR_LINE);
    for (int i = 0; i < BAR_CELLS; i++)
        putchar(i < filled ? '#' : '.');
    printf("] %lld/%lld  loss %.4f", (long long)step, (long long)p->steps, p->loss);
    print_speed(p, step);
    printf("  %.0f s left", seconds_left(p, step));
    fflush(stdout);
}

static void average_loss(progress *p, int64_t step, double loss)
{
    p->loss = step == 1 ? loss : LOSS_DECAY * p->loss + (1 - LOSS_DECAY) * loss;
}

void progress_recall(progress *p, int64_t step, double loss)
{
    average_loss(p, step, loss);
    p->resumed_at = step;
}

void progress_resumed(const progress *p)
{
    if (!p->quiet)
        printf("going on after step %lld/%lld\n", (long long)p->resumed_at, (long long)p->steps);
}

void progress_step(progress *p, int64_t step, double loss)
{
    average_loss(p, step, loss);
    if (p->quiet)
        return;
    if (p->terminal) {
        draw_bar(p, step);
    } else if (step == 1 || step * PLAIN_LINES / p->steps != (step - 1) * PLAIN_LINES / p->steps) {
        printf("step %lld/%lld  loss %.4f", (long long)step, (long long)p->steps, p->loss);
        print_speed(p, step);
        if (p->gigabytes > 0)
            printf("  %.0f s left", seconds_left(p, step));
        printf("\n");
        fflush(stdout);
    }
}

void progress_validation(const progress *p, int64_t step, double train, double validation)
{
    if (p->quiet)
        return;
    printf("%sstep %lld/%lld  train %.4f  validation %.4f\n", p->terminal ? CLEAR_LINE : "", (long long)step,
           (long long)p->steps, train, validation);
    fflush(stdout);
}

void progress_end(const progress *p)
{
    if (!p->quiet && p->terminal)
        printf("%s", CLEAR_LINE);
}
