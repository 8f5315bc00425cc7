/* SPDX-License-Identifier: Apache-2.0
 *
 * doctor.c: `cotangent doctor` prints what works on this machine, and how to correct the rest. Every line begins with
 *   [ok] it works     [--] it is missing, but nothing requires it     [!!] a problem: exit status 1 */
#include "bench/bench.h"
#include "commands.h"
#include "core/cpu_features.h"
#include "core/queue.h"
#include "cuda/branches.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <inttypes.h>
#include <jansson.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef enum finding { OK, ABSENT, WRONG } finding;

static int problem_count; /* number of findings WRONG */

__attribute__((format(printf, 3, 4))) static void report(finding what, const char *about, const char *format, ...)
{
    static const char *const marks[] = {"[ok]", "[--]", "[!!]"};
    va_list arguments;
    va_start(arguments, format);
    printf("%s %-13s ", marks[what], about);
    vprintf(format, arguments);
    putchar('\n');
    va_end(arguments);
    problem_count += what == WRONG;
}

/* Reads the first line of a file without its newline. Returns false if there is none. */
static bool first_line(const char *path, char *line, size_t size)
{
    FILE *file = fopen(path, "r");
    const bool good = file != NULL && fgets(line, (int)size, file) != NULL;
    if (file != NULL)
        fclose(file);
    if (good)
        line[strcspn(line, "\n")] = '\0';
    return good;
}

/* ---- the processor ------------------------------------------------------------------------------------ */

static void examine_processor(void)
{
    char device[256];
    device_name(device, sizeof device);
    report(OK, "processor", "%s", device);
    const uint32_t isa = cot_cpu_features();
    report(OK, cot_isa_name(COT_ISA_PORTABLE), "C for any processor, for every layout and dtype");
    for (uint32_t level = COT_ISA_AVX2; level <= COT_ISA_AVX512; level <<= 1) {
        if (isa & level)
            report(OK, cot_isa_name(level), "this processor and its operating system have it");
        else
            report(ABSENT, cot_isa_name(level),
                   "missing: calls use slower kernels; a newer x86-64, or a virtual "
                   "machine that passes its host's through, has it");
    }
}

/* Examines COT_KERNEL for this op. */
static void examine_forced_kernel(const cot_op *op, const cot_queue *queue)
{
    size_t length = 0;
    const char *name = cot_queue_forced_kernel(queue, op->name, &length);
    for (int k = 0; name != NULL && k < op->kernel_count; k++) {
        if (strlen(op->kernels[k].name) == length && strncmp(op->kernels[k].name, name, length) == 0) {
            report(ABSENT, "COT_KERNEL", "forces %s wherever it can run: unset it unless that is intended",
                   op->kernels[k].name);
            return;
        }
    }
    if (name != NULL)
        report(WRONG, "COT_KERNEL", "names %.*s, which is no kernel of %s: its calls fail until it is unset",
               (int)length, name, op->name);
}

static void examine_kernels(const cot_queue *queue)
{
    const uint32_t isa = cot_cpu_features();
    for (int i = 0; i < cot_op_count; i++) {
        const cot_op *op = cot_ops[i];
        int supported_count = 0, total = 0;
        for (int k = 0; k < op->kernel_count; k++) {
            if (op->kernels[k].backend != COT_BACKEND_CPU)
                continue;
            total++;
            supported_count += (op->kernels[k].isa & ~isa) == 0;
        }
        report(supported_count > 0 ? OK : WRONG, op->name, "%d of %d CPU kernels run here%s", supported_count, total,
               supported_count < total ? "; the others require a missing instruction set" : "");
        if (queue != NULL)
            examine_forced_kernel(op, queue);
    }
}

/* ---- threads, memory, caches -------------------------------------------------------------------------- */

