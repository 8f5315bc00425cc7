# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers for the tests, and their loss, gradients and tokens."""
import importlib
import sys

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Every expert is chosen, because a rounding error that changes the choice has no bound.
EXPERTS = dict(num_experts=2, num_local_experts=2, num_experts_per_tok=2, moe_intermediate_size=16)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, mamba_d_conv=4,
              mamba_chunk_size=8)  # fmt: skip

# The folder of each model, the prefix of its classes, and the options of its config.
ATTENTION = {
    "llama": ("llama", "Llama", {}),
    "mistral": ("mistral", "Mistral", dict(sliding_window=5)),
    "gemma2": ("gemma2", "Gemma2", dict(head_dim=256, sliding_window=5, query_pre_attn_scalar=64, attn_logit_softcapping=2.0)),
    "gemma3": ("gemma3", "Gemma3", dict(head_dim=256, sliding_window=5, query_pre_attn_scalar=64, sliding_window_pattern=2)),
    "qwen3": ("qwen3", "Qwen3", dict(head_dim=16)),
    "gpt_oss": ("gpt_oss", "GptOss", dict(head_dim=16, sliding_window=5, **EXPERTS)),
}
HYBRIDS = {
    "mamba": ("mamba", "Mamba", dict(state_size=8, time_step_rank=4)),
    "mamba2": ("mamba2", "Mamba2", dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)),
    "jamba": ("jamba", "Jamba", dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                                     num_experts=2, mamba_d_state=8, mamba_dt_rank=4)),
    "falcon_h1": ("falcon_h1", "FalconH1", dict(mamba_d_ssm=64, **MAMBA2)),
    "bamba": ("bamba", "Bamba", dict(attn_layer_indices=[1], **MAMBA2)),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybrid", dict(layer_types=["mamba", "attention"], shared_intermediate_size=24,
                                                                     **EXPERTS, **MAMBA2)),
    "nemotron_h": ("nemotron_h", "NemotronH", dict(layers_block_type=["mamba", "attention"], mamba_num_heads=4, mamba_head_dim=16,
                                                   ssm_state_size=8, n_groups=1, chunk_size=8, head_dim=8)),
    "zamba2": ("zamba2", "Zamba2", dict(layers_block_type=["mamba", "hybrid"], mamba_ngroups=1, n_mamba_heads=4, mamba_d_state=8,
                                        chunk_size=8, num_mem_blocks=1, adapter_rank=4, attention_head_dim=16)),
    "qwen3_next": ("qwen3_next", "Qwen3Next", dict(layer_types=["linear_attention", "full_attention"], head_dim=16,
                   linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                   shared_expert_intermediate_size=16, **EXPERTS)),
    "lfm2": ("lfm2", "Lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, block_multiple_of=8)),
}  # fmt: skip


class OpRecorder(TorchDispatchMode):
    """Records which of cotangent's ops run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cotangent":
            self.names.add(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32: norms, softmax and states do so in every dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return function(*args, **kwargs)


def forget():
    """Drops the imported models: they look for causal_conv1d when they are imported."""
    for name in [m for m in sys.modules if m.startswith("transformers.models.") and ".modeling_" in m]:
        del sys.modules[name]


def make(name, dtype, implementation, **options):
    """A model with seeded weights, after a fresh import of its module: its convolution is chosen then."""
    folder, prefix, config = {**ATTENTION, **HYBRIDS}[name]
    for module in [m for m in sys.modules if m.startswith(f"transformers.models.{folder}.")]:
        del sys.modules[module]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    kind = getattr(configuration, f"{prefix}TextConfig", None) or getattr(configuration, f"{prefix}Config")
    torch.manual_seed(0)
    made = kind(**{**SMALL, **config, **options}, attn_implementation=implementation, experts_implementation="eager")
    model = getattr(modeling, f"{prefix}ForCausalLM")(made)
    with torch.no_grad():  # initial weights are small, so that softmax is nearly uniform and masks have little effect
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif "sink" in "".join(n for n, p in model.named_parameters() if p is parameter):
                torch.nn.init.normal_(parameter)
    return model.to(dtype).train()


def inputs(padding=None, B=3, T=13, seed=1):
    """Tokens, mask and labels of a batch. padding: None, "left" or "right". Padding predicts no token."""
    tokens = torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(seed))
    if padding is None:
        return dict(input_ids=tokens, labels=tokens)
    column, lengths = torch.arange(T), torch.tensor([T, 7, 10])[:B, None]
    mask = column < lengths if padding == "right" else column >= T - lengths
    tokens = tokens.masked_fill(~mask, 0)
    labels = tokens.masked_fill(~(mask & F.pad(mask, (1, -1))), -100)
    return dict(input_ids=tokens, labels=labels, attention_mask=mask.long())


def train(model, batch, recorder=None):
    """The losses of the real tokens and the gradients of their mean, in float64. Losses are computed from the logits."""
    exact = next(model.parameters()).dtype == torch.float64
    with recorder or torch.enable_grad(), InFloat64() if exact else torch.enable_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), batch["labels"][:, 1:].flatten(), reduction="none")
        losses.mean().backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), gradients


def generate(model, batch, recorder=None, **options):
    """Greedy tokens after a prompt: the last columns of the batch."""
    prompt = {k: v[:, -8:] for k, v in batch.items() if k != "labels"}
    with recorder or torch.no_grad(), torch.no_grad():
        return model.eval().generate(**prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False, **options)
