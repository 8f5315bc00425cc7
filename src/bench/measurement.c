/* SPDX-License-Identifier: Apache-2.0 */
#include "measurement.h"

#include "core/tensor.h"

double median(double *samples, int count)
{
    for (int i = 1; i < count; i++)
        for (int j = i; j > 0 && samples[j] < samples[j - 1]; j--) {
            const double smaller = samples[j];
            samples[j] = samples[j - 1];
            samples[j - 1] = smaller;
        }
    return samples[count / 2];
}

double compulsory_bytes(const cot_direction *direction, const void *args)
{
    double bytes = 0;
    for (int f = 0; f < direction->field_count; f++) {
        const cot_tensor *tensor = cot_field_tensor(&direction->fields[f], (void *)args);
        if (!cot_is_present(tensor))
            continue;
        const double once = (double)cot_elements(tensor) * (double)cot_dtype_size(tensor->dtype);
        bytes += direction->fields[f].role == COT_INPUT_OUTPUT ? 2 * once : once;
    }
    return bytes;
}

bool case_is_product_bound(const cot_case *c, const cot_direction *direction)
{
    return c->flops > PRODUCTS_BOUND * compulsory_bytes(direction, c->args);
}