static void examine_threads(const cot_queue *queue)
{
    char line[128];
    cpu_set_t affinity;
    const int threads = cot_queue_threads(queue);
    const int processors = sched_getaffinity(0, sizeof affinity, &affinity) == 0 ? CPU_COUNT(&affinity) : threads;
    if (threads > processors)
        report(WRONG, "threads", "%d on %d processors: they wait for each other; set OMP_NUM_THREADS=%d", threads,
               processors, processors);
    else if (threads < processors)
        report(ABSENT, "threads", "%d of %d processors (OMP_NUM_THREADS=%s): unset it to use all", threads, processors,
               getenv("OMP_NUM_THREADS") != NULL ? getenv("OMP_NUM_THREADS") : "");
    else
        report(OK, "threads", "%d, one a processor", threads);
    double quota, period;
    if (first_line("/sys/fs/cgroup/cpu.max", line, sizeof line) && sscanf(line, "%lf %lf", &quota, &period) == 2 &&
        quota < period * threads)
        report(ABSENT, "quota",
               "this container may use %.2g processors at a time: set OMP_NUM_THREADS=%d so that threads do not wait",
               quota / period, quota < period ? 1 : (int)(quota / period));
}

static void examine_memory(void)
{
    static const double GIB = 1024.0 * 1024.0 * 1024.0;
    enum { LOW_GIB = 1 }; /* in GiB: about the memory that building and testing need */
    char line[256];
    long long total = 0, available = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "MemTotal: %lld", &total);
        sscanf(line, "MemAvailable: %lld", &available);
    }
    if (file != NULL)
        fclose(file);
    double free_bytes = (double)available * 1024;
    long long limit;
    if (first_line("/sys/fs/cgroup/memory.max", line, sizeof line) && sscanf(line, "%lld", &limit) == 1 &&
        (double)limit < free_bytes)
        free_bytes = (double)limit;
    report(free_bytes < LOW_GIB * GIB ? ABSENT : OK, "memory", "%.1f GiB, %.1f GiB available%s",
           (double)total * 1024 / GIB, free_bytes / GIB,
           free_bytes < LOW_GIB * GIB ? ": close other programs, or run smaller shapes" : "");
}

static void examine_caches(void)
{
    const long l1 = sysconf(_SC_LEVEL1_DCACHE_SIZE), l2 = sysconf(_SC_LEVEL2_CACHE_SIZE),
               l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (l1 > 0)
        report(OK, "caches", "L1d %ld KiB, L2 %ld KiB, L3 %ld KiB", l1 >> 10, l2 >> 10, l3 >> 10);
    else
        report(ABSENT, "caches", "the system does not report their sizes; nothing requires them");
}

/* ---- programs and libraries --------------------------------------------------------------------------- */

/* Returns the path of a program, or NULL if it is not in PATH. */
static const char *find_program(const char *name)
{
    static char path[4096];
    const char *folders = getenv("PATH") != NULL ? getenv("PATH") : "/usr/bin:/bin";
    while (*folders != '\0') {
        const int length = (int)strcspn(folders, ":");
        snprintf(path, sizeof path, "%.*s/%s", length, folders, name);
        if (access(path, X_OK) == 0)
            return path;
        folders += length + (folders[length] == ':');
    }
    return NULL;
}

static void examine_software(void)
{
    report(OK, "libraries", "libc %s, libgomp; jansson %s for this program's files", gnu_get_libc_version(),
           jansson_version_str());
    if (find_program("gnuplot") != NULL)
        report(OK, "gnuplot", "bench --plot and the example's loss curve draw with it");
    else
        report(ABSENT, "gnuplot", "bench --plot and the example's loss curve require it: install gnuplot-nox");
}

/* ---- the GPU ------------------------------------------------------------------------------------------ */

/* Functions of the driver, declared as in cuda.h. */
typedef struct driver {
    int (*init)(unsigned flags);
    int (*version)(int *version);
    int (*count)(int *count);
    int (*name)(char *name, int length, int device);
    int (*attribute)(int *value, int attribute, int device);
} driver;

