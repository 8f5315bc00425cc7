#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training steps of GPT-2 in PyTorch, with the sizes and the optimiser of `train_lm --preset gpt2-124m`.

    tools/peers/train_gpt2.py [--model 124m|350m|tiny] [--batch N] [--accumulate N] [--context N] [--steps N]
                              [--warm N] [--device cuda|cpu] [--eager] [--mode MODE] [--attention NAME] [--json FILE]

The model has float32 parameters and runs under autocast in bf16, through torch.compile. A step is forward and backward of
--accumulate batches, the norm of the gradient, clipping, and the fused AdamW. Attention is
torch.nn.functional.scaled_dot_product_attention with the backend that is fastest on these shapes, forward and backward;
--attention chooses one (cudnn, flash, efficient or math). The tokens are random. Prints one JSON row.
"""
import argparse
import json
import math
import time

import torch
import torch.nn.functional as functional

MODELS = {"124m": (12, 12, 768, 50304), "350m": (24, 16, 1024, 50304), "tiny": (2, 2, 32, 256)}  # layers, heads, width
SWITCHES = {"cudnn": torch.backends.cuda.enable_cudnn_sdp, "flash": torch.backends.cuda.enable_flash_sdp,
            "efficient": torch.backends.cuda.enable_mem_efficient_sdp, "math": torch.backends.cuda.enable_math_sdp}
PEAK = {"H100": 989e12, "H200": 989e12}


def attention(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(torch.nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attn_in, self.attn_out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp_in, self.mlp_out = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.attn_in(self.ln_1(x)).split(C, dim=2))
        x = x + self.attn_out(attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, layers, heads, width, vocabulary, context):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith("_out.weight")
                torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[:inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def optimizer_of(model, device):
    decays = [p for name, p in model.named_parameters() if p.dim() == 2 and "positions" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "positions" in name]
    return torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                             lr=6e-4, betas=(0.9, 0.98), eps=1e-8, fused=device == "cuda")


def use_attention(chosen):
    for name, switch in SWITCHES.items():
        switch(name == chosen)


def fastest_attention(batch, heads, context, size):
    """Times each backend on q, k and v as the model has them."""
    seconds = {}
    for name in SWITCHES:
        use_attention(name)
        try:
            packed = torch.randn(batch, context, 3, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dout = torch.randn(batch, heads, context, size, device="cuda", dtype=torch.bfloat16)
            for repeat in range(6):
                if repeat == 3:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
                attention(q, k, v).backward(dout)
            torch.cuda.synchronize()
            seconds[name] = (time.perf_counter() - start) / 3
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{name}: {str(error).splitlines()[0][:100]}")
    print("attention, ms forward and backward:", {name: round(1e3 * s, 2) for name, s in seconds.items()})
    return min(seconds, key=seconds.get)


def add_options(parser, models):
    parser.add_argument("--model", choices=models, default=next(iter(models)))
    for name, value in {"batch": 32, "accumulate": 2, "context": 1024, "steps": 40, "warm": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--attention", choices=SWITCHES)
    parser.add_argument("--json")


def choose_attention(options, heads, size):
    """The name of the backend that the model will use."""
    if options.device != "cuda":
        return "default"
    chosen = options.attention or fastest_attention(options.batch, heads, options.context, size)
    use_attention(chosen)
    return chosen


def measure(model, compiled, optimizer, options, row, flops):
    """Times steps on random tokens. Prints `row` with the results as JSON. flops: of a token; parameters: of the model."""
    cuda = options.device == "cuda"
    tokens = torch.randint(0, 256, (options.accumulate, options.batch, options.context + 1), device=options.device)

    def step():
        for batch in tokens:
            with torch.autocast(options.device, dtype=torch.bfloat16):
                loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            (loss / options.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    start = time.perf_counter()
    for _ in range(options.warm):
        loss = step()
    loss.item()
    print(f"{options.warm} first steps: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    final = loss.item()
    seconds = (time.perf_counter() - start) / options.steps
    rate = options.batch * options.accumulate * options.context / seconds
    device = torch.cuda.get_device_name() if cuda else "cpu"
    peak = next((value for name, value in PEAK.items() if name in device), None)
    row |= {"kernel": f"torch {torch.__version__}", "compile": "eager" if options.eager else options.mode,
            "parameters": sum(p.numel() for p in model.parameters()), "batch": options.batch,
            "accumulate": options.accumulate, "context": options.context, "steps": options.steps,
            "ms_per_step": round(1e3 * seconds, 3), "tokens_per_second": round(rate),
            "mfu": round(rate * flops / peak, 4) if peak else None, "loss": round(final, 4),
            "memory_gb": round(1e-9 * torch.cuda.max_memory_allocated(), 2) if cuda else None, "device": device}
    print(json.dumps(row))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([row], file)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, MODELS)
    options = parser.parse_args()
    layers, heads, width, vocabulary = MODELS[options.model]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    backend = choose_attention(options, heads, width // heads)
    model = GPT2(layers, heads, width, vocabulary, options.context).to(options.device)
    compiled = model if options.eager else torch.compile(model, mode=options.mode)
    products = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.positions.weight.numel()
    flops = 6 * products + 6 * layers * width * options.context  # of a token: as train_lm counts them
    measure(model, compiled, optimizer_of(model, options.device), options,
            {"trained": f"gpt2-{options.model}", "attention": backend}, flops)


if __name__ == "__main__":
    main()
