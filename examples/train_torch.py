#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level language model with cotangent's ops or PyTorch's, on the CPU, on one GPU or on several.

Each layer has a causal convolution or attention, then dropout, and a hyper-connection to the residual streams. Usage:

    train_torch.py                                 # trains a model and prints a sample
    train_torch.py --compare curve.svg             # both kinds of ops, three seeds each: losses, speed, gnuplot picture
    torchrun --nproc-per-node 2 train_torch.py     # batches divided among processes: gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 2 train_torch.py --context-parallel    # each sequence divided among processes

Text: --text FILES, by default the licences of /usr/share/common-licenses and the documents and sources of this tree.
The last 10 % of each file are held out.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cotangent
import cotangent.distributed

# ---- the ops: PyTorch's and cotangent's ----------------------------------------------------------------------------


class TorchOps:
    """The same functions as CotangentOps, in plain PyTorch."""

    @staticmethod
    def convolution(x, weight, bias):
        D, K = weight.shape
        return F.silu(F.conv1d(F.pad(x, (K - 1, 0)), weight[:, None], bias, groups=D))

    @staticmethod
    def attention(q, k, v):
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)

    @staticmethod
    def dropout(x, p, training, bias):
        return F.dropout(x + bias, p, training)

    @staticmethod
    def pre(x, phi, alpha, bias, gamma):
        B, T, n, D = x.shape
        flat = x.float().flatten(2)
        inv_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        u = F.linear(flat, phi * gamma.flatten()) * inv_rms
        z_pre, z_post, z_res = (a * part + b for a, part, b in
                                zip(alpha, u.split([n, n, n * n], -1), bias.split([n, n, n * n])))  # fmt: skip
        h_res = torch.softmax(z_res.unflatten(-1, (n, n)), -1) + 1e-6
        h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            h_res = h_res / (h_res.sum(-1, keepdim=True) + 1e-6)
            h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
        h_in = torch.einsum("btn,btnd->btd", torch.sigmoid(z_pre) + 1e-6, x.float())
        return h_in.to(x.dtype), 2 * torch.sigmoid(z_post), h_res

    @staticmethod
    def post(x, f, h_post, h_res):
        mixed = torch.einsum("btio,btid->btod", h_res, x.float()) + h_post[..., None] * f[:, :, None].float()
        return mixed.to(x.dtype)

    @classmethod
    def post_pre(cls, x, f, h_post, h_res, *parameters):
        """post of a layer and pre of the next: (streams, h_in, h_post, h_res)."""
        streams = cls.post(x, f, h_post, h_res)
        return streams, *cls.pre(streams, *parameters)


class CotangentOps:
    @staticmethod
    def convolution(x, weight, bias):
        return cotangent.causal_conv1d(x, weight, bias, "silu")

    @staticmethod
    def attention(q, k, v):
        return cotangent.attention(q, k, v, causal=True)

    @staticmethod
    def dropout(x, p, training, bias):
        return cotangent.dropout(x, p, training, bias=bias)

    pre = staticmethod(cotangent.mhc_pre)
    post = staticmethod(cotangent.mhc_post)
    post_pre = staticmethod(cotangent.mhc_post_pre)


class ContextParallelOps(CotangentOps):
    """Each process has its tokens of every sequence. The other ops work on each token separately."""

    @staticmethod
    def convolution(x, weight, bias):
        return cotangent.distributed.causal_conv1d(x, weight, bias, "silu", cut="zigzag")

    @staticmethod
    def attention(q, k, v):
        return cotangent.distributed.attention(q, k, v, causal=True, cut="zigzag")


def ops_for(name, context_parallel=False):
    """The class of ops."""
    return TorchOps if name == "torch" else ContextParallelOps if context_parallel else CotangentOps


