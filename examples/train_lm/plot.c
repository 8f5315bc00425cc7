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

/* gnuplot runs in the output folder, so that no path has to be quoted. */
static const char SCRIPT[] = "set terminal svg size 900,540 font 'sans,14' background rgb 'white'\n"
                             "set datafile separator ','\n"
                             "set title 'Language model: loss'\n"
                             "set xlabel 'step'\n"
                             "set ylabel 'nats per token'\n"
                             "set xrange [0:*]\n"
                             "set grid\n"
                             "set key top right\n"
                             "plot 'loss.csv' using 1:2 every ::1 with lines lc rgb '#9ecae1' title 'train', \\\n"
                             "%s"
                             "     'loss.csv' using 1:3 every ::1 with linespoints pt 7 ps 0.5 lw 2 lc rgb '#d62728' "
                             "title 'validation'\n";
static const char BIGRAM_LINE[] = "     'loss.csv' using 1:4 every ::1 with lines dt 2 lw 2 lc rgb '#555555' "
                                  "title 'bigram, on validation text', \\\n";

static bool join_path(char *path, const char *folder, const char *name, io_error *error)
{
    return snprintf(path, MAX_PATH_LENGTH, "%s/%s", folder, name) < MAX_PATH_LENGTH ||
           io_fail(error, folder, "the name is too long");
}

static bool write_points(io_writer *writer, const loss_curve *curve, io_error *error)
{
    bool good = io_print(writer, error, "step,train,validation,bigram\n");
    for (int64_t i = 0; good && i < curve->count; i++) {
        const curve_point *p = &curve->points[i];
        char train[32] = "", validation[32] = "", bigram[32] = "";
        if (!isnan(p->train))
            snprintf(train, sizeof train, "%.9g", p->train);
        if (!isnan(p->validation))
            snprintf(validation, sizeof validation, "%.9g", p->validation);
        if (!isnan(curve->bigram))
            snprintf(bigram, sizeof bigram, "%.9g", curve->bigram);
        good = io_print(writer, error, "%lld,%s,%s,%s\n", (long long)p->step, train, validation, bigram);
    }
    return good;
}

bool plot_write_csv(const loss_curve *curve, const char *folder, io_error *error)
{
    char path[MAX_PATH_LENGTH];
    io_writer writer;
    if (!join_path(path, folder, "loss.csv", error) || !io_open(&writer, path, error))
        return false;
    const bool good = write_points(&writer, curve, error) && io_publish(&writer, 1, error);
    io_abandon(&writer);
    return good;
}

/* Starts gnuplot in `folder`. It writes to the descriptor `to` and reads its script from the returned pipe. Returns -1
 * and sets errno if gnuplot cannot start. */
static int start_gnuplot(const char *folder, int to, pid_t *child)
{
    int pipe_ends[2];
    if (pipe2(pipe_ends, O_CLOEXEC) != 0)
        return -1;
    posix_spawn_file_actions_t actions;
    char *arguments[] = {"gnuplot", NULL};
    int error = posix_spawn_file_actions_init(&actions);
    if (error == 0) {
        error = posix_spawn_file_actions_adddup2(&actions, pipe_ends[0], STDIN_FILENO);
        if (error == 0)
            error = posix_spawn_file_actions_adddup2(&actions, to, STDOUT_FILENO);
        if (error == 0)
            error = posix_spawn_file_actions_addchdir_np(&actions, folder);
        if (error == 0)
            error = posix_spawnp(child, arguments[0], &actions, NULL, arguments, environ);
        posix_spawn_file_actions_destroy(&actions);
    }
    close(pipe_ends[0]);
    if (error == 0)
        return pipe_ends[1];
    close(pipe_ends[1]);
    errno = error;
    return -1;
}

/* Sends the script and waits for gnuplot. SIGPIPE is ignored, because gnuplot may exit before it reads the script. */
static bool run_script(int pipe_end, pid_t child, bool bigram)
{
    char script[sizeof SCRIPT + sizeof BIGRAM_LINE];
    const int length = snprintf(script, sizeof script, SCRIPT, bigram ? BIGRAM_LINE : "");
    const struct sigaction ignore = {.sa_handler = SIG_IGN};
    struct sigaction before;
    sigaction(SIGPIPE, &ignore, &before);
    const bool sent = write(pipe_end, script, (size_t)length) == length;
    close(pipe_end);
    sigaction(SIGPIPE, &before, NULL);
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return false;
    return sent && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static plot_result draw_svg(io_writer *writer, const char *folder, bool bigram, io_error *error)
{
    pid_t child;
    const int pipe_end = start_gnuplot(folder, writer->fd, &child);
    if (pipe_end < 0 && errno == ENOENT)
        return PLOT_NO_GNUPLOT;
    if (pipe_end < 0)
        io_fail(error, writer->path, "gnuplot cannot be started: %s", strerror(errno));
    else if (!run_script(pipe_end, child, bigram))
        io_fail(error, writer->path, "gnuplot could not draw it");
    else if (io_publish(writer, 1, error))
        return PLOT_DONE;
    return PLOT_FAILED;
}

plot_result plot_write_svg(const loss_curve *curve, const char *folder, io_error *error)
{
    char path[MAX_PATH_LENGTH];
    io_writer writer;
    if (!join_path(path, folder, "loss.svg", error) || !io_open(&writer, path, error))
        return PLOT_FAILED;
    const plot_result result = draw_svg(&writer, folder, !isnan(curve->bigram), error);
    io_abandon(&writer);
    return result;
}
