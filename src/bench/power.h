/* SPDX-License-Identifier: Apache-2.0
 * power.h: measures the clock and the energy of a GPU while it works. It uses NVML, which comes with the driver and is
 * opened at run time (libnvidia-ml.so.1). The NVML declarations are our own: the program builds without NVML's header.
 */
#ifndef COT_BENCH_POWER_H
#define COT_BENCH_POWER_H

#include <stdbool.h>

/* Reads one GPU's clock and energy counter in its own thread. */
typedef struct power_watch power_watch;

/* Averages over a time interval. */
typedef struct power_average {
    double sm_mhz, watts;
} power_average;

/* Starts to watch the GPU with this PCI bus identity ("0000:3b:00.0"). Returns NULL if there is no NVML, or if NVML
 * does not find the GPU. */
power_watch *power_watch_begin(const char *pci_bus_id);

/* Ends the watch and frees it. Writes the averages over [from, to], two times from now() (ceiling.h). Returns false if
 * there are too few readings. */
bool power_watch_end(power_watch *watch, double from, double to, power_average *average);

#endif
