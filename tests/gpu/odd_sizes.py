"""Models of sizes that no tile divides, on the GPU against the CPU in float32.

    python -m tests.gpu.odd_sizes [--device cuda] [NAME[/float32] ...]

The other checks have widths of 128. Here are odd vocabularies and widths, many query heads to one
of keys and values, few experts, several groups of Mamba, FP8 of odd widths; without and with an
adapter, in steps of prompts and decodes. Prints a line for each: the largest difference, the
largest logit, and DIFFERS where more rows are off than rounding explains; a few rows of a mixture
may be, whose tokens bfloat16 sends to other experts. With `--device cpu` it tries itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyroots.config import ModelSettings
from manyroots.ids import AdapterSlot
from manyroots.models.decoder import Decoder
from manyroots.models.kernel_set import kernel_set
from manyroots.models.load import describe, load_model
from manyroots.models.source import resolve_source
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_pool import AdapterPool
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import save_tiny

WINDOW, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
MAX_RANK = 16
LIMITS = {torch.bfloat16: 0.06, torch.float32: 0.004}
"""Of the largest logit."""
ROUTED_OTHERWISE = 0.15
"""Of a mixture's rows."""
STEPS: tuple[dict[str, int], ...] = (
    {"a": 37, "b": 5, "c": 1, "d": 70},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {f"s{i}": 3 for i in range(40)},
    {**{f"s{i}": 1 for i in range(40)}, "a": 1},
    {"a": 1, "b": 20, "s0": 1, "e": 140},
)
"""How many tokens of which sequences."""
ADAPTED = {"a", "c", *(f"s{i}" for i in range(0, 40, 3))}


def sizes(
    hidden: int, inner: int, heads: tuple[int, int], dim: int | None, vocab: int = 97, **more: Any
) -> dict[str, Any]:
    """`heads`: of queries, and of keys and values."""
    own: dict[str, Any] = {} if dim is None else {"head_dim": dim}
    return {
        # Products keep the size of their inputs: with larger weights the CPU's own bfloat16 is off
        # by more than is allowed here.
        "initializer_range": min(0.1, hidden**-0.5),
        "max_position_embeddings": 512, "num_hidden_layers": 2,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "vocab_size": vocab, **own, **more,
    }  # fmt: skip


WINDOWED: dict[str, Any] = {"layer_types": [WINDOW, FULL], "sliding_window": 3}
HYBRID: dict[str, Any] = {"layer_types": [RECURRENT, FULL]}


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, width: int) -> dict[str, Any]:
    return {
        **HYBRID, "linear_num_key_heads": key_heads, "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": width,
    }  # fmt: skip


def mamba(groups: int, heads: int, dim: int, state: int) -> dict[str, Any]:
    return {
        "mamba_n_groups": groups, "mamba_n_heads": heads, "mamba_d_head": dim,
        "mamba_d_state": state, "mamba_d_conv": 3,
    }  # fmt: skip


def experts(count: int, chosen: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, **more
    }  # fmt: skip


SHARED = {"shared_expert_intermediate_size": 17}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "even": ("llama", sizes(128, 256, (4, 2), 32)),
    "vocabulary of 32001": ("llama", sizes(576, 1536, (9, 3), 64, 32001)),
    "7 to 1": ("qwen2", sizes(896, 4864, (14, 2), 64, 3203)),
    "5461 wide": ("llama", sizes(200, 5461, (5, 1), 64)),
    "1148 wide": ("llama", sizes(1148, 1002, (4, 4), 64, mlp_bias=True, attention_bias=True)),
    "1150 wide": ("qwen3", sizes(1150, 1001, (6, 3), 128)),
    "90 wide": ("qwen3", sizes(90, 333, (7, 1), 128, 251, attention_bias=True)),
    "89 wide": ("qwen2", sizes(89, 77, (3, 3), 64, 33)),
    "16 to 1": ("mistral", sizes(72, 100, (16, 1), 32, 5, sliding_window=3)),
    "71 to 1": ("llama", sizes(142, 90, (71, 1), 64, 65)),
    "heads of 80": ("llama", sizes(160, 100, (4, 2), 80)),
    "gemma": ("gemma3", sizes(102, 77, (3, 1), 256, 201, **WINDOWED)),
    "gpt-oss": (
        "gpt-oss",
        sizes(88, 40, (8, 1), 64, num_local_experts=3, num_experts_per_tok=2, **WINDOWED),
    ),
    "all experts": ("qwen3-moe", sizes(72, 90, (6, 2), 64, **experts(5, 5, 56))),
    "one of 17": ("qwen3-moe", sizes(136, 90, (3, 1), 64, **experts(17, 1, 8))),
    "qwen3-next": (
        "qwen3-next",
        sizes(72, 90, (5, 1), 64, **experts(3, 2, 24, **SHARED), **delta(3, 9, 16, 64, 2)),
    ),
    "qwen3.5": ("qwen3.5", sizes(50, 61, (3, 1), 128, **delta(1, 1, 128, 16, 6))),
    "qwen3.5-moe": (
        "qwen3.5-moe",
        sizes(72, 90, (5, 5), 64, **experts(6, 2, 24, **SHARED), **delta(2, 2, 32, 32, 4)),
    ),
    "granite": (
        "granite-h",
        sizes(96, 24, (3, 1), None, **HYBRID, **mamba(3, 3, 32, 64), mamba_expand=1,
              num_local_experts=5, num_experts_per_tok=1, shared_intermediate_size=13),
    ),
    "falcon": (
        "falcon-h1",
        sizes(50, 61, (6, 2), 64, **mamba(3, 6, 16, 128), mamba_d_ssm=96, mamba_rms_norm=True),
    ),
    "lfm2": (
        "lfm2",
        sizes(224, 91, (7, 1), None, layer_types=["conv", FULL], conv_L_cache=5, conv_bias=True,
              block_auto_adjust_ff_dim=False),
    ),
    "fp8, 200 wide": ("llama", sizes(200, 334, (5, 1), 64)),
    "fp8, 90 wide": ("qwen2", sizes(90, 77, (3, 3), 64, 33)),
    "fp8, experts": ("qwen3-moe", sizes(72, 90, (6, 2), 64, **experts(5, 2, 56))),
}  # fmt: skip
MIXTURES = ("gpt-oss", "qwen3-moe", "qwen3-next", "qwen3.5-moe", "granite-h")


