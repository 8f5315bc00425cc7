/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"

#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

enum { PARTS = 3, CURVES = 2, NAME_SIZE = PARAMETER_NAME_SIZE + 16 };

static const char FORMAT[] = "train_lm checkpoint 1";
static const char *const PART_NAMES[PARTS] = {"", ".moment1", ".moment2"};
static const char *const CURVE_NAMES[CURVES] = {"curve.train", "curve.validation"};

/* ---- identity of a run -------------------------------------------------------------------------------- */

/* The options that the losses depend on. Threads, outputs and the sample are not in the list. */
static const struct {
    const char *name;
    size_t offset;
    bool is_real;
    const char *absent; /* newer options: with this value they are not written */
    bool is_text;
} OPTIONS[] = {
    {"--steps", offsetof(options, steps), false, NULL, false},
    {"--batch", offsetof(options, batch), false, NULL, false},
    {"--context", offsetof(options, context), false, NULL, false},
    {"--width", offsetof(options, width), false, NULL, false},
    {"--inner", offsetof(options, inner), false, NULL, false},
    {"--layers", offsetof(options, layers), false, NULL, false},
    {"--kernel", offsetof(options, kernel), false, NULL, false},
    {"--mhc", offsetof(options, streams), false, NULL, false},
    {"--attention", offsetof(options, attention), false, NULL, false},
    {"--dense", offsetof(options, dense), false, NULL, false},
    {"--seed", offsetof(options, seed), false, NULL, false},
    {"--lr", offsetof(options, rate), true, NULL, false},
    {"--weight-decay", offsetof(options, weight_decay), true, NULL, false},
    {"--clip", offsetof(options, clip), true, NULL, false},
    {"--dropout", offsetof(options, dropout), true, NULL, false},
    {"--backend", offsetof(options, backend), false, "cpu", true},
    {"--dtype", offsetof(options, dtype), false, "f32", true},
    {"--accumulate", offsetof(options, accumulate), false, "1", false},
    {"--vocabulary", offsetof(options, vocabulary), false, "256", false},
    {"--mlp", offsetof(options, mlp), false, "0", false},
    {"--heads", offsetof(options, heads), false, "0", false},
    {"--kv-heads", offsetof(options, kv_heads), false, "0", false},
    {"--arch gpt2", offsetof(options, gpt2), false, "0", false},
};

void run_identity_make(run_identity *identity, const options *o, const corpus *text)
{
    int count = 0;
    memset(identity, 0, sizeof *identity);
    snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%s", FORMAT);
    identity->pairs[2 * count++] = "format";
    for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++) {
        const void *member = (const char *)o + OPTIONS[i].offset;
        if (OPTIONS[i].is_text)
            snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%s", *(const char *const *)member);
        else if (OPTIONS[i].is_real)
            snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%.17g", *(const double *)member);
        else
            snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%lld", (long long)*(const int64_t *)member);
        identity->defaults[count] = OPTIONS[i].absent;
        identity->pairs[2 * count++] = OPTIONS[i].name;
    }
    snprintf(identity->texts[count], CHECKPOINT_TEXT_SIZE, "%016llx", (unsigned long long)corpus_hash(text));
    identity->pairs[2 * count++] = "text";
    for (int i = 0; i < count; i++)
        identity->pairs[2 * i + 1] = identity->texts[i];
}

static bool check_identity(const safetensors_file *file, const char *path, const run_identity *identity,
                           io_error *error)
{
    for (const char *const *pair = identity->pairs; pair[0] != NULL; pair += 2) {
        const char *stored = safetensors_metadata(file, pair[0]);
        if (stored == NULL)
            stored = identity->defaults[(pair - identity->pairs) / 2];
        if (stored != NULL && strcmp(stored, pair[1]) == 0)
            continue;
        if (pair == identity->pairs || stored == NULL)
            return io_fail(error, path, "is no checkpoint of this program");
        if (pair[0][0] != '-')
            return io_fail(error, path, "was trained on another text");
        return io_fail(error, path, "was trained with %s %.40s, not %s", pair[0], stored, pair[1]);
    }
    return true;
}

/* ---- tensors ------------------------------------------------------------------------------------------ */

static real *part_data(const parameter *p, int part)
{
    return part == 0 ? p->value : part == 1 ? p->moment1 : p->moment2;
}

