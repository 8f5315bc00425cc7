/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include "core/status.h"

#include <dlfcn.h>
#include <stdio.h>

/* The file without a number comes with the development package of ROCm, the others with the runtime alone. */
static const char *const library_names[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"};

/* ISO C does not convert object pointers to function pointers. POSIX guarantees that both have the same
 * representation. */
static int find_function(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

void cot_hip_driver_close(cot_hip_driver *driver)
{
    if (driver->library != NULL)
        dlclose(driver->library);
    driver->library = NULL;
}

static cot_status find_functions(const char *call, cot_hip_driver *driver)
{
    int version = 0;
    if (find_function(driver->library, "hipRuntimeGetVersion", &driver->hipRuntimeGetVersion))
        driver->hipRuntimeGetVersion(&version);
    if (version < COT_HIP_OLDEST_VERSION)
        return cot_fail(COT_NO_DEVICE, "%s: the HIP runtime is too old: it is version %d.%d, 6.0 or later is needed",
                        call, version / 10000000, version / 100000 % 100);
#define FIND(function, parameters)                                                                      \
    if (!find_function(driver->library, #function, &driver->function))                                  \
        return cot_fail(COT_NO_DEVICE, "%s: the HIP runtime (version %d.%d) lacks %s: update it", call, \
                        version / 10000000, version / 100000 % 100, #function);
    COT_HIP_FUNCTIONS(FIND)
    FIND(hipGetErrorName, ())
    FIND(hipGetErrorString, ())
#undef FIND
    return COT_OK;
}

cot_status cot_hip_driver_open(const char *call, cot_hip_driver *driver)
{
    *driver = (cot_hip_driver){0};
    char reason[200] = ""; /* of the first name */
    for (size_t i = 0; i < sizeof library_names / sizeof *library_names && driver->library == NULL; i++) {
        driver->library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL);
        if (driver->library == NULL && i == 0)
            snprintf(reason, sizeof reason, "%s", dlerror());
    }
    if (driver->library == NULL)
        return cot_fail(COT_NO_DEVICE, "%s: no HIP runtime of ROCm 6.0 or later: %s", call, reason);
    cot_status status = find_functions(call, driver);
    if (status == COT_OK) {
        const int error = driver->hipInit(0);
        if (error == COT_HIP_NO_DEVICE)
            status = cot_fail(COT_NO_DEVICE, "%s: the HIP runtime finds no device", call);
        else if (error != COT_HIP_SUCCESS)
            status =
                cot_fail(COT_NO_DEVICE, "%s: the HIP runtime does not start: %s", call, driver->hipGetErrorName(error));
    }
    if (status != COT_OK)
        cot_hip_driver_close(driver);
    return status;
}

cot_status cot_hip_fail(const cot_hip_driver *driver, int error, const char *what)
{
    return cot_fail(error == COT_HIP_OUT_OF_MEMORY ? COT_OUT_OF_MEMORY : COT_DEVICE_ERROR, "%s: %s: %s", what,
                    driver->hipGetErrorName(error), driver->hipGetErrorString(error));
}
