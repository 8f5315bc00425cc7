/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include "branches.h"
#include "core/status.h"

#include <dlfcn.h>

#define STRING(name) #name
#define EXPANDED_STRING(name) STRING(name)

/* ISO C does not convert object pointers to function pointers. POSIX guarantees that both have the same
 * representation. */
static int find_function(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

void cot_cuda_driver_close(cot_cuda_driver *driver)
{
    if (driver->library != NULL)
        dlclose(driver->library);
    driver->library = NULL;
}

static cot_status find_functions(const char *call, cot_cuda_driver *driver)
{
    const int oldest = cot_cuda_oldest_driver(CUDA_VERSION);
    int version = 0;
    if (find_function(driver->library, "cuDriverGetVersion", &driver->cuDriverGetVersion))
        driver->cuDriverGetVersion(&version);
    if (version < oldest)
        return cot_fail(COT_NO_DEVICE,
                        "%s: the CUDA driver is too old: it supports CUDA %d.%d%s, this build's GPU code needs CUDA "
                        "%d.0%s or later",
                        call, version / 1000, version % 1000 / 10, cot_cuda_branch(version), oldest / 1000,
                        cot_cuda_branch(oldest));
#define FIND(function)                                                                                               \
    if (!find_function(driver->library, EXPANDED_STRING(function), &driver->function))                               \
        return cot_fail(COT_NO_DEVICE, "%s: the CUDA driver (CUDA %d.%d) lacks %s: update it", call, version / 1000, \
                        version % 1000 / 10, EXPANDED_STRING(function));
    COT_CUDA_FUNCTIONS(FIND)
#undef FIND
    return COT_OK;
}

cot_status cot_cuda_driver_open(const char *call, cot_cuda_driver *driver)
{
    *driver = (cot_cuda_driver){.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (driver->library == NULL)
        return cot_fail(COT_NO_DEVICE, "%s: no CUDA driver: %s", call, dlerror());
    cot_status status = find_functions(call, driver);
    if (status == COT_OK) {
        const CUresult result = driver->cuInit(0);
        const char *name = "unknown error";
        if (result != CUDA_SUCCESS)
            driver->cuGetErrorName(result, &name);
        if (result == CUDA_ERROR_NO_DEVICE)
            status = cot_fail(COT_NO_DEVICE, "%s: the CUDA driver finds no device", call);
        else if (result != CUDA_SUCCESS)
            status = cot_fail(COT_NO_DEVICE, "%s: the CUDA driver does not start: %s", call, name);
    }
    if (status != COT_OK)
        cot_cuda_driver_close(driver);
    return status;
}

cot_status cot_cuda_fail(const cot_cuda_driver *driver, CUresult result, const char *what)
{
    const char *name = "unknown error", *description = "";
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &description);
    return cot_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? COT_OUT_OF_MEMORY : COT_DEVICE_ERROR, "%s: %s: %s", what, name,
                    description);
}
