/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"

#include "hash.h"

#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

enum { PARTS = 3, CURVES = 2, NAME_SIZE = PARAMETER_NAME_SIZE + 16 };

static const char FORMAT[] = "train_lm checkpoint 1";
static const char *const PART_NAMES[PARTS] = {"", ".moment1", ".moment2"};
static const char *const CURVE_NAMES[CURVES] = {"curve.train", "curve.validation"};

/* ---- which run it is ---------------------------------------------------------------------------------- */

/* Threads, outputs and the sample are not among them: the losses do not depend on those. */
static const struct {
    const char *name;
    size_t offset;
    bool is_real;
} OPTIONS[] = {
    {"--steps", offsetof(options, steps), false},
    {"--batch", offsetof(options, batch), false},
    {"--context", offsetof(options, context), false},
    {"--width", offsetof(options, width), false},
    {"--inner", offsetof(options, inner), false},
    {"--layers", offsetof(options, layers), false},
    {"--kernel", offsetof(options, kernel), false},
    {"--mhc", offsetof(options, streams), false},
    {"--attention", offsetof(options, attention), false},
    {"--dense", offsetof(options, dense), false},
    {"--seed", offsetof(options, seed), false},
    {"--lr", offsetof(options, rate), true},
    {"--weight-decay", offsetof(options, weight_decay), true},
    {"--clip", offsetof(options, clip), true},
    {"--dropout", offsetof(options, dropout), true},
};

void run_identity_make(run_identity *identity, const options *o, const corpus *text)
{
    int count = 0;
    memset(identity, 0, sizeof *identity);
    snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%s", FORMAT);
    identity->pairs[2 * count++] = "format";
    for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++) {
        const void *member = (const char *)o + OPTIONS[i].offset;
        if (OPTIONS[i].is_real)
            snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%.17g", *(const double *)member);
        else
            snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%lld", (long long)*(const int64_t *)member);
        identity->pairs[2 * count++] = OPTIONS[i].name;
    }
    uint64_t hash = hash_bytes(HASH_START, text->training.bytes, (size_t)text->training.count);
    hash = hash_bytes(hash, text->validation.bytes, (size_t)text->validation.count);
    snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%016llx", (unsigned long long)hash);
    identity->pairs[2 * count++] = "text";
    for (int i = 0; i < count; i++)
        identity->pairs[2 * i + 1] = identity->texts[i];
}

static bool check_identity(const safetensors_file *file, const char *path, const run_identity *identity,
                           io_error *error)
{
    for (const char *const *pair = identity->pairs; pair[0] != NULL; pair += 2) {
        const char *there = safetensors_metadata(file, pair[0]);
        if (there != NULL && strcmp(there, pair[1]) == 0)
            continue;
        if (pair == identity->pairs || there == NULL)
            return io_fail(error, path, "is no checkpoint of this program");
        if (pair[0][0] != '-')
            return io_fail(error, path, "was trained on another text");
        return io_fail(error, path, "was trained with %s %.40s, not %s", pair[0], there, pair[1]);
    }
    return true;
}

/* ---- its tensors -------------------------------------------------------------------------------------- */

static real *part_of(const parameter *p, int part)
{
    return part == 0 ? p->value : part == 1 ? p->moment1 : p->moment2;
}

static cot_tensor view_of(const parameter *p, int part)
{
    return cot_tensor_contiguous(part_of(p, part), REAL_DTYPE, p->rank, p->shape);
}

static double *curve_value(const loss_curve *curve, int64_t step, int which)
{
    return which == 0 ? &curve->points[step].train : &curve->points[step].validation;
}

bool checkpoint_write(const char *path, const run_identity *identity, const parameter_table *table,
                      const loss_curve *curve, io_error *error)
{
    const int count = PARTS * table->count + CURVES;
    safetensors_item *items = calloc((size_t)count, sizeof *items);
    char(*names)[NAME_SIZE] = calloc((size_t)count, sizeof *names);
    double *losses = calloc((size_t)(CURVES * curve->count) + 1, sizeof *losses);
    bool good = items != NULL && names != NULL && losses != NULL;
    if (!good)
        io_fail(error, path, "no memory to write it");
    for (int i = 0; good && i < PARTS * table->count; i++) {
        const parameter *p = &table->items[i / PARTS];
        snprintf(names[i], NAME_SIZE, "%s%s", p->name, PART_NAMES[i % PARTS]);
        items[i] = (safetensors_item){names[i], view_of(p, i % PARTS)};
    }
    for (int which = 0; good && which < CURVES; which++) {
        double *column = losses + which * curve->count;
        for (int64_t step = 0; step < curve->count; step++)
            column[step] = *curve_value(curve, step, which);
        items[PARTS * table->count + which] =
            (safetensors_item){CURVE_NAMES[which], cot_tensor_contiguous(column, COT_F64, 1, &curve->count)};
    }
    good = good && safetensors_write(path, items, count, identity->pairs, error);
    free(items);
    free(names);
    free(losses);
    return good;
}

/* A view of what must be there, with this dtype and shape. */
static bool get(safetensors_file *file, const char *path, const char *name, const cot_tensor *like, cot_tensor *view,
                io_error *error)
{
    if (!safetensors_get_named(file, name, view, error))
        return false;
    if (view->dtype == like->dtype && view->rank == like->rank &&
        memcmp(view->shape, like->shape, (size_t)like->rank * sizeof *like->shape) == 0)
        return true;
    return io_fail(error, path, "tensor \"%s\" has another dtype or shape than the model's", name);
}

/* Looks at every tensor, and with `fill` takes its values. */
static bool read_parameters(safetensors_file *file, const char *path, const parameter_table *table, bool fill,
                            io_error *error)
{
    for (int i = 0; i < PARTS * table->count; i++) {
        const parameter *p = &table->items[i / PARTS];
        char name[NAME_SIZE];
        const cot_tensor like = view_of(p, i % PARTS);
        cot_tensor view;
        snprintf(name, sizeof name, "%s%s", p->name, PART_NAMES[i % PARTS]);
        if (!get(file, path, name, &like, &view, error))
            return false;
        if (fill)
            memcpy(part_of(p, i % PARTS), view.data, (size_t)p->count * sizeof(real));
    }
    return true;
}

static bool read_curve(safetensors_file *file, const char *path, int64_t steps, loss_curve *curve, io_error *error)
{
    cot_tensor views[CURVES];
    if (!safetensors_get_named(file, CURVE_NAMES[0], &views[0], error))
        return false;
    const cot_tensor like = cot_tensor_contiguous(NULL, COT_F64, 1, &views[0].shape[0]);
    for (int which = 0; which < CURVES; which++)
        if (!get(file, path, CURVE_NAMES[which], &like, &views[which], error))
            return false;
    if (like.shape[0] > steps)
        return io_fail(error, path, "has more steps than --steps");
    curve->count = like.shape[0];
    for (int64_t step = 0; step < curve->count; step++) {
        curve->points[step].step = step + 1;
        for (int which = 0; which < CURVES; which++)
            *curve_value(curve, step, which) = ((const double *)views[which].data)[step];
    }
    return true;
}

bool checkpoint_read(const char *path, const run_identity *identity, const parameter_table *table, int64_t steps,
                     loss_curve *curve, io_error *error)
{
    safetensors_file file;
    if (!safetensors_open(&file, path, error))
        return false;
    const bool good = check_identity(&file, path, identity, error) &&
                      read_parameters(&file, path, table, false, error) &&
                      read_curve(&file, path, steps, curve, error) && read_parameters(&file, path, table, true, error);
    safetensors_close(&file);
    return good;
}
