/* SPDX-License-Identifier: Apache-2.0
 *
 * none.c: the HIP backend of a build without clang-19, clang-tools-19 and lld-19. No HIP queue can be created. */
#include "core/device.h"
#include "core/status.h"

static cot_status fail_open(const cot_queue_options *options, cot_device **out, uint32_t *isa)
{
    (void)options, (void)out, (void)isa;
    return cot_fail(
        COT_NO_DEVICE,
        "cot_queue_create: this build has no HIP backend (no clang-19, clang-tools-19 and lld-19 were found, or COT_HIP=OFF)");
}

/* The other calls need a device. */
const cot_device_calls cot_hip_calls = {.open = fail_open};
