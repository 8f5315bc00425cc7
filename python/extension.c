/* SPDX-License-Identifier: Apache-2.0
 *
 * extension.c: the module cotangent._C, which calls the library from Python. One binary works with every Python from
 * 3.9 on (limited API). It works with every torch, because it reads tensors only through DLPack's C exchange API
 * (dlpack.h) or, in a torch without it, through their Python attributes and methods.
 *
 *   plan(call, fields) -> plan           call: the name of an argument struct without cot_ and _args; fields: its
 *                                        members in the order of the values of run_*, None for a value to skip
 *   run_cpu(plan, threads, *values)      a value is a tensor, a number, or None for an absent one
 *   run_cuda(plan, device, stream, allocate, *values)       allocate(device, bytes) -> a tensor, for the workspace
 *   check_cuda(device)                   cot_queue_check
 *   set_guards(types, forward_ad, is_grad_enabled, guards)  for route
 *   route(arguments, tensors) -> which kernel a call can run directly
 *   time_call(plan, device, repeats, *values) -> seconds of the calling thread per C call; device -1: the CPU
 *   make_group(transport, rank, size, timeout) -> a rank's handle for CPU tensors; transport: see below
 *   make_nccl_group(comm, device, timeout) -> a rank's handle for CUDA tensors; comm: the address of an ncclComm_t's target
 *   run_group(plan, group, place, cut, stripe, head_ranks, length, all_gather, *values)
 *                                        place: the number of threads, or the stream of a group over NCCL
 *   all_reduce(group, place, tensor)     cot_group_all_reduce
 *   check_group(group)                   cot_group_check
 *   shard_positions(cut, stripe, length, ranks, rank) -> the positions of the rank's tokens, int64 as bytes
 *   calls() -> {call: (member, ...)}     dropout_scale(p)     version
 *
 * An error status becomes an exception with the library's message. */
#define Py_LIMITED_API 0x03090000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "openmp.h"

#include <cotangent/cotangent.h>
#include <pthread.h>
#include <time.h>

/* ---- the argument structs of the headers: make_calls.py writes calls.inc --------------------------------------- */

typedef enum field_kind { TENSOR, DOUBLE, INT32, INT64, UINT64 } field_kind;

typedef struct field {
    const char *name;
    field_kind kind;
    size_t offset;
} field;

typedef struct call {
    const char *name;
    size_t size;
    const field *fields;
    int field_count;
    cot_status (*run)(cot_queue *, const void *);
    cot_status (*run_over_group)(cot_group *, cot_queue *, const cot_parallel_options *, const void *); /* or NULL */
} call;

#include "calls.inc"

enum { CALLS = sizeof calls / sizeof *calls, MAX_DEVICES = 64 };

/* A call and the order of its values. */
typedef struct plan {
    const call *call;
    Py_ssize_t count;
    const field *fields[]; /* NULL: the value is skipped */
} plan;

static const char plan_name[] = "cotangent.plan";

/* ---- status to exception -------------------------------------------------------------------------------- */

static PyObject *raise_status(cot_status status)
{
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case COT_INVALID_ARGUMENT:
    case COT_INVALID_SHAPE:
    case COT_INVALID_LAYOUT:
    case COT_INVALID_DATA: type = PyExc_ValueError; break;
    case COT_INVALID_DTYPE: type = PyExc_TypeError; break;
    case COT_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    case COT_OUT_OF_MEMORY: type = PyExc_MemoryError; break;
    default: break;
    }
    PyErr_SetString(type, cot_error_message());
    return NULL;
}

/* As raise_status, after cot_queue_create for a GPU. Replaces the name of this function, which a user of the package
 * does not call. */
static PyObject *raise_no_gpu(cot_status status)
{
    static const char prefix[] = "cot_queue_create: ";
    const char *text = cot_error_message();
    if (status != COT_NO_DEVICE || strncmp(text, prefix, sizeof prefix - 1) != 0)
        return raise_status(status);
    return PyErr_Format(PyExc_RuntimeError, "cotangent: %s: see python -m cotangent.doctor", text + sizeof prefix - 1);
}

/* ---- values to members ---------------------------------------------------------------------------------- */

static PyObject *name_dtype, *name_shape, *name_stride, *name_data_ptr, *name_get_device;

/* torch's dtypes, which are singletons, and the library's. */
static struct {
    const char *name;
    cot_dtype dtype;
    PyObject *object;
} dtypes[] = {{"float32", COT_F32, NULL}, {"bfloat16", COT_BF16, NULL}, {"float16", COT_F16, NULL},
              {"float64", COT_F64, NULL}, {"int32", COT_I32, NULL},     {"uint8", COT_U8, NULL},
              {"bool", COT_U8, NULL}};

static int find_dtypes(void)
{
    if (dtypes[0].object != NULL)
        return 0;
    PyObject *torch = PyImport_ImportModule("torch");
    for (int i = sizeof dtypes / sizeof *dtypes - 1; torch != NULL && i >= 0; i--)
        if ((dtypes[i].object = PyObject_GetAttrString(torch, dtypes[i].name)) == NULL)
            break;
    Py_XDECREF(torch);
    return dtypes[0].object != NULL ? 0 : -1;
}

