/* SPDX-License-Identifier: Apache-2.0 */
#include "power.h"

#include "ceiling.h"
#include "check/storage.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The energy counter changes every 20 to 100 ms (H100, H200). It is read more often to find the times of the
 * changes. */
static const long reading_nanoseconds = 5000000;
enum { MAX_READINGS = 1 << 14, NVML_CLOCK_SM = 1 };

typedef struct reading {
    double time, joules, mhz;
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

/* ISO C does not convert an object pointer to a function pointer. POSIX guarantees that both have the same bytes. */
static bool load_symbol(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
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
    int (*init)(void) = NULL, (*find_device)(const char *, void **) = NULL;
    w->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (w->library == NULL) {
        free(w);
        return NULL;
    }
    if (!load_symbol(w->library, "nvmlInit_v2", &init) || !load_symbol(w->library, "nvmlShutdown", &w->shutdown) ||
        !load_symbol(w->library, "nvmlDeviceGetHandleByPciBusId_v2", &find_device) ||
        !load_symbol(w->library, "nvmlDeviceGetClockInfo", &w->clock) ||
        !load_symbol(w->library, "nvmlDeviceGetTotalEnergyConsumption", &w->energy) || init() != 0) {
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

/* Computes the averages over [from, to]. The average power is taken from the first change of the energy counter in this
 * interval to the last. */
static bool compute_average(const power_watch *w, double from, double to, power_average *average)
{
    const reading *first = NULL, *last = NULL;
    double mhz = 0;
    int clock_count = 0;
    for (int i = 1; i < w->count; i++) {
        const reading *r = &w->readings[i];
        if (r->time < from || r->time > to)
            continue;
        mhz += r->mhz;
        clock_count++;
        if (r->joules == w->readings[i - 1].joules)
            continue;
        first = first == NULL ? r : first;
        last = r;
    }
    if (clock_count == 0 || first == last)
        return false;
    *average = (power_average){mhz / clock_count, (last->joules - first->joules) / (last->time - first->time)};
    return true;
}

bool power_watch_end(power_watch *watch, double from, double to, power_average *average)
{
    if (watch == NULL)
        return false;
    atomic_store(&watch->ended, true);
    pthread_join(watch->thread, NULL);
    const bool has_average = compute_average(watch, from, to, average);
    watch->shutdown();
    close_library(watch);
    return has_average;
}
