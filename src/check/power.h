/* SPDX-License-Identifier: Apache-2.0
 * power.h: clock and energy of a GPU while it works, by NVML, which is opened at run time (libnvidia-ml.so.1 comes with the
 * driver). Declarations are ours: the program is built without NVML's header. */
#ifndef COT_CHECK_POWER_H
#define COT_CHECK_POWER_H

#include <stdbool.h>

/* Watches one GPU from a thread of its own. */
typedef struct power_watch power_watch;

/* What a GPU did over a stretch of time: means. */
typedef struct power_use {
    double sm_mhz, watts;
} power_use;

/* Starts to watch the GPU with this PCI bus identity ("0000:3b:00.0"). NULL: there is no NVML, or it does not know the GPU. */
power_watch *power_watch_begin(const char *pci_bus_id);

/* Ends the watch and frees it. Writes the means over [from, to], moments of now() (ceiling.h); false without enough readings. */
bool power_watch_end(power_watch *watch, double from, double to, power_use *use);

#endif