def check(name: str, dtype: torch.dtype, device: torch.device) -> str:
    kind, changes = MODELS[name]
    quantization = "fp8" if name.startswith("fp8") else "auto"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = save_tiny(folder / "model", kind, **changes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        model.save_pretrained(folder / "model")
        exact = load(folder / "model", torch.float32, torch.device("cpu"), quantization)
        ours = load(folder / "model", dtype, device, quantization)
        recipe = Recipe(rank=5, alpha=5, scale=0.1, dtype=torch.bfloat16)
        write_adapter(folder / "adapter", exact.adapter_targets(), recipe)
        allowed = ROUTED_OTHERWISE if kind in MIXTURES else 0.0
        told = []
        for adapter in (None, folder / "adapter"):
            pairs = zip(steps(ours, adapter), steps(exact, adapter), strict=True)
            told.append(verdict(list(pairs), LIMITS[dtype], allowed))
    return f"{told[0]}; with an adapter {told[1]}"


def load(folder: Path, dtype: torch.dtype, device: torch.device, quantization: str) -> Decoder:
    source = resolve_source(ModelSettings(model=str(folder)))
    return load_model(
        source, dtype=dtype, device=device, load_format="auto", seed=0, quantization=quantization,
        kernels=kernel_set(describe(source), device),
    )  # fmt: skip


def steps(model: Decoder, adapter: Path | None) -> Iterator[Tensor]:
    """The logits of all steps [num_tokens, vocab], on the CPU."""
    vocab_size, pool = model.spec.vocab_size, None
    if adapter is not None:
        pool = AdapterPool(
            model.lora_parts(), num_slots=2, max_rank=MAX_RANK, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip
        _, weights = read_adapter(
            adapter, model.adapter_targets(), max_rank=MAX_RANK, dtype=model.dtype,
            vocab_size=vocab_size,
        )  # fmt: skip
        pool.load(AdapterSlot(1), weights)
    paged = PagedModel(model, pool, num_pages=500, page_size=16)
    paged.slot_of = {} if pool is None else dict.fromkeys(ADAPTED, 1)
    draws = torch.Generator().manual_seed(1)
    for step in STEPS:
        tokens = {
            name: torch.randint(0, vocab_size, (count,), generator=draws).tolist()
            for name, count in step.items()
        }
        got = paged.step(tokens)
        yield torch.cat([got[name] for name in step])


def verdict(pairs: list[tuple[Tensor, Tensor]], limit: float, allowed: float) -> str:
    largest = max(float(exact.abs().max()) for _, exact in pairs)
    rows = torch.cat([(got - exact).abs().amax(dim=1) for got, exact in pairs])
    off = int((~(rows <= limit * largest)).sum())
    text = f"{float(rows.max()):.2g} of {largest:.2g}"
    if off:
        text += f", {off} of {len(rows)} rows" + (" DIFFERS" if off > allowed * len(rows) else "")
    return text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    num_wrong = 0
    for spelled in options.names:
        name, _, dtype = spelled.partition("/")
        start = time.monotonic()
        try:
            told = check(name, getattr(torch, dtype or "bfloat16"), torch.device(options.device))
        except Exception as error:  # the others are still of interest
            told = f"DIFFERS: {type(error).__name__} {str(error)[:300]}"
        num_wrong += "DIFFERS" in told
        print(f"{spelled}: {told} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