/* Replaces the exception of a failed read (a wrong type, a number that is too large) by one that names the argument. */
static int refuse_value(const char *call_name, const char *name, PyObject *value, const char *expected)
{
    const int too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    if (!too_large && !PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    PyObject *type_name = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__");
    if (too_large)
        PyErr_Format(PyExc_ValueError, "%s: %s is out of range, expected %s of 64 bits", call_name, name, expected);
    else if (value == Py_None)
        PyErr_Format(PyExc_TypeError, "%s: %s is None, expected %s", call_name, name, expected);
    else if (type_name != NULL)
        PyErr_Format(PyExc_TypeError, "%s: %s is a %S, expected %s", call_name, name, type_name, expected);
    Py_XDECREF(type_name);
    return -1;
}

/* The dtypes of torch that a member can have: those of index data, of masks, or of numbers. */
static const char *expected_dtypes(const char *name)
{
    if (strstr(name, "seqlens") != NULL || strstr(name, "seqused") != NULL || strcmp(name, "seq_idx") == 0 ||
        strcmp(name, "conv_state_indices") == 0 || strstr(name, "_tensor") != NULL)
        return "torch.int32";
    if (strstr(name, "mask") != NULL)
        return "torch.uint8 or torch.bool";
    return "torch.float32, torch.float16, torch.bfloat16 or torch.float64";
}

static int read_dtype(const char *call_name, const char *name, PyObject *value, cot_dtype *dtype)
{
    PyObject *dtype_object = PyObject_GetAttr(value, name_dtype);
    if (dtype_object == NULL)
        return refuse_value(call_name, name, value, "a Tensor");
    *dtype = COT_DTYPE_NONE;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes && *dtype == COT_DTYPE_NONE; i++)
        if (dtypes[i].object == dtype_object)
            *dtype = dtypes[i].dtype;
    if (*dtype == COT_DTYPE_NONE)
        PyErr_Format(PyExc_TypeError, "%s: %s has dtype %S, expected %s", call_name, name, dtype_object,
                     expected_dtypes(name));
    Py_DECREF(dtype_object);
    return *dtype != COT_DTYPE_NONE ? 0 : -1;
}

/* For a tensor without strides or memory, for example a sparse tensor. */
static int refuse_layout(const char *call_name, const char *name)
{
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: %s has no strides or no data, expected a dense tensor", call_name, name);
    return -1;
}

/* Reads the sizes or strides of a tensor from a tuple of ints. */
static int read_sizes(PyObject *tuple, int64_t *sizes, int32_t *rank)
{
    if (tuple == NULL)
        return -1;
    const Py_ssize_t count = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < count && i < COT_MAX_RANK; i++)
        sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    Py_DECREF(tuple);
    *rank = (int32_t)count;
    return PyErr_Occurred() == NULL ? 0 : -1;
}

static PyObject *tensor_types;          /* (Tensor, Parameter) */
static const dlpack_exchange *exchange; /* NULL in torch before 2.10 */

/* Whether the type is Tensor or Parameter, and no subclass that may behave differently. */
static int is_plain_tensor(PyObject *value)
{
    const PyObject *type = (PyObject *)Py_TYPE(value);
    return tensor_types != NULL &&
           (type == PyTuple_GetItem(tensor_types, 0) || type == PyTuple_GetItem(tensor_types, 1));
}

/* Returns 0, without an exception, if the tensor cannot be read in this way: it has no memory, for example. The exchange
 * takes 0.06 us for a tensor, the attributes and methods take 0.3 us. */
