#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libcotangent through ctypes for the peers' scripts: calls on torch's tensors, and NVML's clock and energy.

    tools/peers/library.py --test [FILE]

compares every call below with PyTorch, on the CPU, in the library FILE (build/libcotangent.so).
"""
import ctypes
import sys
import threading
import time

try:
    import torch
except ImportError:
    sys.exit(f"{sys.argv[0]}: torch is not installed (pip install torch)")

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float64: 4, torch.int32: 5, torch.uint8: 6}  # cot_dtype
ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2, "gelu_tanh": 3, "gelu_erf": 4}  # cot_activation


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 6), ("stride", ctypes.c_int64 * 6)]


class QueueOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("backend", ctypes.c_int32), ("threads", ctypes.c_int32),
                ("kernels", ctypes.c_char_p), ("device", ctypes.c_int32), ("stream", ctypes.c_void_p)]


def i32(names):
    return [(name, ctypes.c_int32) for name in names.split()]


def i64(names):
    return [(name, ctypes.c_int64) for name in names.split()]


def u64(names):
    return [(name, ctypes.c_uint64) for name in names.split()]


def f64(names):
    return [(name, ctypes.c_double) for name in names.split()]


def tensors(names):
    return [(name, Tensor) for name in names.split()]


def arguments(*fields):
    """The argument struct with these fields, which are in the header's order."""
    class Arguments(ctypes.Structure):
        _fields_ = [("struct_size", ctypes.c_size_t), *sum(fields, []), ("workspace", ctypes.c_void_p),
                    ("workspace_bytes", ctypes.c_size_t)]
    return Arguments


ATTENTION = (i32("causal window") + i64("window_left window_right") + f64("scale softcap dropout_p")
             + u64("dropout_seed dropout_offset") + i64("max_seqlen_q max_seqlen_k q_begin q_length k_begin k_length"))
ATTENTION_INPUTS = tensors("q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k sink alibi_slopes bias dropout_seed_tensor "
                           "dropout_offset_tensor")
CALLS = {
    "attention_forward": arguments(ATTENTION, ATTENTION_INPUTS, tensors("out lse")),
    "attention_backward": arguments(ATTENTION, i32("accumulate allow_nondeterminism"), ATTENTION_INPUTS,
                                    tensors("lse out dout dlse delta dq dk dv dsink dbias")),
    "causal_conv1d_forward": arguments(i32("activation"),
                                       tensors("x weight bias initial_state seq_idx cu_seqlens y final_state")),
    "causal_conv1d_backward": arguments(i32("activation accumulate"),
                                        tensors("x weight bias initial_state seq_idx cu_seqlens dy dfinal_state dx dweight "
                                                "dbias dinitial_state")),
    "dropout_forward": arguments(i32("activation"), f64("p scale"), u64("seed offset"),
                                 tensors("x bias residual mask mask_bits seed_tensor offset_tensor y mask_out "
                                         "mask_bits_out")),
    "dropout_backward": arguments(i32("activation accumulate"), f64("p scale"), u64("seed offset"),
                                  tensors("dy x bias mask mask_bits seed_tensor offset_tensor dx dbias")),
    "mhc_pre_forward": arguments(f64("norm_eps hc_eps post_scale sinkhorn_eps"), i32("sinkhorn_iterations"),
                                 tensors("x phi alpha bias gamma h_in h_pre h_post h_res_logits h_res inv_rms h_mix")),
    "mhc_pre_backward": arguments(f64("hc_eps post_scale sinkhorn_eps"), i32("sinkhorn_iterations accumulate"),
                                  tensors("x phi alpha bias gamma inv_rms h_mix h_pre h_post dh_in dh_post dh_res_logits dh_res dx_post "
                                          "dx dphi dalpha dbias dgamma")),
    "mhc_sinkhorn_forward": arguments(f64("eps"), i32("iterations"), tensors("h_res_logits h_res")),
    "mhc_sinkhorn_backward": arguments(f64("eps"), i32("iterations"), tensors("h_res_logits dh_res dh_res_logits")),
    "mhc_post_forward": arguments(i32("h_res_is_out_in"), tensors("x f h_post h_res y")),
    "mhc_post_backward": arguments(i32("h_res_is_out_in"), tensors("x f h_post h_res dy dx df dh_post dh_res")),
}


