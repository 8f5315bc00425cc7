#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures tokens/s of training steps of transformers models with random weights, for each attention implementation.

    tools/measure_transformers.py [--device cuda] [--models llama,mamba2] [--implementations eager,sdpa,cotangent]
                                  [--batch 4] [--length 4096] [--layers 8] [--width 2048] [--vocab 32000] [--padding 0.0]
                                  [--steps 10] [--json FILE]

An implementation is one of transformers' (eager, sdpa, flash_attention_2) or cotangent. With cotangent the convolution of
hybrid models is cotangent's too, with the others it is that of the installed causal_conv1d or plain PyTorch. Each runs in
a process of its own, after a warm-up, and the time is the median of the steps. --padding is the share of the tokens that
are padding, on the left. The last line for a model compares the implementations' losses.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(sliding_window=1024)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(sliding_window=1024)),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", dict(sliding_window=128, num_local_experts=4, num_experts_per_tok=2)),
    "mamba": ("MambaForCausalLM", "MambaConfig", {}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", dict(expand=2, n_groups=1, state_size=64)),
}


def make(name, width, layers, vocab, dtype, device, implementation):
    import torch
    import transformers

    model_name, config_name, options = MODELS[name]
    heads = max(width // 128, 1)
    sizes = dict(vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, pad_token_id=0)
    if name not in ("mamba", "mamba2"):
        sizes.update(intermediate_size=3 * width, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), head_dim=128)
    if name == "mamba2":
        sizes.update(head_dim=64, num_heads=2 * width // 64)
    config = getattr(transformers, config_name)(**{**sizes, **options}, attn_implementation=implementation, use_cache=False)
    torch.manual_seed(0)
    return getattr(transformers, model_name)(config).to(device, dtype).train()


def measure(arguments):
    """Losses and median time of the steps of one implementation."""
    import torch

    if arguments.implementations == "cotangent":
        import cotangent.integrations.transformers

        cotangent.integrations.transformers.register()
    dtype = getattr(torch, arguments.dtype)
    model = make(arguments.models, arguments.width, arguments.layers, arguments.vocab, dtype, arguments.device,
                 arguments.implementations)  # fmt: skip
    tokens = torch.randint(1, arguments.vocab, (arguments.batch, arguments.length), device=arguments.device)
    mask = torch.ones_like(tokens)
    padding = int(arguments.padding * arguments.length)
    mask[1:, :padding] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, times = [], []
    for step in range(arguments.steps + 2):
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, attention_mask=mask if padding else None, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        if step >= 2:
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    memory = torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None
    return dict(model=arguments.models, implementation=arguments.implementations, device=device, torch=torch.__version__,
                dtype=arguments.dtype, batch=arguments.batch, length=arguments.length, layers=arguments.layers,
                width=arguments.width, padding=arguments.padding, tokens_per_s=int(mask.sum()) / seconds, gib=memory,
                losses=losses)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="llama,mistral,gemma2,mamba,mamba2")
    parser.add_argument("--implementations", default="eager,sdpa,cotangent")
    parser.add_argument("--dtype", default="bfloat16")
    for name, default in (("batch", 4), ("length", 4096), ("layers", 8), ("width", 2048), ("vocab", 32000), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--padding", type=float, default=0.0)
    parser.add_argument("--json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return 0
    results, failed = [], False
    for model in arguments.models.split(","):
        found = []
        for implementation in arguments.implementations.split(","):
            command = [sys.executable, __file__, *sys.argv[1:], "--child", "--models", model, "--implementations", implementation]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                message = (done.stderr.strip().splitlines() or ["no message"])[-1]
                refused = "does not support" in message  # by transformers: gemma2 and gpt_oss have no sdpa
                print(f"{model:10s} {implementation:18s} {'not supported' if refused else 'failed'}: {message[:200]}")
                failed |= not refused
                continue
            found.append(json.loads(done.stdout.splitlines()[-1]))
            memory = "" if found[-1]["gib"] is None else f", {found[-1]['gib']:.1f} GiB"
            print(f"{model:10s} {implementation:18s} {found[-1]['tokens_per_s']:12.0f} tokens/s{memory}", flush=True)
        if len(found) > 1:
            spread = max(max(r["losses"][i] for r in found) - min(r["losses"][i] for r in found) for i in range(len(found[0]["losses"])))
            print(f"{model:10s} largest difference of a loss: {spread:.3g} of {found[0]['losses'][0]:.4g}")
        results += found
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
