/* SPDX-License-Identifier: Apache-2.0
 *
 * plot.h: writes the loss curve as loss.csv, and with gnuplot as loss.svg. A file is written as a whole or not at all
 * (src/io/file.h). */
#ifndef TRAIN_LM_PLOT_H
#define TRAIN_LM_PLOT_H

#include "io/file.h"

#include <stdint.h>

typedef struct curve_point {
    int64_t step;
    double train, validation; /* NAN: not measured at this step */
} curve_point;

typedef struct loss_curve {
    curve_point *points;
    int64_t count;
    double bigram;
} loss_curve;

typedef enum plot_result { PLOT_DONE, PLOT_NO_GNUPLOT, PLOT_FAILED } plot_result;

/* Writes folder/loss.csv: step,train,validation,bigram. */
bool plot_write_csv(const loss_curve *curve, const char *folder, io_error *error);

/* Draws folder/loss.svg from folder/loss.csv. */
plot_result plot_write_svg(const loss_curve *curve, const char *folder, io_error *error);

#endif
