#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures tokens/s of training steps of transformers models with random weights, for each attention implementation.

    tools/measure_transformers.py [--device cuda] [--models llama-350m,mamba2-370m] [--implementations eager,sdpa,cotangent]
                                  [--batch 4] [--length 4096] [--padding 0.0] [--steps 10] [--json FILE]
                                  [--layers N] [--width N] [--vocab N] [--commit TEXT]

An implementation is one of transformers' (eager, sdpa, flash_attention_4) or cotangent. With cotangent the convolution of
hybrid models is cotangent's too, with the others it is that of the installed causal_conv1d or plain PyTorch. Each runs in
a process of its own. A step is forward, backward and AdamW, without recomputation. The time is the median of the steps
after two for warm-up. --padding is the share of the tokens that are padding, on the left. --layers, --width and --vocab
replace the sizes of a model. An implementation may be named twice: in turns, the means are fairer. --commit is written into
the record, which `make tables` reads from bench/results/DATE-DEVICE-transformers.json. The last line for a model compares the implementations' losses.
"""
import argparse
import datetime
import importlib.util
import json
import statistics
import subprocess
import sys
import time

# Names of transformers' classes, and sizes. Every vocabulary has 32000 tokens, so that the embedding does not hide the rest.
MODELS = {
    "llama-350m": ("LlamaForCausalLM", "LlamaConfig",
                   dict(hidden_size=1024, num_hidden_layers=24, intermediate_size=2816, num_attention_heads=16,
                        num_key_value_heads=4, head_dim=64)),
    "mistral-1b": ("MistralForCausalLM", "MistralConfig",
                   dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=7168, num_attention_heads=16,
                        num_key_value_heads=4, head_dim=128, sliding_window=1024)),
    "gemma2-1b": ("Gemma2ForCausalLM", "Gemma2Config",
                  dict(hidden_size=1152, num_hidden_layers=26, intermediate_size=6912, num_attention_heads=4,
                       num_key_value_heads=1, head_dim=256, sliding_window=512)),
    "gemma3-1b": ("Gemma3ForCausalLM", "Gemma3TextConfig",
                  dict(hidden_size=1152, num_hidden_layers=26, intermediate_size=6912, num_attention_heads=4,
                       num_key_value_heads=1, head_dim=256, sliding_window=512)),
    "mamba2-370m": ("Mamba2ForCausalLM", "Mamba2Config",
                    dict(hidden_size=1024, num_hidden_layers=48, state_size=128, expand=2, head_dim=64, num_heads=32, n_groups=1)),
}  # fmt: skip


def make(arguments, dtype):
    """The model, the number of its parameters, and its layers and width."""
    import torch
    import transformers

    model_name, config_name, options = MODELS[arguments.models]
    sizes = dict(options, vocab_size=arguments.vocab, pad_token_id=0)
    if arguments.layers:
        sizes["num_hidden_layers"] = arguments.layers
    if arguments.width:
        scale = arguments.width / options["hidden_size"]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_heads"):
            if name in sizes:
                sizes[name] = max(1, int(sizes[name] * scale))
    config = getattr(transformers, config_name)(**sizes, attn_implementation=arguments.implementations, use_cache=False)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).to(arguments.device, dtype).train()
    return model, sum(p.numel() for p in model.parameters()), sizes["num_hidden_layers"], sizes["hidden_size"]


def installed(package):
    """The package's name if it can be imported, else PyTorch, which then computes what it would."""
    return package if importlib.util.find_spec(package) else "PyTorch"


def measure(arguments):
    """Losses and median time of the steps of one implementation."""
    import torch
    import transformers

    if arguments.implementations == "cotangent":
        import cotangent.integrations.transformers

        cotangent.integrations.transformers.enable()
    dtype = getattr(torch, arguments.dtype)
    model, parameters, layers, width = make(arguments, dtype)
    tokens = torch.randint(1, arguments.vocab, (arguments.batch, arguments.length), device=arguments.device)
    mask = torch.ones_like(tokens)
    padding = int(arguments.padding * arguments.length)
    mask[1:, :padding] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=arguments.device == "cuda")
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
    convolution = "cotangent" if arguments.implementations == "cotangent" else installed("causal_conv1d")
    return dict(op="transformers", date=datetime.date.today().isoformat(), commit=arguments.commit, backend=arguments.device,
                model=arguments.models, implementation=arguments.implementations, convolution=convolution,
                scan=installed("mamba_ssm"), device=device, torch=torch.__version__, transformers=transformers.__version__,
                dtype=arguments.dtype, batch=arguments.batch, length=arguments.length, layers=layers, width=width,
                parameters=parameters, vocab=arguments.vocab, padding=arguments.padding,
                tokens_per_s=int(mask.sum()) / seconds, gib=memory, losses=losses)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--implementations", default="eager,sdpa,cotangent")
    parser.add_argument("--dtype", default="bfloat16")
    for name, default in (("batch", 4), ("length", 4096), ("layers", 0), ("width", 0), ("vocab", 32000), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--padding", type=float, default=0.0)
    parser.add_argument("--commit", default="")
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