static int read_by_exchange(PyObject *value, dlpack_tensor *t)
{
    if (exchange == NULL || !is_plain_tensor(value))
        return 0;
    if (exchange->read(value, t) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

static cot_dtype exchanged_dtype(const dlpack_tensor *t)
{
    switch (t->code << 8 | t->bits) {
    case DLPACK_FLOAT << 8 | 32: return COT_F32;
    case DLPACK_FLOAT << 8 | 64: return COT_F64;
    case DLPACK_FLOAT << 8 | 16: return COT_F16;
    case DLPACK_BFLOAT << 8 | 16: return COT_BF16;
    case DLPACK_INT << 8 | 32: return COT_I32;
    case DLPACK_UINT << 8 | 8:
    case DLPACK_BOOL << 8 | 8: return COT_U8;
    default: return COT_DTYPE_NONE;
    }
}

/* Reads a tensor that needs no error message. Returns 0 if read_attributes must read it. */
static int read_quickly(PyObject *value, int device, cot_tensor *tensor)
{
    dlpack_tensor t;
    if (!read_by_exchange(value, &t) || t.rank > COT_MAX_RANK || t.lanes != 1 || t.byte_offset != 0)
        return 0;
    if (device < 0 ? t.device_type != DLPACK_CPU : t.device_type != DLPACK_CUDA || t.device != device)
        return 0;
    tensor->dtype = exchanged_dtype(&t);
    tensor->rank = t.rank;
    tensor->data = t.data;
    for (int32_t axis = 0; axis < t.rank; axis++) {
        tensor->shape[axis] = t.shape[axis];
        tensor->stride[axis] = t.stride[axis];
    }
    return tensor->dtype != COT_DTYPE_NONE;
}

static int read_attributes(const char *call_name, const char *name, PyObject *value, int device, cot_tensor *tensor)
{
    if (read_dtype(call_name, name, value, &tensor->dtype) != 0 ||
        read_sizes(PyObject_GetAttr(value, name_shape), tensor->shape, &tensor->rank) != 0)
        return -1;
    if (tensor->rank > COT_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "%s: %s has %d axes, expected at most %d", call_name, name, (int)tensor->rank,
                     COT_MAX_RANK);
        return -1;
    }
    if (read_sizes(PyObject_CallMethodObjArgs(value, name_stride, NULL), tensor->stride, &tensor->rank) != 0)
        return refuse_layout(call_name, name);
    if (device >= 0) {
        PyObject *device_object = PyObject_CallMethodObjArgs(value, name_get_device, NULL);
        if (device_object == NULL)
            return -1;
        const long tensor_device = PyLong_AsLong(device_object); /* -1: the CPU */
        Py_DECREF(device_object);
        if (tensor_device != device) {
            if (tensor_device < 0)
                PyErr_Format(PyExc_ValueError, "%s: %s is on the CPU, expected cuda:%d as the other tensors", call_name,
                             name, device);
            else
                PyErr_Format(PyExc_ValueError, "%s: %s is on cuda:%ld, expected cuda:%d as the other tensors",
                             call_name, name, tensor_device, device);
            return -1;
        }
    }
    PyObject *pointer = PyObject_CallMethodObjArgs(value, name_data_ptr, NULL);
    if (pointer == NULL)
        return refuse_layout(call_name, name);
    tensor->data = PyLong_AsVoidPtr(pointer);
    Py_DECREF(pointer);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* device -1: torch's dispatch has already made sure that all tensors are on the CPU. */
static int read_tensor(const char *call_name, const char *name, PyObject *value, int device, cot_tensor *tensor)
{
    return read_quickly(value, device, tensor) ? 0 : read_attributes(call_name, name, value, device, tensor);
}

static int read_value(const char *call_name, const field *f, PyObject *value, int device, char *args)
{
    void *member = args + f->offset;
    switch (f->kind) {
    case TENSOR: return read_tensor(call_name, f->name, value, device, member);
    case DOUBLE: *(double *)member = PyFloat_AsDouble(value); break;
    case INT64: *(int64_t *)member = PyLong_AsLongLong(value); break;
    case UINT64:
        *(uint64_t *)member = PyLong_AsUnsignedLongLongMask(value);
        break; /* an int of a torch schema is signed */
    case INT32: {
        const long long value64 = PyLong_AsLongLong(value);
        if (value64 != (int32_t)value64 && PyErr_Occurred() == NULL)
            PyErr_Format(PyExc_ValueError, "%s: %s is %lld, out of the range of 32 bits", call_name, f->name, value64);
        *(int32_t *)member = (int32_t)value64;
        break;
    }
    }
    if (PyErr_Occurred() == NULL)
        return 0;
    return refuse_value(call_name, f->name, value, f->kind == DOUBLE ? "a number" : "an integer");
}

/* Reads a plan, then sets args from values[first] on. NULL after an exception. */
static const plan *read_values(PyObject *values, Py_ssize_t first, int device, any_args *args)
{
    const plan *p = PyCapsule_GetPointer(PyTuple_GetItem(values, 0), plan_name);
    if (p == NULL || find_dtypes() != 0)
        return NULL;
    if (PyTuple_Size(values) - first != p->count)
        return PyErr_Format(PyExc_TypeError, "%s: %zd values are given, the plan has %zd", p->call->name,
                            PyTuple_Size(values) - first, p->count),
               NULL;
    memset(args, 0, p->call->size);
    memcpy(args, &p->call->size, sizeof p->call->size); /* sets struct_size */
    for (Py_ssize_t i = 0; i < p->count; i++) {
        PyObject *value = PyTuple_GetItem(values, first + i);
        const field *f = p->fields[i];
        if (f == NULL || (value == Py_None && f->kind == TENSOR)) /* skipped; absent */
            continue;
        if (read_value(p->call->name, f, value, device, (char *)args) != 0)
            return NULL;
    }
    return p;
}

/* ---- on the CPU ----------------------------------------------------------------------------------------- */

/* Each thread has its own queue. The queue keeps its memory pool, so that workspaces are not mapped and unmapped per
 * call. */
typedef struct thread_queue {
    int32_t threads;
    cot_queue *queue;
} thread_queue;

static pthread_key_t thread_queues;

static void destroy_thread_queue(void *memory)
{
    cot_queue_destroy(((thread_queue *)memory)->queue);
    free(memory);
}

static cot_queue *cpu_queue(int32_t threads)
{
    thread_queue *queue_of_thread = pthread_getspecific(thread_queues);
    if (queue_of_thread == NULL) {
        if ((queue_of_thread = calloc(1, sizeof *queue_of_thread)) == NULL ||
            pthread_setspecific(thread_queues, queue_of_thread) != 0) {
            free(queue_of_thread);
            PyErr_NoMemory();
            return NULL;
        }
    }
    if (queue_of_thread->queue == NULL || queue_of_thread->threads != threads) {
        cot_queue_options options;
        COT_INIT(&options);
        options.threads = threads;
        cot_queue_destroy(queue_of_thread->queue);
        const cot_status status = cot_queue_create(&options, &queue_of_thread->queue);
        if (status != COT_OK) {
            raise_status(status);
            return NULL;
        }
        queue_of_thread->threads = threads;
    }
    return queue_of_thread->queue;
}

static PyObject *run_cpu(PyObject *self, PyObject *values)
{
    (void)self;
    any_args args;
    if (PyTuple_Size(values) < 2)
        return PyErr_Format(PyExc_TypeError, "run_cpu: expected a plan and a number of threads");
    const long threads = PyLong_AsLong(PyTuple_GetItem(values, 1));
    const plan *p = PyErr_Occurred() == NULL ? read_values(values, 2, -1, &args) : NULL;
    cot_queue *queue = p != NULL ? cpu_queue((int32_t)threads) : NULL;
    if (queue == NULL)
        return NULL;
    cot_status status;
    Py_BEGIN_ALLOW_THREADS status = p->call->run(queue, &args);
    Py_END_ALLOW_THREADS if (status != COT_OK) return raise_status(status);
    Py_RETURN_NONE;
}

/* ---- on a GPU -------------------------------------------------------------------------------------------- */

/* One queue per device, which each call sets to the caller's stream and allocator. The interpreter lock makes sure that
 * only one thread uses a queue. PyTorch releases the lock while it allocates a workspace. Other threads may use the
 * queue meanwhile, as cot_queue_set_allocator permits, and set another stream. */
static cot_queue *cuda_queues[MAX_DEVICES];

static cot_queue *cuda_queue(long device)
{
    if (device < 0 || device >= MAX_DEVICES) {
        PyErr_Format(PyExc_ValueError, "device is %ld, expected 0 to %d", device, MAX_DEVICES - 1);
        return NULL;
    }
    if (cuda_queues[device] == NULL) {
        cot_queue_options options;
        COT_INIT(&options);
        options.backend = COT_BACKEND_CUDA;
        options.device = (int32_t)device;
        const cot_status status = cot_queue_create(&options, &cuda_queues[device]);
        if (status != COT_OK)
            raise_no_gpu(status);
    }
    return cuda_queues[device];
}

/* The workspace of a running call. */
typedef struct workspace_source {
    cot_queue *queue;
    void *stream;
    PyObject *allocate, *device_number;
    PyObject *tensor; /* the workspace; NULL = none */
} workspace_source;

/* The callback of cot_queue_set_allocator. Returns NULL after an exception. */
static void *allocate_workspace(void *context, size_t bytes)
{
    workspace_source *source = context;
    PyObject *size = PyLong_FromSize_t(bytes);
    source->tensor = PyObject_CallFunctionObjArgs(source->allocate, source->device_number, size, NULL);
    Py_XDECREF(size);
    PyObject *pointer = source->tensor != NULL ? PyObject_CallMethodObjArgs(source->tensor, name_data_ptr, NULL) : NULL;
    void *memory = pointer != NULL ? PyLong_AsVoidPtr(pointer) : NULL;
    Py_XDECREF(pointer);
    const cot_status status = cot_queue_set_stream(source->queue, source->stream);
    if (PyErr_Occurred() == NULL && status != COT_OK)
        raise_status(status);
    return PyErr_Occurred() == NULL ? memory : NULL;
}

static PyObject *run_cuda(PyObject *self, PyObject *values)
{
    (void)self;
    any_args args;
    if (PyTuple_Size(values) < 4)
        return PyErr_Format(PyExc_TypeError, "run_cuda: expected a plan, a device, a stream and an allocator");
    PyObject *device_number = PyTuple_GetItem(values, 1);
    const long device = PyLong_AsLong(device_number);
    void *stream = PyLong_AsVoidPtr(PyTuple_GetItem(values, 2));
    const plan *p = PyErr_Occurred() == NULL ? read_values(values, 4, (int)device, &args) : NULL;
    cot_queue *queue = p != NULL ? cuda_queue(device) : NULL;
    if (queue == NULL)
        return NULL;
    workspace_source source = {queue, stream, PyTuple_GetItem(values, 3), device_number, NULL};
    cot_status status = cot_queue_set_stream(queue, stream);
    if (status == COT_OK)
        status = cot_queue_set_allocator(queue, allocate_workspace, &source);
    if (status == COT_OK)
        status = p->call->run(queue, &args);
    cot_queue_set_allocator(queue, NULL, NULL);
    Py_XDECREF(source.tensor); /* the stream's next allocation may reuse it: its work runs after this work */
    if (PyErr_Occurred() != NULL)
        return NULL;
    if (status != COT_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *check_cuda(PyObject *self, PyObject *device)
{
    (void)self;
    const long number = PyLong_AsLong(device);
    cot_queue *queue = PyErr_Occurred() == NULL ? cuda_queue(number) : NULL;
    if (queue == NULL)
        return NULL;
    const cot_status status = cot_queue_check(queue);
    if (status != COT_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

/* Times the library's part of a Python call. It does not include reading values, allocating a workspace (the call uses
 * the queue's pool) and setting the stream. */
static PyObject *time_call(PyObject *self, PyObject *values)
{
    (void)self;
    any_args args;
    if (PyTuple_Size(values) < 3)
        return PyErr_Format(PyExc_TypeError, "time_call: expected a plan, a device and a number of repeats");
    const long device = PyLong_AsLong(PyTuple_GetItem(values, 1)), repeats = PyLong_AsLong(PyTuple_GetItem(values, 2));
    const plan *p = PyErr_Occurred() == NULL ? read_values(values, 3, (int)device, &args) : NULL;
    cot_queue *queue = p == NULL ? NULL : device < 0 ? cpu_queue(1) : cuda_queue(device);
    if (queue == NULL)
        return NULL;
    struct timespec begin, end;
    cot_status status = COT_OK;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < repeats && status == COT_OK; i++)
        status = p->call->run(queue, &args);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (status != COT_OK)
        return raise_status(status);
    const double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return PyFloat_FromDouble(seconds / (double)repeats);
}

/* ---- groups ---------------------------------------------------------------------------------------------- */

/* A transport is a Python object. Its exceptions become the message of COT_PEER_ERROR.
 *   start(receive, peer, tag, address, bytes) -> a number that stands for the transfer
 *   wait(transfer, seconds)      abort(reason) */

static const char group_name[] = "cotangent.group";

/* Moves the message of a Python exception to the library. */
static cot_status transport_failed(void)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *bytes = text != NULL ? PyUnicode_AsUTF8String(text) : NULL;
    cot_error_set(COT_PEER_ERROR, bytes != NULL ? PyBytes_AsString(bytes) : "an exception without a message");
    Py_XDECREF(bytes), Py_XDECREF(text);
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    PyErr_Clear();
    return COT_PEER_ERROR;
}

static cot_status start_transfer(void *transport, int32_t receive, int32_t peer, int32_t tag, void *data, size_t bytes,
                                 void **transfer)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *number = PyObject_CallMethod(transport, "start", "iiiKK", (int)receive, (int)peer, (int)tag,
                                           (unsigned long long)(uintptr_t)data, (unsigned long long)bytes);
    *transfer = number != NULL ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    const cot_status status = PyErr_Occurred() == NULL ? COT_OK : transport_failed();
    PyGILState_Release(state);
    return status;
}

static cot_status wait_transfer(void *transport, void *transfer, double timeout)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *nothing = PyObject_CallMethod(transport, "wait", "Kd", (unsigned long long)(uintptr_t)transfer, timeout);
    const cot_status status = nothing != NULL ? COT_OK : transport_failed();
    Py_XDECREF(nothing);
    PyGILState_Release(state);
    return status;
}

/* The result 0 keeps the memory of open transfers: torch may hold more references to them. */
static int32_t abort_transfers(void *transport, const char *reason)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *text = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
    PyObject *nothing = text != NULL ? PyObject_CallMethod(transport, "abort", "O", text) : NULL;
    if (nothing == NULL)
        PyErr_Clear();
    Py_XDECREF(text), Py_XDECREF(nothing);
    PyGILState_Release(state);
    return 0;
}

static void destroy_transport(void *transport)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF((PyObject *)transport);
    PyGILState_Release(state);
}