class Library:
    """A queue on a stream of torch's, or on the CPU."""

    def __init__(self, path, stream=None):
        self.library = ctypes.CDLL(str(path))
        self.library.cot_error_message.restype = ctypes.c_char_p
        self.queue, self.device = ctypes.c_void_p(), "cpu" if stream is None else "cuda"
        options = QueueOptions(struct_size=ctypes.sizeof(QueueOptions), backend=0, threads=torch.get_num_threads())
        if stream is not None:
            options.backend, options.threads, options.stream = 1, 0, stream.cuda_stream
        self.check(self.library.cot_queue_create(ctypes.byref(options), ctypes.byref(self.queue)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"cotangent: {self.library.cot_error_message().decode()}")

    def call(self, name, outputs, **fields):
        """A function that makes this call, with a workspace of its own, and returns the fields that `outputs` names."""
        values = {key: Tensor(value.data_ptr(), DTYPES[value.dtype], value.dim(), (ctypes.c_int64 * 6)(*value.shape),
                              (ctypes.c_int64 * 6)(*value.stride())) if isinstance(value, torch.Tensor) else value
                  for key, value in fields.items()}
        args = CALLS[name](struct_size=ctypes.sizeof(CALLS[name]), **values)
        size = ctypes.c_size_t()
        workspace = getattr(self.library, f"cot_{name}_workspace")
        self.check(workspace(self.queue, ctypes.byref(args), ctypes.byref(size)))
        memory = torch.empty(size.value + 256, dtype=torch.uint8, device=self.device)
        args.workspace, args.workspace_bytes = (memory.data_ptr() + 255) // 256 * 256, size.value
        function, results = getattr(self.library, f"cot_{name}"), [fields[key] for key in outputs.split()]

        def enqueue(held=(fields, memory)):
            del held  # the tensors live as long as the function
            self.check(function(self.queue, ctypes.byref(args)))
            return results
        return enqueue


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


# ---- the test


def error_of(result, expected):
    """Largest difference, relative to the largest expected value."""
    result, expected = (value.detach().double().reshape(expected.shape) for value in (result, expected))
    return ((result - expected).abs().max() / expected.abs().max()).item()


def test(path):
    """Errors of every call: [(name, [error of each output])]."""
    import causal_conv1d
    import dropout
    import mhc
    import torch.nn.functional as functional
    ours, results = Library(path), []
    torch.manual_seed(0)

    def compare(name, outputs, expected):
        expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        results.append((name, [error_of(*pair) for pair in zip(outputs, expected, strict=True)]))

    for direction in ("forward", "backward"):
        for layout, silu in ("channel-first", True), ("channel-last", False):
            data = causal_conv1d.data_of((direction, 2, 24, 40, "f32", layout, silu), "cpu")
            compare(f"causal_conv1d_{direction} {layout}", causal_conv1d.our_call(ours, direction, silu)(data)(),
                    causal_conv1d.peer_call(lambda: causal_conv1d.convolve, direction, silu)(data)())
        for op in mhc.FUNCTIONS:
            data = mhc.data_of(op, 24, 4, 32, "f32", "cpu")
            compare(f"{op}_{direction}", mhc.our_call(ours, op, direction)(data)(),
                    mhc.peer_call(mhc.FUNCTIONS[op], direction)(data)())

    # A mask that the forward draws and writes: y, and what the backward draws again, must agree with it.
    x, bias, residual, dy = data = dropout.data_of(30, 40, "f32", "cpu")
    mask, scale = torch.empty((30, 40), dtype=torch.uint8), 2.0
    ours.call("dropout_forward", "", activation=ACTIVATIONS["gelu_tanh"], p=0.5, seed=1, offset=2, x=x, mask_out=mask)()
    y = scale * mask * dropout.ACTIVATIONS["gelu_tanh"](x + bias) + residual
    compare("dropout_forward", dropout.our_call(ours, "forward", "gelu_tanh", 0.5)(data)(), y)
    compare("dropout_backward", dropout.our_call(ours, "backward", "gelu_tanh", 0.5)(data)(),
            torch.autograd.grad(y, (x, bias), dy))

    q, k, v, dout = (torch.randn((2, 24, 3, 16)) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty((2, 3, 24))
    leaves = [value.clone().requires_grad_() for value in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True).transpose(1, 2)
    compare("attention_forward", ours.call("attention_forward", "out", q=q, k=k, v=v, causal=1, out=out, lse=lse)(), expected)
    compare("attention_backward",
            ours.call("attention_backward", "dq dk dv", q=q, k=k, v=v, causal=1, lse=lse, out=out, dout=dout,
                      dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))(),
            torch.autograd.grad(expected, leaves, dout))
    return results


def main():
    if sys.argv[1:2] != ["--test"] or len(sys.argv) > 3:
        sys.exit("usage: library.py --test [FILE]")
    failed = False
    for name, errors in test(sys.argv[2] if len(sys.argv) > 2 else "build/libcotangent.so"):
        wrong = not max(errors) < 1e-5
        failed |= wrong
        print(f"{name:36}", *(f"{error:.1e}" for error in errors), "WRONG" if wrong else "")
    sys.exit(failed)


if __name__ == "__main__":
    main()