# ---- the model -------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A gated convolution: silu(conv(u)) * g, with [u|g] from one product."""

    def __init__(self, ops, D, K=4):
        super().__init__()
        self.ops = ops
        self.in_proj, self.out_proj = nn.Linear(D, 4 * D, bias=False), nn.Linear(2 * D, D, bias=False)
        self.weight = nn.Parameter(torch.randn(2 * D, K) / math.sqrt(K))
        self.bias = nn.Parameter(torch.zeros(2 * D))

    def forward(self, x):
        u, g = self.in_proj(x).transpose(1, 2).chunk(2, 1)  # channel-last views, no copy
        return self.out_proj((self.ops.convolution(u, self.weight, self.bias) * g).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, ops, D, head_dim=32):
        super().__init__()
        self.ops, self.head_dim = ops, head_dim
        self.qkv_proj, self.out_proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        return self.out_proj(self.ops.attention(q, k, v).flatten(2))


class Layer(nn.Module):
    """streams -> pre -> norm -> mixer -> dropout(+ bias) -> post -> streams

    Post of a layer and pre of the next are one op, post_pre. So a layer returns the arguments of its post, and begins with
    the post of the layer before. cotangent.HyperConnection would always run cotangent's ops. This layer takes the ops as
    an argument, so that both kinds of ops run the same model. alpha starts at 0.1 and the diagonal of res at 4, where
    cotangent.HyperConnection has 0.01 and 8: the curves in docs/plots were measured with these values."""

    def __init__(self, ops, mixer, D, n, p):
        super().__init__()
        M = n * n + 2 * n
        self.ops, self.p, self.mixer, self.norm = ops, p, mixer, nn.RMSNorm(D)
        self.dropout_bias = nn.Parameter(torch.zeros(D))
        self.phi = nn.Parameter(torch.randn(M, n * D) / math.sqrt(n * D))
        self.alpha = nn.Parameter(torch.full((3,), 0.1))
        start = torch.cat([torch.full((n,), -math.log(n - 1) if n > 1 else 4.0), torch.zeros(n), 4 * torch.eye(n).flatten()])
        self.hc_bias = nn.Parameter(start)
        self.gamma = nn.Parameter(torch.ones(n, D))

    def forward(self, streams, *before):
        """before: f, h_post and h_res of the previous layer, whose post has not run yet: streams are then the streams
        before the previous layer. The first layer has no previous layer."""
        parameters = self.phi, self.alpha, self.hc_bias, self.gamma
        if before:
            streams, h_in, h_post, h_res = self.ops.post_pre(streams, *before, *parameters)
        else:
            h_in, h_post, h_res = self.ops.pre(streams, *parameters)
        mixed = self.mixer(self.norm(h_in.float()))  # the norm's weights are float32
        f = self.ops.dropout(mixed, self.p, self.training, self.dropout_bias)
        return streams, f.to(streams.dtype), h_post, h_res


class Model(nn.Module):
    def __init__(self, ops, D, layers, n, p):
        super().__init__()
        self.ops, self.n = ops, n
        self.embedding = nn.Embedding(256, D)
        self.layers = nn.ModuleList(
            Layer(ops, Attention(ops, D) if i % 3 == 2 else Convolution(ops, D), D, n, p) for i in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, 256, bias=False)

    def forward(self, text):
        x = self.embedding(text)
        if torch.is_autocast_enabled(x.device.type):  # autocast does not cast the streams
            x = x.to(torch.get_autocast_dtype(x.device.type))
        state = (x[:, :, None].repeat(1, 1, self.n, 1),)
        for layer in self.layers:
            state = layer(*state)
        return self.head(self.norm(self.ops.post(*state).float().sum(2)))


# ---- text ------------------------------------------------------------------------------------------------------


def read_text(files):
    if not files:
        tree = Path(__file__).resolve().parents[1]
        files = sorted(p for p in Path("/usr/share/common-licenses").glob("*") if p.is_file() and not p.is_symlink())
        files += sorted(p for e in ("md", "c", "h", "py", "cu") for p in tree.rglob(f"*.{e}")
                        if not any(part.startswith(".") or part == "build" for part in p.relative_to(tree).parts))  # fmt: skip
    training, held_out = b"", b""
    for path in files:
        text = Path(path).read_bytes()
        cut = len(text) * 9 // 10
        training, held_out = training + text[:cut], held_out + text[cut:]
    if len(held_out) < 10000:
        count = len(training) + len(held_out)
        raise SystemExit(f"train_torch: {count} bytes of text are too few: at least 100000 are needed")
    return (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (training, held_out))