/* A rank's handle. A group over NCCL has a queue of its own: its calls run without the interpreter lock, while other
 * threads use cuda_queues. The queue's pool serves the workspaces. */
typedef struct python_group {
    cot_group *group;
    cot_queue *queue; /* NULL: a group for CPU tensors */
    int device;       /* -1: the CPU */
} python_group;

static void free_group(python_group *g)
{
    PyThreadState *thread = PyEval_SaveThread(); /* destroying may wait for ranks that need the interpreter lock */
    cot_group_destroy(g->group);
    cot_queue_destroy(g->queue);
    PyEval_RestoreThread(thread);
    free(g);
}

static void destroy_group(PyObject *capsule)
{
    free_group(PyCapsule_GetPointer(capsule, group_name));
}

static PyObject *wrap_group(python_group *g)
{
    PyObject *capsule = PyCapsule_New(g, group_name, destroy_group);
    if (capsule == NULL)
        free_group(g);
    return capsule;
}

static python_group *new_group(int device)
{
    python_group *g = calloc(1, sizeof *g);
    if (g != NULL)
        g->device = device;
    else
        PyErr_NoMemory();
    return g;
}

static PyObject *make_group(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *transport;
    int rank, size;
    cot_group_options options;
    COT_INIT(&options);
    if (!PyArg_ParseTuple(args, "Oiid:make_group", &transport, &rank, &size, &options.timeout))
        return NULL;
    cot_group_callbacks callbacks;
    COT_INIT(&callbacks);
    callbacks.context = transport;
    callbacks.start = start_transfer;
    callbacks.wait = wait_transfer;
    callbacks.abort = abort_transfers;
    callbacks.destroy = destroy_transport;
    python_group *g = new_group(-1);
    if (g == NULL)
        return NULL;
    Py_INCREF(transport);
    const cot_status status = cot_group_create_custom(&callbacks, rank, size, &options, &g->group);
    if (status != COT_OK) {
        Py_DECREF(transport);
        free(g);
        return raise_status(status);
    }
    return wrap_group(g);
}

