/* SPDX-License-Identifier: Apache-2.0 */
#include "power.h"

#include "ceiling.h"
#include "storage.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Energy is a counter that moves every 20 to 100 ms (H100, H200); it is read more often, to see when it moves. */
static const long reading_nanoseconds = 5000000;
enum { MAX_READINGS = 1 << 14, NVML_CLOCK_SM = 1 };

typedef struct reading {
    double moment, joules, mhz;
} reading;

struct power_watch {
    void *library, *device;
    int (*shutdown)(void);
    int (*clock)(void *device, int type, unsigned *mhz);
    int (*energy)(void *device, unsigned long long *millijoules);
    pthread_t thread;
    atomic_bool ended;
    int count;
    reading readings[MAX_READINGS];
};

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises that the bytes are the same. */
static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static void *watch_device(void *memory)
{
    power_watch *w = memory;
    while (!atomic_load(&w->ended) && w->count < MAX_READINGS) {
        unsigned mhz = 0;
        unsigned long long millijoules = 0;
        if (w->clock(w->device, NVML_CLOCK_SM, &mhz) == 0 && w->energy(w->device, &millijoules) == 0)
            w->readings[w->count++] = (reading){now(), 1e-3 * (double)millijoules, mhz};
        nanosleep(&(struct timespec){0, reading_nanoseconds}, NULL);
    }
    return NULL;
}

static void close_library(power_watch *w)
{
    dlclose(w->library);
    free(w);
}

power_watch *power_watch_begin(const char *pci_bus_id)
{
    power_watch *w = allocate(1, sizeof *w);
    int (*start)(void) = NULL, (*find_device)(const char *, void **) = NULL;
    w->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (w->library == NULL) {
        free(w);
        return NULL;
    }
    if (!find(w->library, "nvmlInit_v2", &start) || !find(w->library, "nvmlShutdown", &w->shutdown) ||
        !find(w->library, "nvmlDeviceGetHandleByPciBusId_v2", &find_device) ||
        !find(w->library, "nvmlDeviceGetClockInfo", &w->clock) ||
        !find(w->library, "nvmlDeviceGetTotalEnergyConsumption", &w->energy) || start() != 0) {
        close_library(w);
        return NULL;
    }
    if (find_device(pci_bus_id, &w->device) != 0 || pthread_create(&w->thread, NULL, watch_device, w) != 0) {
        w->shutdown();
        close_library(w);
        return NULL;
    }
    return w;
}

/* Means over [from, to]. Of the energy, from one moment at which the counter moved to another. */
static bool mean_use(const power_watch *w, double from, double to, power_use *use)
{
    const reading *first = NULL, *last = NULL;
    double mhz = 0;
    int clocks = 0;
    for (int i = 1; i < w->count; i++) {
        const reading *r = &w->readings[i];
        if (r->moment < from || r->moment > to)
            continue;
        mhz += r->mhz;
        clocks++;
        if (r->joules == w->readings[i - 1].joules)
            continue;
        first = first == NULL ? r : first;
        last = r;
    }
    if (clocks == 0 || first == last)
        return false;
    *use = (power_use){mhz / clocks, (last->joules - first->joules) / (last->moment - first->moment)};
    return true;
}

bool power_watch_end(power_watch *watch, double from, double to, power_use *use)
{
    if (watch == NULL)
        return false;
    atomic_store(&watch->ended, true);
    pthread_join(watch->thread, NULL);
    const bool known = mean_use(watch, from, to, use);
    watch->shutdown();
    close_library(watch);
    return known;
}
