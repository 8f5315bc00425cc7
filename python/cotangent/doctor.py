# SPDX-License-Identifier: Apache-2.0
"""python -m cotangent.doctor: reports what works on this machine, and how to fix problems. Every line begins with
  [ok] works     [--] is information: no error, but read the line     [!!] is a problem: the exit status is 1"""
from __future__ import annotations

import os
import platform
import sys

_wrong = 0


def _say(mark: str, about: str, text: str) -> None:
    global _wrong
    _wrong += mark == "!!"
    print(f"[{mark}] {about:25s} {text}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].replace(": see python -m cotangent.doctor", "")


def _code_of(capability: "tuple[int, int]") -> str:
    """Which GPU code runs on a device of this compute capability."""
    if capability < (8, 0):
        return "no kernels, they support 8.0 and later"
    if capability == (9, 0):
        return "machine code, with the kernels for Hopper"
    return ("the portable GPU kernels, as machine code if COT_GPUS named this GPU at build time, else as PTX, which the "
            "driver compiles at the first use")  # fmt: skip


def _try_ops(device: str) -> None:
    """Runs the forward and the backward of each op's example in float32 and in bfloat16."""
    import torch

    from cotangent import ops

    for name, module in ops.modules.items():
        works = []
        for dtype in (torch.float32, torch.bfloat16):

            def randn(*shape: int) -> torch.Tensor:
                return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

            about = str(dtype)[len("torch.") :]
            try:
                module._example(randn).sum().backward()
            except NotImplementedError as error:
                hint = "" if device == "cpu" else ": on the CPU it works"
                _say("--", f"{name}, {device}", f"{about}: {_first_line(error)}{hint}")
            except Exception as error:  # the report includes every exception
                _say("!!", f"{name}, {device}", f"{about}: {_first_line(error)}")
            else:
                works.append(about)
        if works:
            _say("ok", f"{name}, {device}", f"forward and backward in {' and '.join(works)}")


def main() -> int:
    _say("ok", "python", f"{platform.python_version()} ({sys.executable})")
    try:
        import torch
    except ImportError as error:
        _say("!!", "torch", f"{_first_line(error)}: install torch 2.4 or later")
        return 1
    _say("ok", "torch", torch.__version__)
    import cotangent

    try:
        cotangent.dropout_scale(0.5)  # calls the library
    except ImportError as error:
        _say("!!", "cotangent", _first_line(error))
        return 1
    _say("ok", "cotangent", f"{cotangent.__version__} ({os.path.dirname(cotangent.__file__)})")
    _say("ok", "threads", f"{torch.get_num_threads()} on the CPU: torch.set_num_threads changes that")
    if os.environ.get("COT_KERNEL"):
        _say("--", "COT_KERNEL", f"forces {os.environ['COT_KERNEL']}: unset it unless that is meant")
    _try_ops("cpu")
    if getattr(torch.version, "hip", None):
        _say("--", "rocm", "torch is a ROCm build, with which cotangent is not tested: the package supports CPU tensors, and no AMD GPU")
        return 1 if _wrong else 0
    if not torch.cuda.is_available():
        without_cuda = "this torch is built without CUDA: to use a GPU, install a CUDA build of torch"
        _say("--", "cuda", "torch finds no GPU" if torch.version.cuda else without_cuda)
        return 1 if _wrong else 0
    for number in range(torch.cuda.device_count()):
        try:
            cotangent.check_index_data(f"cuda:{number}")
        except Exception as error:
            _say("!!", f"cuda:{number}", _first_line(error))
            continue
        major, minor = capability = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        _say("ok", f"cuda:{number}", f"{name}, compute capability {major}.{minor}: {_code_of(capability)}")
        _try_ops(f"cuda:{number}")
    return 1 if _wrong else 0


if __name__ == "__main__":
    sys.exit(main())
