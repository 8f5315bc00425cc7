# SPDX-License-Identifier: Apache-2.0
"""libcotangent through ctypes for the peers' scripts: attention on torch's tensors, and NVML's clock and energy."""
import ctypes
import threading
import time

import torch

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 5}  # cot_dtype


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 6), ("stride", ctypes.c_int64 * 6)]


class QueueOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("backend", ctypes.c_int32), ("threads", ctypes.c_int32),
                ("kernels", ctypes.c_char_p), ("device", ctypes.c_int32), ("stream", ctypes.c_void_p)]


def members(names, kind):
    return [(name, kind) for name in names.split()]


OPTIONS = (members("causal window", ctypes.c_int32) + members("window_left window_right", ctypes.c_int64)
           + members("scale softcap dropout_p", ctypes.c_double) + members("dropout_seed dropout_offset", ctypes.c_uint64)
           + members("max_seqlen_q max_seqlen_k q_begin q_length k_begin k_length", ctypes.c_int64))
INPUTS = members("q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k sink alibi_slopes bias dropout_seed_memory "
                 "dropout_offset_memory", Tensor)
WORKSPACE = [("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t)]


class Forward(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)] + OPTIONS + INPUTS + members("out lse", Tensor) + WORKSPACE


class Backward(ctypes.Structure):
    _fields_ = ([("struct_size", ctypes.c_size_t)] + OPTIONS + members("accumulate allow_nondeterminism", ctypes.c_int32)
                + INPUTS + members("lse out dout dlse delta dq dk dv dsink dbias", Tensor) + WORKSPACE)


class Library:
    """A queue on a stream of torch's."""

    def __init__(self, path, stream):
        self.library = ctypes.CDLL(path)
        self.library.cot_error_message.restype = ctypes.c_char_p
        self.queue = ctypes.c_void_p()
        options = QueueOptions(struct_size=ctypes.sizeof(QueueOptions), backend=1, stream=stream.cuda_stream)
        self.check(self.library.cot_queue_create(ctypes.byref(options), ctypes.byref(self.queue)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"cotangent: {self.library.cot_error_message().decode()}")

    def call(self, name, struct, **arguments):
        """A function that enqueues this call, with a workspace of its own."""
        values = {key: Tensor(value.data_ptr(), DTYPES[value.dtype], value.dim(), (ctypes.c_int64 * 6)(*value.shape),
                              (ctypes.c_int64 * 6)(*value.stride())) if isinstance(value, torch.Tensor) else value
                  for key, value in arguments.items()}
        args = struct(struct_size=ctypes.sizeof(struct), **values)
        size = ctypes.c_size_t()
        self.check(getattr(self.library, name + "_workspace")(self.queue, ctypes.byref(args), ctypes.byref(size)))
        memory = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        args.workspace, args.workspace_bytes = (memory.data_ptr() + 255) // 256 * 256, size.value
        function = getattr(self.library, name)

        def enqueue(held=(arguments, memory)):
            del held  # the tensors live as long as the function
            self.check(function(self.queue, ctypes.byref(args)))
        return enqueue

    def forward(self, **arguments):
        return self.call("cot_attention_forward", Forward, **arguments)

    def backward(self, **arguments):
        return self.call("cot_attention_backward", Backward, **arguments)


class Power:
    """The GPU's clock and energy, read by a thread; without NVML nothing is known."""

    def __init__(self):
        self.device = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.nvml = None
            return
        bus = ctypes.create_string_buffer(64)
        ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(bus, 64, torch.cuda.current_device())
        if self.nvml.nvmlInit_v2() != 0 or self.nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self.device)) != 0:
            self.nvml = None

    def read(self):
        mhz, millijoules = ctypes.c_uint(), ctypes.c_ulonglong()
        self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(mhz))
        self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(millijoules))
        return time.perf_counter(), mhz.value, 1e-3 * millijoules.value

    def watch(self, work):
        """Runs work() and returns its result and the readings meanwhile."""
        readings, ended = [], threading.Event()

        def keep_reading():
            while not ended.wait(0.01):
                readings.append(self.read())
        thread = threading.Thread(target=keep_reading)
        if self.nvml is not None:
            thread.start()
        result = work()
        ended.set()
        if self.nvml is not None:
            thread.join()
        return result, readings


def use_since(readings, begin):
    """Mean clock in MHz and watts from `begin` on, between moments at which the energy counter moved; {} if unknown."""
    later = [reading for reading in readings if reading[0] >= begin]
    moved = [b for a, b in zip(later, later[1:]) if a[2] != b[2]]
    if len(moved) < 2:
        return {}
    watts = (moved[-1][2] - moved[0][2]) / (moved[-1][0] - moved[0][0])
    return {"sm_mhz": sum(reading[1] for reading in later) / len(later), "watts": watts}