static bool load_driver(void *library, driver *d)
{
    *(void **)&d->init = dlsym(library, "cuInit");
    *(void **)&d->version = dlsym(library, "cuDriverGetVersion");
    *(void **)&d->count = dlsym(library, "cuDeviceGetCount");
    *(void **)&d->name = dlsym(library, "cuDeviceGetName");
    *(void **)&d->attribute = dlsym(library, "cuDeviceGetAttribute");
    return d->init != NULL && d->version != NULL && d->count != NULL && d->name != NULL && d->attribute != NULL;
}

#if defined(COT_CUDA_VERSION)
/* 1000 * major + 10 * minor of the toolkit. */
enum { BUILD_CUDA_VERSION = COT_CUDA_VERSION };
static const char other_gpus[] = COT_GPUS;

static void examine_gpu_code(void)
{
    report(OK, "gpu code",
           "machine code for sm_90a%s%s, PTX of compute_80 for other GPUs from compute capability 8.0 on",
           other_gpus[0] != '\0' ? " and sm_" : "", other_gpus);
    const int oldest = cot_cuda_oldest_driver(BUILD_CUDA_VERSION);
    report(
        OK, "gpu code",
        "built by CUDA %d.%d: machine code requires the driver of CUDA %d.0%s or a newer one, PTX that of CUDA %d.%d%s",
        BUILD_CUDA_VERSION / 1000, BUILD_CUDA_VERSION % 1000 / 10, oldest / 1000, cot_cuda_branch(oldest),
        BUILD_CUDA_VERSION / 1000, BUILD_CUDA_VERSION % 1000 / 10, cot_cuda_branch(BUILD_CUDA_VERSION));
}
#else
enum { BUILD_CUDA_VERSION = 0 };
static const char other_gpus[] = "";

static void examine_gpu_code(void)
{
    report(ABSENT, "gpu code", "none in this build, which is for the CPU alone (no nvcc was found, or COT_CUDA=OFF)");
}
#endif

/* Writes the version of the loaded kernel module, such as "R580.65.06, ", or "" if it is unknown. */
static void find_module_version(char *text, size_t size)
{
    char line[256], version[32];
    text[0] = '\0';
    if (!first_line("/proc/driver/nvidia/version", line, sizeof line))
        return;
    for (const char *word = line; *word != '\0'; word += strcspn(word, " "), word += strspn(word, " "))
        if (sscanf(word, "%31[0-9.]", version) == 1 && strchr(version, '.') != NULL) {
            snprintf(text, size, "R%s, ", version);
            return;
        }
}

/* Returns what a device of this compute capability gets of the GPU code. */
static const char *code_of(int capability)
{
    char number[16];
    snprintf(number, sizeof number, "%d", capability);
    if (BUILD_CUDA_VERSION == 0)
        return "none in this build";
    if (capability < 80)
        return "none, the kernels support 8.0 and later";
    if (capability == 90)
        return "machine code, with the kernels for Hopper";
    if (strstr(other_gpus, number) != NULL)
        return "machine code of the kernels for every GPU";
    return "PTX of the kernels for every GPU, which the driver compiles at the first use";
}

static void examine_devices(const driver *d)
{
    enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
    int count = 0, version = 0, major = 0, minor = 0;
    const int status = d->init(0);
    if (status != 0 || d->version(&version) != 0 || d->count(&count) != 0) {
        report(ABSENT, "gpu driver",
               "libcuda.so.1 is there but cuInit fails with %d: no device, or the kernel module is not "
               "loaded (nvidia-smi says more)",
               status);
        return;
    }
    char module[48];
    find_module_version(module, sizeof module);
    const int oldest = cot_cuda_oldest_driver(BUILD_CUDA_VERSION);
    if (BUILD_CUDA_VERSION > 0 && version < oldest)
        report(WRONG, "gpu driver",
               "%sCUDA %d.%d is too old for this build's GPU code: install the driver of CUDA %d.%d%s or a newer one",
               module, version / 1000, version % 1000 / 10, oldest / 1000, oldest % 1000 / 10, cot_cuda_branch(oldest));
    else
        report(OK, "gpu driver", "%sCUDA %d.%d, %d devices", module, version / 1000, version % 1000 / 10, count);
    for (int i = 0; i < count; i++) {
        char name[128] = "?";
        d->name(name, sizeof name, i);
        d->attribute(&major, CAPABILITY_MAJOR, i);
        d->attribute(&minor, CAPABILITY_MINOR, i);
        report(major < 8 ? ABSENT : OK, "gpu", "%d: %s, compute capability %d.%d: %s", i, name, major, minor,
               code_of(10 * major + minor));
    }
}

