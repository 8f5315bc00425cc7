#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the formulas of cotangent/mhc.h written in PyTorch, on cases of `cotangent bench --backend cuda`, and ours.

    tools/peers/mhc.py [--device cpu|cuda] [--threads N] [--only TEXT] [--peer TEXT] [--json FILE] [--library FILE]
                       [--seconds N]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with the keys of
`cotangent bench --json`, timed as protocol.py describes. `ceiling` is torch's copy_ at the same footprint. Our rows have
"ours". The peers are the plain formulas, eager and through torch.compile, and their autograd.
"""
import functools

import protocol
import torch

ITERATIONS, EPS, POST_SCALE = 20, 1e-6, 2.0
SHAPES = [(8192, 4, 4096, "bf16"), (8192, 4, 7168, "bf16"), (8192, 4, 1280, "bf16"), (40, 4, 4096, "bf16"),
          (8192, 2, 4096, "bf16"), (4096, 8, 4096, "bf16")]


# ---- the formulas


def pre(x, phi, alpha, bias):
    """h_in, h_post, h_res_logits; x [T,n,D]."""
    T, n, D = x.shape
    flat = x.float().reshape(T, n * D)
    inv_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    u = (flat @ phi.t()) * inv_rms
    scale = torch.cat([alpha[0:1].expand(n), alpha[1:2].expand(n), alpha[2:3].expand(n * n)])
    z = u * scale + bias
    h_pre = torch.sigmoid(z[:, :n]) + EPS
    h_post = POST_SCALE * torch.sigmoid(z[:, n:2 * n])
    h_in = (h_pre.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)
    return h_in, h_post, z[:, 2 * n:].reshape(T, n, n)


def sinkhorn(h_res_logits):
    h_res = torch.softmax(h_res_logits, -1) + EPS
    h_res = h_res / (h_res.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + EPS)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + EPS)
    return h_res


def post(x, f, h_post, h_res):
    """y [T,n,D]."""
    y = torch.einsum("tio,tid->tod", h_res, x.float()) + h_post.unsqueeze(-1) * f.float().unsqueeze(1)
    return y.to(x.dtype)


FUNCTIONS = {"mhc_pre": pre, "mhc_sinkhorn": sinkhorn, "mhc_post": post}
# As bench names what these calls compute.
OPTIONS = {("mhc_pre", "forward"): "phi~1/nD", ("mhc_pre", "backward"): "phi~1/nD+dh_res_logits",
           ("mhc_sinkhorn", "forward"): f"iterations={ITERATIONS}", ("mhc_sinkhorn", "backward"): f"iterations={ITERATIONS}",
           ("mhc_post", "forward"): "h_res[in,out]", ("mhc_post", "backward"): "h_res[in,out]"}


def footprint_of(op, direction, T, n, D, dtype):
    """Bytes of the inputs and outputs."""
    M, size, backward = n * (n + 2), protocol.DTYPES[dtype].itemsize, direction == "backward"
    if op == "mhc_sinkhorn":
        return (12 if backward else 8) * T * n * n
    if op == "mhc_pre":
        small = 4 * (M * n * D + M + 3) + 4 * T * (2 * M + 1)
        return ((2 * n + 1) * T * D * size + 2 * small) if backward else ((n + 1) * T * D * size + small)
    small = 4 * T * (n * n + n)
    return ((3 * n + 2) * T * D * size + 2 * small) if backward else ((2 * n + 1) * T * D * size + small)


# ---- one case: data are the function's inputs and the gradients of its outputs


def data_of(op, T, n, D, dtype, device):
    def f32(*shape, scale=1.0):
        return protocol.normal(shape, "f32", device, scale)

    def like_x(*shape):
        return protocol.normal(shape, dtype, device)

    M = n * (n + 2)
    if op == "mhc_pre":
        return ([like_x(T, n, D), f32(M, n * D, scale=(n * D)**-0.5), f32(3), f32(M)],
                [like_x(T, D), f32(T, n), f32(T, n, n)])
    if op == "mhc_sinkhorn":
        return [f32(T, n, n)], [f32(T, n, n)]
    return [like_x(T, n, D), like_x(T, D), f32(T, n), f32(T, n, n)], [like_x(T, n, D)]


def peer_call(function, direction):
    """A function from the data to the peer's call."""
    def call_on(data):
        inputs, upstream = data
        if direction == "forward":
            return lambda: function(*inputs)
        leaves = [value.detach().requires_grad_() for value in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    return call_on


def our_pre(ours, direction, inputs, upstream):
    x, phi, alpha, bias = inputs
    T, n, D = x.shape

    def f32(*shape):
        return torch.empty((1, T, *shape), device=x.device)

    options = {"hc_eps": EPS, "post_scale": POST_SCALE}
    given = {"x": x[None], "phi": phi, "alpha": alpha}
    saved = {"h_pre": f32(n), "h_post": f32(n), "inv_rms": f32(), "h_mix": f32(n * (n + 2))}
    forward = ours.call("mhc_pre_forward", "h_in h_post h_res_logits", **options, norm_eps=EPS, **given, bias=bias, **saved,
                        h_in=torch.empty_like(upstream[0])[None], h_res_logits=f32(n, n))
    if direction == "forward":
        return forward
    forward()
    dh_in, dh_post, dh_res_logits = (value[None] for value in upstream)
    return ours.call("mhc_pre_backward", "dx dphi dalpha dbias", **options, **given, **saved, dh_in=dh_in, dh_post=dh_post,
                     dh_res_logits=dh_res_logits, dx=torch.empty_like(x)[None], dphi=torch.empty_like(phi),
                     dalpha=torch.empty_like(alpha), dbias=torch.empty_like(bias))


def our_sinkhorn(ours, direction, inputs, upstream):
    h_res_logits, options = inputs[0][None], {"eps": EPS, "iterations": ITERATIONS}
    if direction == "forward":
        return ours.call("mhc_sinkhorn_forward", "h_res", **options, h_res_logits=h_res_logits, h_res=torch.empty_like(h_res_logits))
    return ours.call("mhc_sinkhorn_backward", "dh_res_logits", **options, h_res_logits=h_res_logits, dh_res=upstream[0][None],
                     dh_res_logits=torch.empty_like(h_res_logits))


def our_post(ours, direction, inputs, upstream):
    given = dict(zip(("x", "f", "h_post", "h_res"), (value[None] for value in inputs)))
    if direction == "forward":
        return ours.call("mhc_post_forward", "y", **given, y=torch.empty_like(given["x"]))
    gradients = {f"d{name}": torch.empty_like(value) for name, value in given.items()}
    return ours.call("mhc_post_backward", "dx df dh_post dh_res", **given, dy=upstream[0][None], **gradients)


def our_call(ours, op, direction):
    make = {"mhc_pre": our_pre, "mhc_sinkhorn": our_sinkhorn, "mhc_post": our_post}[op]
    return lambda data: make(ours, direction, *data)


def measure(op, direction, shape, options, ours):
    T, n, D, dtype = shape
    footprint = footprint_of(op, direction, *shape)
    torch._dynamo.reset()  # each case is compiled for its own shapes
    makers = {"cotangent": our_call(ours, op, direction)} if ours is not None else {}
    makers |= {f"torch {torch.__version__} eager": peer_call(FUNCTIONS[op], direction),
               f"torch {torch.__version__} compile": peer_call(torch.compile(FUNCTIONS[op], dynamic=False), direction)}
    data = [data_of(op, *shape, options.device) for _ in range(protocol.copies_for(footprint, options.device))]
    has_width = op != "mhc_sinkhorn"
    with torch.set_grad_enabled(direction == "backward"):
        return protocol.memory_rows(makers, data, footprint, options, op=op, direction=direction,
                                    dtype=dtype if has_width else "f32", layout="token-major",
                                    shape=f"B1 T{T} n{n}" + (f" D{D}" if has_width else ""), options=OPTIONS[op, direction])


def cases(options, ours):
    for op in FUNCTIONS:
        for shape in SHAPES:
            T, n, D, dtype = shape
            if op == "mhc_sinkhorn" and D != 4096:
                continue
            for direction in ("forward", "backward"):
                yield (f"{op} {direction} {dtype} B1 T{T} n{n} D{D}",
                       functools.partial(measure, op, direction, shape, options, ours))


def main():
    options, ours = protocol.begin(protocol.parser_of(__doc__))
    protocol.run(cases(options, ours), options)


if __name__ == "__main__":
    main()
