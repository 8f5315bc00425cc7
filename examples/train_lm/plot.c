/* SPDX-License-Identifier: Apache-2.0 */
#include "plot.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_PATH_LENGTH = 4096 };

extern char **environ;

/* gnuplot runs in the output folder, so that no file name needs quoting. */
static const char SCRIPT[] = "set terminal svg size 900,540 font 'sans,14' background rgb 'white'\n"
                             "set output 'loss.svg.tmp'\n"
                             "set datafile separator ','\n"
                             "set title 'Byte-level language model: loss'\n"
                             "set xlabel 'step'\n"
                             "set ylabel 'nats per byte'\n"
                             "set xrange [0:*]\n"
                             "set grid\n"
                             "set key top right\n"
                             "plot 'loss.csv' using 1:2 every ::1 with lines lc rgb '#9ecae1' title 'train', \\\n"
                             "     'loss.csv' using 1:4 every ::1 with lines dt 2 lw 2 lc rgb '#555555' "
                             "title 'bigram, on validation text', \\\n"
                             "     'loss.csv' using 1:3 every ::1 with linespoints pt 7 ps 0.5 lw 2 lc rgb '#d62728' "
                             "title 'validation'\n";

static bool join(char *path, const char *folder, const char *name)
{
    if (snprintf(path, MAX_PATH_LENGTH, "%s/%s", folder, name) < MAX_PATH_LENGTH)
        return true;
    errno = ENAMETOOLONG;
    return false;
}

static void write_points(FILE *file, const loss_curve *curve)
{
    fputs("step,train,validation,bigram\n", file);
    for (int64_t i = 0; i < curve->count; i++) {
        const curve_point *p = &curve->points[i];
        fprintf(file, "%lld,", (long long)p->step);
        if (!isnan(p->train))
            fprintf(file, "%.9g", p->train);
        fputc(',', file);
        if (!isnan(p->validation))
            fprintf(file, "%.9g", p->validation);
        fprintf(file, ",%.9g\n", curve->bigram);
    }
}

bool plot_write_csv(const loss_curve *curve, const char *folder)
{
    char path[MAX_PATH_LENGTH], unfinished[MAX_PATH_LENGTH];
    if (!join(path, folder, "loss.csv") || !join(unfinished, folder, "loss.csv.tmp"))
        return false;
    FILE *file = fopen(unfinished, "w");
    if (file == NULL)
        return false;
    write_points(file, curve);
    const bool written = !ferror(file);
    if (fclose(file) == 0 && written && rename(unfinished, path) == 0)
        return true;
    const int error = errno;
    unlink(unfinished);
    errno = error;
    return false;
}

/* Starts gnuplot in `folder`, reading its script from the returned pipe; -1 with errno set if it cannot start. */
static int start_gnuplot(const char *folder, pid_t *child)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return -1;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
    posix_spawn_file_actions_addchdir_np(&actions, folder);
    char *arguments[] = {"gnuplot", NULL};
    const int error = posix_spawnp(child, arguments[0], &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    if (error == 0)
        return ends[1];
    close(ends[1]);
    errno = error;
    return -1;
}

/* Hands the script over and waits; a gnuplot that dies early must not take this process with it. */
static bool run_script(int pipe_end, pid_t child)
{
    const struct sigaction ignore = {.sa_handler = SIG_IGN};
    struct sigaction before;
    sigaction(SIGPIPE, &ignore, &before);
    const bool sent = write(pipe_end, SCRIPT, strlen(SCRIPT)) == (ssize_t)strlen(SCRIPT);
    close(pipe_end);
    sigaction(SIGPIPE, &before, NULL);
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return false;
    return sent && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

plot_result plot_write_svg(const char *folder)
{
    char path[MAX_PATH_LENGTH], unfinished[MAX_PATH_LENGTH];
    if (!join(path, folder, "loss.svg") || !join(unfinished, folder, "loss.svg.tmp"))
        return PLOT_FAILED;
    pid_t child;
    const int pipe_end = start_gnuplot(folder, &child);
    if (pipe_end < 0)
        return errno == ENOENT ? PLOT_NO_GNUPLOT : PLOT_FAILED;
    if (run_script(pipe_end, child) && rename(unfinished, path) == 0)
        return PLOT_DONE;
    unlink(unfinished);
    return PLOT_FAILED;
}