static cot_tensor part_tensor(const parameter *p, int part)
{
    return cot_tensor_contiguous(part_data(p, part), REAL_DTYPE, p->rank, p->shape);
}

static double *curve_value(const loss_curve *curve, int64_t step, int index)
{
    return index == 0 ? &curve->points[step].train : &curve->points[step].validation;
}

bool checkpoint_write(const char *path, const run_identity *identity, const parameter_table *table,
                      const loss_curve *curve, io_error *error)
{
    const int count = PARTS * table->count + CURVES;
    const char *pairs[2 * CHECKPOINT_TEXTS + 1];
    int texts = 0;
    for (int i = 0; identity->pairs[2 * i] != NULL; i++)
        if (identity->defaults[i] == NULL || strcmp(identity->defaults[i], identity->texts[i]) != 0) {
            pairs[texts++] = identity->pairs[2 * i];
            pairs[texts++] = identity->texts[i];
        }
    pairs[texts] = NULL;
    safetensors_item *items = calloc((size_t)count, sizeof *items);
    char(*names)[NAME_SIZE] = calloc((size_t)count, sizeof *names);
    double *losses = calloc((size_t)(CURVES * curve->count) + 1, sizeof *losses);
    bool good = items != NULL && names != NULL && losses != NULL;
    if (!good)
        io_fail(error, path, "no memory to write it");
    for (int i = 0; good && i < PARTS * table->count; i++) {
        const parameter *p = &table->items[i / PARTS];
        snprintf(names[i], NAME_SIZE, "%s%s", p->name, PART_NAMES[i % PARTS]);
        items[i] = (safetensors_item){names[i], part_tensor(p, i % PARTS)};
    }
    for (int index = 0; good && index < CURVES; index++) {
        double *column = losses + index * curve->count;
        for (int64_t step = 0; step < curve->count; step++)
            column[step] = *curve_value(curve, step, index);
        items[PARTS * table->count + index] =
            (safetensors_item){CURVE_NAMES[index], cot_tensor_contiguous(column, COT_F64, 1, &curve->count)};
    }
    good = good && safetensors_write(path, items, count, pairs, error);
    free(items);
    free(names);
    free(losses);
    return good;
}

/* Returns a view of a required tensor, and checks that it has the dtype and shape of `expected`. */
static bool get_tensor(safetensors_file *file, const char *path, const char *name, const cot_tensor *expected,
                       cot_tensor *view, io_error *error)
{
    if (!safetensors_get_named(file, name, view, error))
        return false;
    if (view->dtype == expected->dtype && view->rank == expected->rank &&
        memcmp(view->shape, expected->shape, (size_t)expected->rank * sizeof *expected->shape) == 0)
        return true;
    return io_fail(error, path, "tensor \"%s\" has another dtype or shape than the model's", name);
}

/* Checks all tensors of parameters and moments, and with `fill` copies their values. */
static bool read_parameters(safetensors_file *file, const char *path, const parameter_table *table, bool fill,
                            io_error *error)
{
    for (int i = 0; i < PARTS * table->count; i++) {
        const parameter *p = &table->items[i / PARTS];
        char name[NAME_SIZE];
        const cot_tensor expected = part_tensor(p, i % PARTS);
        cot_tensor view;
        snprintf(name, sizeof name, "%s%s", p->name, PART_NAMES[i % PARTS]);
        if (!get_tensor(file, path, name, &expected, &view, error))
            return false;
        if (fill)
            memcpy(part_data(p, i % PARTS), view.data, (size_t)p->count * sizeof(real));
    }
    return true;
}

static bool read_curve(safetensors_file *file, const char *path, int64_t steps, loss_curve *curve, io_error *error)
{
    cot_tensor views[CURVES];
    if (!safetensors_get_named(file, CURVE_NAMES[0], &views[0], error))
        return false;
    const cot_tensor expected = cot_tensor_contiguous(NULL, COT_F64, 1, &views[0].shape[0]);
    for (int index = 0; index < CURVES; index++)
        if (!get_tensor(file, path, CURVE_NAMES[index], &expected, &views[index], error))
            return false;
    if (expected.shape[0] > steps)
        return io_fail(error, path, "has more steps than --steps");
    curve->count = expected.shape[0];
    for (int64_t step = 0; step < curve->count; step++) {
        curve->points[step].step = step + 1;
        for (int index = 0; index < CURVES; index++)
            *curve_value(curve, step, index) = ((const double *)views[index].data)[step];
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
