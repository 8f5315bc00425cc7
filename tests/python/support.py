# SPDX-License-Identifier: Apache-2.0
"""Compares an op with its formula in plain PyTorch. The formula runs in float64. Results and gradients must agree
within a few units of the dtype, relative to the size of the formula's result."""
import torch

UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def close(found, expected, about, dtype, units):
    """Compares the norms. `cotangent check` tests the elementwise error rule."""
    assert found.shape == expected.shape, f"{about}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, wanted = found.detach().double(), expected.detach().double()
    error, size = (found - wanted).norm().item(), wanted.norm().item()
    assert error <= units * UNITS[dtype] * size, f"{about}: error {error:.3g} of {size:.3g}, in {dtype}"


def compare(op, formula, tensors, dtype=None, units=4.0):
    """Compares op(*tensors) with formula(*the tensors in float64), and their gradients for random gradients of the
    results. dtype: the coarsest dtype, if it is not that of the tensors. units: the allowed error in roundings of that
    dtype."""
    dtype = dtype or next(t.dtype for t in tensors if t is not None and t.is_floating_point())
    ours = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in tensors]
    theirs = [t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_() for t in tensors]
    found, expected = (r if isinstance(r, tuple) else (r,) for r in (op(*ours), formula(*theirs)))
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected)):
        close(f, e, f"result {i}", dtype, units)
    with_gradient = [i for i, f in enumerate(found) if f.requires_grad]
    gradients = [torch.randn_like(found[i]) for i in with_gradient]
    torch.autograd.backward([found[i] for i in with_gradient], gradients)
    torch.autograd.backward([expected[i] for i in with_gradient], [g.double() for g in gradients])
    for i, (f, e) in enumerate(zip(ours, theirs)):
        if f is not None and f.is_floating_point():
            assert f.grad is not None, f"argument {i} has no gradient"
            close(f.grad, torch.zeros_like(e) if e.grad is None else e.grad, f"gradient of argument {i}", dtype, units)