static void examine_hip(void)
{
#if defined(COT_HIP)
    report(OK, "hip code",
           "code objects for gfx90a and gfx942, which no AMD GPU has run: they are tested in an emulator");
#else
    report(ABSENT, "hip code",
           "none in this build (no clang-19, clang-tools-19 and lld-19 were found, or COT_HIP=OFF)");
#endif
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_HIP;
    cot_queue *queue = NULL;
    if (cot_queue_create(&options, &queue) == COT_OK)
        report(OK, "hip queues", "available");
    else
        report(ABSENT, "hip queues", "%s", cot_error_message());
    cot_queue_destroy(queue);
}

static void examine_gpu(void)
{
    driver d;
    examine_gpu_code();
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        report(ABSENT, "gpu driver", "no libcuda.so.1: with an NVIDIA GPU in this machine, install its driver");
    else if (!load_driver(library, &d))
        report(ABSENT, "gpu driver", "libcuda.so.1 lacks functions that this program needs: install a newer driver");
    else
        examine_devices(&d);
    cot_queue_options options;
    COT_INIT(&options);
    options.backend = COT_BACKEND_CUDA;
    cot_queue *queue = NULL;
    if (cot_queue_create(&options, &queue) == COT_OK)
        report(OK, "cuda queues", "available");
    else
        report(ABSENT, "cuda queues", "%s: use --backend cpu", cot_error_message());
    cot_queue_destroy(queue);
    examine_hip();
    const char *nvcc = find_program("nvcc");
    if (nvcc == NULL && access("/usr/local/cuda/bin/nvcc", X_OK) == 0)
        nvcc = "/usr/local/cuda/bin/nvcc";
    if (nvcc != NULL)
        report(OK, "nvcc", "%s: a build can have GPU kernels", nvcc);
    else
        report(ABSENT, "nvcc", "missing: a build here is for the CPU alone; install the CUDA toolkit 13");
}

/* ---- all of it ---------------------------------------------------------------------------------------- */

static error_t parse_nothing(int key, char *argument, struct argp_state *state)
{
    if (key == ARGP_KEY_ARG)
        argp_error(state, "unexpected argument '%s'", argument);
    return ARGP_ERR_UNKNOWN;
}

int command_doctor(int argc, char **argv)
{
    static const struct argp parser = {
        0,
        parse_nothing,
        "",
        "What works on this machine, and how to correct the rest.\v"
        "[ok] works, [--] is missing but not required, [!!] stands in the way: the exit status is 1.\n"
        "`cotangent check` proves the kernels themselves.",
        0,
        0,
        0};
    parse_arguments(&parser, argc, argv, NULL);
    printf("cotangent %s\n", cot_version());
    cot_queue *queue = NULL;
    if (cot_queue_create(NULL, &queue) != COT_OK)
        report(WRONG, "cpu queues", "%s", cot_error_message());
    examine_processor();
    examine_kernels(queue);
    if (queue != NULL)
        examine_threads(queue);
    examine_memory();
    examine_caches();
    examine_software();
    examine_gpu();
    cot_queue_destroy(queue);
    if (problem_count == 0)
        printf("nothing stands in the way\n");
    else
        printf("%d things stand in the way\n", problem_count);
    return problem_count > 0;
}