static PyObject *make_nccl_group(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long comm;
    cot_group_options options;
    cot_queue_options queue_options;
    COT_INIT(&options);
    COT_INIT(&queue_options);
    queue_options.backend = COT_BACKEND_CUDA;
    if (!PyArg_ParseTuple(args, "Kid:make_nccl_group", &comm, &queue_options.device, &options.timeout))
        return NULL;
    python_group *g = new_group(queue_options.device);
    if (g == NULL)
        return NULL;
    void *const communicator = (void *)(uintptr_t)comm;
    PyThreadState *thread = PyEval_SaveThread();
    cot_status status = cot_queue_create(&queue_options, &g->queue);
    if (status == COT_OK)
        status = cot_group_create_nccl(&communicator, &options, &g->group);
    PyEval_RestoreThread(thread);
    if (status != COT_OK) {
        raise_no_gpu(status);
        free_group(g);
        return NULL;
    }
    return wrap_group(g);
}

/* The queue of a call. place: the number of threads, or a stream. NULL after an exception. */
static cot_queue *queue_of_group(const python_group *g, PyObject *place)
{
    if (g->queue == NULL) {
        const long threads = PyLong_AsLong(place);
        return PyErr_Occurred() == NULL ? cpu_queue((int32_t)threads) : NULL;
    }
    void *stream = PyLong_AsVoidPtr(place);
    const cot_status status = PyErr_Occurred() == NULL ? cot_queue_set_stream(g->queue, stream) : COT_OK;
    if (status != COT_OK)
        raise_status(status);
    return PyErr_Occurred() == NULL ? g->queue : NULL;
}