def windows(text, count, length, generator):
    """`count` windows of length+1 bytes at random positions."""
    starts = torch.randint(0, len(text) - length - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]


# ---- training --------------------------------------------------------------------------------------------------

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print_rank0(*words):
    if rank == 0:
        print(*words, flush=True)


def mean_over_ranks(value):
    if ranks > 1:
        dist.all_reduce(value)
    return (value / ranks).item()


def cross_entropy(model, batch, device, options):
    """The mean over the bytes of this process. All processes have the same number of bytes."""
    text, targets = batch[:, :-1].to(device), batch[:, 1:].to(device)
    if options.context_parallel:
        text, targets = (cotangent.distributed.shard(part, dim=1, cut="zigzag") for part in (text, targets))
    with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bf16"):
        logits = model(text)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(options, ops_name, seed, training, held_out, device):
    """Trains one model. Returns [(step, training loss, validation loss)], tokens per second, and the model. The batches
    depend only on seed and step. Each process computes its share of every batch."""
    torch.manual_seed(seed)
    ops = ops_for(ops_name, options.context_parallel)
    model = Model(ops, options.width, options.layers, options.streams, options.dropout).to(device)
    torch.manual_seed(1000 * seed + rank)  # for dropout's masks
    trained = model
    if ranks > 1:
        trained = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    decayed, others = [], []  # no weight decay for biases, norms and alpha, bias and gamma of hyper-connections
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() > 1 and not name.endswith("gamma") else others).append(parameter)
    groups = [dict(params=decayed), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, options.lr, (0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * s / options.steps))
    )
    draw, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    validation = windows(held_out, 4 * options.batch, options.context, fixed).chunk(4)
    share = slice(rank * options.batch // ranks, (rank + 1) * options.batch // ranks)
    if options.context_parallel:
        share = slice(None)
    curve, seconds, tokens = [], 0.0, 0
    for step in range(1, options.steps + 1):
        batch = windows(training, options.batch, options.context, draw)[share]
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = cross_entropy(trained, batch, device, options)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step > 3:  # the first steps load code and allocate memory
            seconds += time.perf_counter() - start
            tokens += options.batch * options.context
        if step % options.eval_every == 0 or step == options.steps:
            model.eval()
            with torch.no_grad():
                validation_loss = sum(cross_entropy(model, part[share], device, options) for part in validation) / 4
            model.train()
            curve.append((step, mean_over_ranks(loss.detach().clone()), mean_over_ranks(validation_loss.clone())))
            losses = f"training {curve[-1][1]:.4f}  validation {curve[-1][2]:.4f}"
            print_rank0(f"{ops_name:9s} seed {seed} step {step:5d}  {losses}")
    return curve, tokens / seconds if seconds else float("nan"), model


def sample(model, device, length=300):
    """Generates text after a newline, one byte at a time."""
    text = torch.full((1, 1), 10, device=device)
    for module in model.modules():
        if getattr(module, "ops", None) is ContextParallelOps:
            module.ops = CotangentOps
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            probabilities = torch.softmax(model(text[:, -256:])[:, -1].float() / 0.8, -1)
            text = torch.cat([text, torch.multinomial(probabilities, 1)], 1)
    return bytes(text[0].tolist()).decode("utf-8", "replace")


# ---- comparing -------------------------------------------------------------------------------------------------

GNUPLOT = """set terminal svg size 800,480 font 'sans-serif,13' background 'white'
set output '{out}'
set title '{title}' noenhanced
set xlabel 'step'
set ylabel 'validation loss, nats per byte'
set key top right
set grid
plot {plots}
"""


def compare(options, training, held_out, device):
    curves, speeds = {}, {}
    for seed in range(3):
        for name in ("torch", "cotangent"):
            curve, speed, _ = train(options, name, seed, training, held_out, device)
            curves[name, seed] = curve
            speeds.setdefault(name, []).append(speed)
    worst = 0.0
    print_rank0("validation loss: mean over three seeds, and PyTorch's spread (largest - smallest)")
    for i, (step, _, _) in enumerate(curves["torch", 0]):
        plain, ours = ([curves[name, seed][i][2] for seed in range(3)] for name in ("torch", "cotangent"))
        spread, difference = max(plain) - min(plain), abs(sum(ours) - sum(plain)) / 3
        worst = max(worst, difference / spread)
        means = f"torch {sum(plain) / 3:.4f}  cotangent {sum(ours) / 3:.4f}"
        print_rank0(f"  step {step:5d}  {means}  difference {difference:.4f}  spread {spread:.4f}")
    for name, rates in speeds.items():
        print_rank0(f"{name:9s} {sorted(rates)[1]:10.0f} tokens/s (median of three runs)")
    print_rank0(f"the means differ by at most {worst:.2f} of the spread: {'within' if worst <= 1 else 'NOT within'} it")
    if rank == 0 and options.compare != "-":
        blocks, plots = [], []
        for (name, seed), curve in sorted(curves.items(), reverse=True):
            blocks.append(f"$d{len(blocks)} << EOD\n" + "\n".join(f"{s} {v}" for s, _, v in curve) + "\nEOD\n")
            style = "lw 5 lc rgb '#f4b183'" if name == "torch" else "lw 1.5 lc rgb '#1b4f9c'"  # drawn first, so below
            title = f"title '{'plain PyTorch ops' if name == 'torch' else 'cotangent'}'" if seed == 0 else "notitle"
            plots.append(f"$d{len(blocks) - 1} with lines {style} {title}")
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        title = f"train_torch.py on {device_name}, {options.dtype}, torch {torch.__version__}: three seeds each"
        script = "".join(blocks) + GNUPLOT.format(out=options.compare, title=title, plots=", \\\n     ".join(plots))
        Path(options.compare + ".gnuplot").write_text(script)
        try:
            subprocess.run(["gnuplot", options.compare + ".gnuplot"], check=True)
            os.remove(options.compare + ".gnuplot")
        except FileNotFoundError:
            print_rank0(f"no gnuplot here: run it on {options.compare}.gnuplot")
    return 0 if worst <= 1 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="*", help="files to learn from")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--ops", choices=("cotangent", "torch"), default="cotangent", help="whose ops run")
    parser.add_argument("--compare", metavar="SVG", help="train with both kinds of ops; - draws nothing")
    parser.add_argument("--width", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=6, help="every third one has attention, the others a convolution")
    parser.add_argument("--streams", type=int, default=4, help="residual streams of the hyper-connections")
    parser.add_argument("--context", type=int, default=128, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows per step, over all processes")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--eval-every", type=int, default=25, help="steps between two validations")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.1, help="the probability of dropping an element")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="bf16: autocast")
    parser.add_argument("--context-parallel", action="store_true", help="divide sequences, not batches, among processes")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, the batches and the dropout masks")
    parser.add_argument("--json", metavar="FILE", help="write the curve")
    options = parser.parse_args()
    if options.width % 32 != 0:
        parser.error(f"--width is {options.width}, expected a multiple of 32")
    if options.batch % ranks != 0 and not options.context_parallel:
        parser.error(f"--batch is {options.batch}, expected a multiple of the {ranks} processes")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.context_parallel:
        if ranks == 1:
            parser.error("--context-parallel needs several processes: start it with torchrun")
        if options.ops != "cotangent" or options.compare:
            parser.error(f"--context-parallel and --{'compare' if options.compare else 'ops torch'} exclude each other")
        if options.context % (2 * ranks) != 0:
            parser.error(f"--context has to be a multiple of {2 * ranks}, two chunks a process")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    training, held_out = read_text(options.text)
    print_rank0(f"{len(training)} bytes to train on, {len(held_out)} held out; {device}, {ranks} process(es)")
    status = 0
    if options.compare:
        status = compare(options, training, held_out, device)
    else:
        curve, speed, model = train(options, options.ops, options.seed, training, held_out, device)
        print_rank0(f"{options.ops}: {speed:.0f} tokens/s")
        if options.json and rank == 0:
            Path(options.json).write_text(json.dumps(curve))
        elif rank == 0:
            print(sample(model, device))
    if ranks > 1:
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
