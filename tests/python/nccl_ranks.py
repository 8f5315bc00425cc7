# SPDX-License-Identifier: Apache-2.0
"""Run by test_distributed.py: groups over NCCL of the extension, with the emulator of tests/emulator as the GPU and
tests/parallel/fake_nccl.c as NCCL, whose ranks are threads. No PyTorch: it would need a real driver. A module with its
dtypes stands for it.

    nccl_ranks.py EXTENSION DRIVER NCCL"""
import ctypes
import importlib.util
import math
import struct
import sys
import threading
import types

RANKS, ROWS, H, D = 3, 8, 2, 16


class Stub(types.ModuleType):
    pass


dtypes = ("float32", "bfloat16", "float16", "float64", "int32", "uint8", "bool")
torch = Stub("torch")
for name in dtypes:
    setattr(torch, name, name)
sys.modules["torch"] = torch

driver = ctypes.CDLL(sys.argv[2])
nccl = ctypes.CDLL(sys.argv[3])
spec = importlib.util.spec_from_file_location("cotangent._C", sys.argv[1])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)


class Tensor:
    """A float32 tensor in the emulator's device memory."""

    dtype = torch.float32

    def __init__(self, shape, values=None):
        self.shape, self.count = shape, 1
        for size in shape:
            self.count *= size
        self.pointer = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(4 * self.count)) == 0
        self.write(values or [0.0] * self.count)

    def stride(self):
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.insert(0, step)
            step *= size
        return tuple(strides)

    def get_device(self):
        return 0

    def data_ptr(self):
        return self.pointer.value

    def write(self, values):
        data = struct.pack(f"{self.count}f", *values)
        assert driver.cuMemcpyHtoDAsync_v2(self.pointer, data, ctypes.c_size_t(len(data)), None) == 0
        assert driver.cuStreamSynchronize(None) == 0

    def read(self):
        data = ctypes.create_string_buffer(4 * self.count)
        assert driver.cuMemcpyDtoHAsync_v2(data, self.pointer, ctypes.c_size_t(4 * self.count), None) == 0
        assert driver.cuStreamSynchronize(None) == 0
        return list(struct.unpack(f"{self.count}f", data.raw))


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


unique = UniqueId()
assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
plan = extension.plan("attention_forward", ("q", "k", "v", "causal", "scale", "q_length", "k_length", "out", "lse"))
messages = [None] * RANKS
sums = [None] * RANKS
results = [None] * RANKS


def value(n):
    return (n * 37 % 101) / 101 - 0.5


def whole(salt):
    return [value(n + salt) for n in range(RANKS * ROWS * H * D)]


def run(group, rank, scale=0.25):
    size = ROWS * H * D
    shape = (1, ROWS, H, D)
    q, k, v = (Tensor(shape, whole(salt)[rank * size : (rank + 1) * size]) for salt in (0, 7, 19))
    out, lse = Tensor(shape), Tensor((1, H, ROWS))
    extension.run_group(plan, group, 0, 0, 0, 1, 0, 0, q, k, v, 1, scale, RANKS * ROWS, RANKS * ROWS, out, lse)
    extension.check_group(group)
    return out.read()


def rank_thread(rank):
    comm = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique, rank) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context[rank]), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context[rank]) == 0
    group = extension.make_nccl_group(comm.value, 0, 3.0)
    nccl.ncclCommDestroy(comm)
    x = Tensor((5,), [rank + n / 8 for n in range(5)])
    extension.all_reduce(group, 0, x)
    extension.check_group(group)
    sums[rank] = x.read()
    results[rank] = run(group, rank)
    assert run(group, rank) == results[rank], f"rank {rank}: other bits in the second run"
    try:
        run(group, rank, 0.5 if rank == 1 else 0.25)
    except RuntimeError as error:
        messages[rank] = str(error)
    assert run(group, rank) == results[rank], f"rank {rank}: the group did not go on"
    try:
        extension.run_group(plan, group, 0, 0, 0, 1, 0, 0, OnCpu((1, 1, 1, 1)), *[None] * 8)
    except ValueError as error:
        assert "q is on the CPU, expected cuda:0" in str(error), error
    if rank < RANKS - 1:  # the last rank does not come any more
        for expected in ("waited 3 seconds for the other ranks", "the group is broken"):
            try:
                run(group, rank)
            except RuntimeError as error:
                assert expected in str(error), error
            else:
                raise AssertionError(f"rank {rank}: no RuntimeError: {expected}")
    done.append(rank)


class OnCpu(Tensor):
    def get_device(self):
        return -1


done = []
context = [ctypes.c_void_p() for _ in range(RANKS)]
assert driver.cuInit(0) == 0
threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

assert sorted(done) == list(range(RANKS)), done
assert sums == [[3.0 + 3 * n / 8 for n in range(5)]] * RANKS, sums
assert all("rank 1 passes another value of scale than rank 0" in (m or "") for m in messages), messages

# The same attention in plain Python.
q, k, v = whole(0), whole(7), whole(19)
for row in range(RANKS * ROWS):
    for h in range(H):
        scores = [
            0.25 * sum(q[(row * H + h) * D + i] * k[(key * H + h) * D + i] for i in range(D)) for key in range(row + 1)
        ]
        weights = [math.exp(s - max(scores)) for s in scores]
        for i in range(D):
            exact = sum(w * v[(key * H + h) * D + i] for key, w in enumerate(weights)) / sum(weights)
            found = results[row // ROWS][((row % ROWS) * H + h) * D + i]
            assert abs(found - exact) < 1e-5, (row, h, i, found, exact)
print("all ranks are done")