static PyObject *run_group(PyObject *self, PyObject *values)
{
    enum { FIRST = 8 };
    (void)self;
    any_args args;
    cot_parallel_options options;
    COT_INIT(&options);
    if (PyTuple_Size(values) < FIRST)
        return PyErr_Format(PyExc_TypeError, "run_group: expected a plan, a group, a place and five options");
    const python_group *g = PyCapsule_GetPointer(PyTuple_GetItem(values, 1), group_name);
    if (g == NULL)
        return NULL;
    options.cut = (cot_cut)PyLong_AsLong(PyTuple_GetItem(values, 3));
    options.stripe = PyLong_AsLongLong(PyTuple_GetItem(values, 4));
    options.head_ranks = (int32_t)PyLong_AsLong(PyTuple_GetItem(values, 5));
    options.length = PyLong_AsLongLong(PyTuple_GetItem(values, 6));
    options.all_gather = (int32_t)PyLong_AsLong(PyTuple_GetItem(values, 7));
    const plan *p = PyErr_Occurred() == NULL ? read_values(values, FIRST, g->device, &args) : NULL;
    if (p != NULL && p->call->run_over_group == NULL)
        return PyErr_Format(PyExc_ValueError, "%s has no call over a group", p->call->name);
    cot_queue *queue = p != NULL ? queue_of_group(g, PyTuple_GetItem(values, 2)) : NULL;
    if (queue == NULL)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const cot_status status = p->call->run_over_group(g->group, queue, &options, &args);
    PyEval_RestoreThread(thread);
    if (status != COT_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *all_reduce(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule, *place, *value;
    cot_tensor tensor = {0};
    if (!PyArg_ParseTuple(args, "OOO:all_reduce", &capsule, &place, &value))
        return NULL;
    const python_group *g = PyCapsule_GetPointer(capsule, group_name);
    if (g == NULL || find_dtypes() != 0 || read_tensor("all_reduce", "tensor", value, g->device, &tensor) != 0)
        return NULL;
    cot_queue *queue = queue_of_group(g, place);
    if (queue == NULL)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const cot_status status = cot_group_all_reduce(g->group, queue, &tensor);
    PyEval_RestoreThread(thread);
    if (status != COT_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *check_group(PyObject *self, PyObject *capsule)
{
    (void)self;
    const python_group *g = PyCapsule_GetPointer(capsule, group_name);
    if (g == NULL)
        return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const cot_status status = cot_group_check(g->group);
    PyEval_RestoreThread(thread);
    if (status != COT_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *shard_positions(PyObject *self, PyObject *args)
{
    (void)self;
    int cut, ranks, rank;
    long long stripe, length;
    int64_t rows;
    cot_parallel_options options;
    COT_INIT(&options);
    if (!PyArg_ParseTuple(args, "iLLii:shard_positions", &cut, &stripe, &length, &ranks, &rank))
        return NULL;
    options.cut = (cot_cut)cut;
    options.stripe = stripe;
    cot_status status = cot_shard_rows(&options, length, ranks, rank, &rows);
    if (status != COT_OK)
        return raise_status(status);
    PyObject *positions = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((size_t)rows * sizeof(int64_t)));
    if (positions == NULL)
        return NULL;
    status = cot_shard_positions(&options, length, ranks, rank, (int64_t *)(void *)PyBytes_AsString(positions));
    if (status == COT_OK)
        return positions;
    Py_DECREF(positions);
    return raise_status(status);
}

/* ---- the route of a call --------------------------------------------------------------------------------- */

static PyObject *forward_ad, *is_grad_enabled, *guards;
static PyObject *name_current_level, *name_is_cuda, *name_is_cpu, *name_is_neg, *name_requires_grad;

/* Finds the exchange API of the type Tensor, if it has one. */
static void find_exchange(PyObject *type)
{
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"); /* kept for good */
    const dlpack_exchange *found = capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (found != NULL && found->major != DLPACK_MAJOR)
        found = found->previous;
    exchange = found != NULL && found->read != NULL ? found : NULL;
}

/* types: (Tensor, Parameter); forward_ad: its module; guards: functions that return true if a part of torch may
 * intercept a call. */
static PyObject *set_guards(PyObject *self, PyObject *args)
{
    (void)self;
    if (!PyArg_ParseTuple(args, "O!OOO!:set_guards", &PyTuple_Type, &tensor_types, &forward_ad, &is_grad_enabled,
                          &PyTuple_Type, &guards))
        return NULL;
    Py_INCREF(tensor_types), Py_INCREF(forward_ad), Py_INCREF(is_grad_enabled), Py_INCREF(guards);
    find_exchange(PyTuple_GetItem(tensor_types, 0));
    Py_RETURN_NONE;
}

/* Whether the object is true; consumes the reference. -1 after an exception. */
static int take_truth(PyObject *object)
{
    const int truth = object != NULL ? PyObject_IsTrue(object) : -1;
    Py_XDECREF(object);
    return truth;
}

/* 1 if a part of torch may intercept the call. */
static int is_intercepted(void)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(guards); i++) {
        const int active = take_truth(PyObject_CallObject(PyTuple_GetItem(guards, i), NULL));
        if (active != 0)
            return active;
    }
    PyObject *level = PyObject_GetAttr(forward_ad, name_current_level);
    const long number = level != NULL ? PyLong_AsLong(level) : 0;
    Py_XDECREF(level);
    return PyErr_Occurred() != NULL ? -1 : number >= 0;
}

enum { BY_DISPATCHER = 0, ON_CPU = 1, ON_CUDA = 2, WITH_GRADIENT = 4 };

/* The device of a plain tensor without pending negation: ON_CPU or ON_CUDA, else BY_DISPATCHER. -1 after an
 * exception. */
static int device_of(PyObject *tensor)
{
    dlpack_tensor t;
    if (!is_plain_tensor(tensor))
        return BY_DISPATCHER;
    const int known = read_by_exchange(tensor, &t) && (t.device_type == DLPACK_CPU || t.device_type == DLPACK_CUDA);
    const int cuda = known ? t.device_type == DLPACK_CUDA : take_truth(PyObject_GetAttr(tensor, name_is_cuda));
    const int cpu = known       ? t.device_type == DLPACK_CPU
                    : cuda == 0 ? take_truth(PyObject_GetAttr(tensor, name_is_cpu))
                                : 0;
    const int negative = take_truth(PyObject_CallMethodObjArgs(tensor, name_is_neg, NULL));
    if (cuda < 0 || cpu < 0 || negative < 0)
        return -1;
    return negative ? BY_DISPATCHER : cuda ? ON_CUDA : cpu ? ON_CPU : BY_DISPATCHER;
}

/* Returns the kernel that torch's dispatcher would call, ON_CPU or ON_CUDA, plus WITH_GRADIENT if autograd has to
 * record the call. Returns BY_DISPATCHER if the dispatcher may have to do more. Two passes of the dispatcher through
 * Python are most of a call's cost (tools/python_overhead.py). */
static PyObject *route(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *arguments, *tensors;
    if (!PyArg_ParseTuple(args, "O!O!:route", &PyTuple_Type, &arguments, &PyTuple_Type, &tensors))
        return NULL;
    int active = is_intercepted(), device = BY_DISPATCHER, gradient = 0;
    for (Py_ssize_t i = 0; active == 0 && i < PyTuple_Size(tensors); i++) {
        PyObject *tensor = PyTuple_GetItem(arguments, PyLong_AsSsize_t(PyTuple_GetItem(tensors, i)));
        if (tensor == NULL)
            return NULL;
        if (tensor == Py_None)
            continue;
        const int found = device_of(tensor);
        const int requires_grad = found > 0 && !gradient ? take_truth(PyObject_GetAttr(tensor, name_requires_grad)) : 0;
        if (found < 0 || requires_grad < 0)
            return NULL;
        active = found == BY_DISPATCHER || (device != BY_DISPATCHER && found != device);
        device = found;
        gradient = gradient || requires_grad;
    }
    if (active == 0 && gradient)
        gradient = take_truth(PyObject_CallObject(is_grad_enabled, NULL));
    if (active < 0 || gradient < 0)
        return NULL;
    return PyLong_FromLong(active || device == BY_DISPATCHER ? BY_DISPATCHER : device + (gradient ? WITH_GRADIENT : 0));
}

/* ---- plans ---------------------------------------------------------------------------------------------- */

static void destroy_plan(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, plan_name));
}

static int find_field(const call *c, PyObject *name, const field **result)
{
    *result = NULL;
    if (name == Py_None)
        return 0;
    for (int i = 0; i < c->field_count; i++)
        if (PyUnicode_CompareWithASCIIString(name, c->fields[i].name) == 0)
            *result = &c->fields[i];
    if (*result == NULL)
        PyErr_Format(PyExc_ValueError, "%s has no argument %R", c->name, name);
    return *result != NULL ? 0 : -1;
}

static PyObject *make_plan(PyObject *self, PyObject *args)
{
    (void)self;
    const char *name;
    PyObject *fields;
    if (!PyArg_ParseTuple(args, "sO:plan", &name, &fields))
        return NULL;
    const call *c = NULL;
    for (int i = 0; i < CALLS; i++)
        if (strcmp(calls[i].name, name) == 0)
            c = &calls[i];
    if (c == NULL)
        return PyErr_Format(PyExc_ValueError, "the library has no call %s", name);
    const Py_ssize_t count = PyTuple_Size(fields);
    plan *p = count >= 0 ? malloc(sizeof *p + (size_t)count * sizeof *p->fields) : NULL;
    if (p == NULL)
        return PyErr_Occurred() != NULL ? NULL : PyErr_NoMemory();
    p->call = c;
    p->count = count;
    PyObject *capsule = NULL;
    int status = 0;
    for (Py_ssize_t i = 0; i < count && status == 0; i++)
        status = find_field(c, PyTuple_GetItem(fields, i), &p->fields[i]);
    if (status == 0)
        capsule = PyCapsule_New(p, plan_name, destroy_plan);
    if (capsule == NULL)
        free(p);
    return capsule;
}

static PyObject *list_calls(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyObject *dictionary = PyDict_New();
    for (int i = 0; dictionary != NULL && i < CALLS; i++) {
        PyObject *names = PyTuple_New(calls[i].field_count);
        for (int k = 0; names != NULL && k < calls[i].field_count; k++)
            PyTuple_SetItem(names, k, PyUnicode_FromString(calls[i].fields[k].name));
        if (names == NULL || PyDict_SetItemString(dictionary, calls[i].name, names) != 0)
            Py_CLEAR(dictionary);
        Py_XDECREF(names);
    }
    return dictionary;
}

static PyObject *dropout_scale(PyObject *self, PyObject *p)
{
    (void)self;
    const double value = PyFloat_AsDouble(p);
    return PyErr_Occurred() != NULL ? NULL : PyFloat_FromDouble(cot_dropout_scale(value));
}

/* ---- the module ------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"plan", make_plan, METH_VARARGS, "plan(call, fields): a call, and the order of its values"},
    {"run_cpu", run_cpu, METH_VARARGS, "run_cpu(plan, threads, *values)"},
    {"run_cuda", run_cuda, METH_VARARGS, "run_cuda(plan, device, stream, allocate, *values)"},
    {"check_cuda", check_cuda, METH_O, "check_cuda(device): waits, and raises the first fault of the device's kernels"},
    {"time_call", time_call, METH_VARARGS, "time_call(plan, device, repeats, *values): seconds per call"},
    {"set_guards", set_guards, METH_VARARGS, "set_guards(types, forward_ad, is_grad_enabled, guards): for route"},
    {"route", route, METH_VARARGS, "route(arguments, tensors): 0 the dispatcher, 1 CPU, 2 CUDA; + 4 with a gradient"},
    {"make_group", make_group, METH_VARARGS, "make_group(transport, rank, size, timeout): a rank's handle"},
    {"make_nccl_group", make_nccl_group, METH_VARARGS, "make_nccl_group(comm, device, timeout): a rank's handle"},
    {"run_group", run_group, METH_VARARGS,
     "run_group(plan, group, place, cut, stripe, head_ranks, length, all_gather, *values)"},
    {"all_reduce", all_reduce, METH_VARARGS, "all_reduce(group, place, tensor): cot_group_all_reduce"},
    {"check_group", check_group, METH_O, "check_group(group): cot_group_check"},
    {"shard_positions", shard_positions, METH_VARARGS,
     "shard_positions(cut, stripe, length, ranks, rank): bytes of int64"},
    {"calls", list_calls, METH_NOARGS, "calls(): the members of every argument struct, by call"},
    {"dropout_scale", dropout_scale, METH_O, "dropout_scale(p): cot_dropout_scale"},
    {NULL, NULL, 0, NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "cotangent._C", "The library.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    const char *error = openmp_open();
    if (error != NULL)
        return PyErr_Format(PyExc_ImportError, "cotangent: no OpenMP: %s", error);
    name_dtype = PyUnicode_InternFromString("dtype");
    name_shape = PyUnicode_InternFromString("shape");
    name_stride = PyUnicode_InternFromString("stride");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_get_device = PyUnicode_InternFromString("get_device");
    name_current_level = PyUnicode_InternFromString("_current_level");
    name_is_cuda = PyUnicode_InternFromString("is_cuda");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (PyErr_Occurred() != NULL)
        return NULL;
    if (pthread_key_create(&thread_queues, destroy_thread_queue) != 0)
        return PyErr_Format(PyExc_ImportError, "cotangent: no key for a thread's queue is left");
    PyObject *module_object = PyModule_Create(&module);
    if (module_object != NULL && PyModule_AddStringConstant(module_object, "version", cot_version()) != 0)
        Py_CLEAR(module_object);
    return module_object;
}
