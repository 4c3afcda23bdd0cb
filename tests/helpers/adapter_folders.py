"""Adapter folders for tests: good ones of every format, written as PEFT and others write them.

`write_adapter` makes a random adapter for a model's targets and gives what reading it must give.
The files of broken ones are made by changing a good one: `rewrite_config`, `rewrite_weights`,
`rewrite_header`. Weights are exact in bfloat16, so that every dtype reads back the same numbers.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.lora.targets import Side, Target, TargetKind, Targets

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class ExpertFormat(enum.Enum):
    """How the pairs of experts are in the file."""

    PER_EXPERT = "per_expert"
    """2-D, `experts.E.gate_proj`."""
    STACKED = "stacked"
    """3-D, `experts.w1`."""
    SHARED_OUTER = "shared_outer"
    """3-D, with A of gate and up, and B of down, shared by all experts."""
    GATE_UP = "gate_up"
    """3-D, gate and up in one `experts.gate_up_proj` with one A."""
    PARAMETERS = "parameters"
    """Flat, as PEFT's target_parameters."""
    PARAMETERS_SWAPPED = "parameters_swapped"
    """The same, as PEFT releases that read parameters as [in, out]."""


@dataclass(frozen=True)
class Pair:
    """What reading must give for one target, in float32."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make an adapter."""

    rank: int = 4
    alpha: float = 8.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    """By full target name, written as `rank_pattern`."""
    modules: tuple[str, ...] | None = None
    """Last parts of target names, `q_proj`; None for all."""
    is_rank_stabilised: bool = False
    invocation_tokens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    prefix: str = "base_model.model."
    adapter_name: str | None = None
    """Inside the keys, as in a training checkpoint."""
    experts: ExpertFormat = ExpertFormat.PER_EXPERT
    scale: float = 0.25
    """Size of the random numbers."""
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the config, or other values."""


def tiny_targets(
    *,
    num_layers: int = 2,
    hidden: int = 32,
    kv: int = 16,
    intermediate: int = 48,
    vocab: int = 64,
    num_experts: int | None = None,
    is_interleaved: bool = False,
) -> dict[str, Target]:
    """Those of a small Llama, or with `num_experts` of a small Qwen3-MoE; `is_interleaved`: with
    gpt-oss' kind of experts."""
    linear = TargetKind.LINEAR
    targets = {"model.embed_tokens": Target(TargetKind.EMBEDDING, vocab, hidden)}
    for layer in range(num_layers):
        attention = f"model.layers.{layer}.self_attn"
        targets[f"{attention}.q_proj"] = Target(linear, hidden, hidden, side=Side.OUTPUT)
        targets[f"{attention}.k_proj"] = Target(linear, hidden, kv, side=Side.OUTPUT)
        targets[f"{attention}.v_proj"] = Target(linear, hidden, kv, side=Side.OUTPUT)
        targets[f"{attention}.o_proj"] = Target(linear, hidden, hidden, side=Side.INPUT)
        kind = linear if num_experts is None else TargetKind.EXPERTS
        mlp = f"model.layers.{layer}.mlp" + ("" if num_experts is None else ".experts")
        if num_experts is not None:
            targets[f"model.layers.{layer}.mlp.gate"] = Target(linear, hidden, num_experts)
        into = Target(kind, hidden, intermediate, num_experts, is_interleaved, side=Side.OUTPUT)
        targets[f"{mlp}.gate_proj"] = targets[f"{mlp}.up_proj"] = into
        targets[f"{mlp}.down_proj"] = Target(
            kind, intermediate, hidden, num_experts, is_interleaved, side=Side.INPUT
        )
    targets["lm_head"] = Target(linear, hidden, vocab, side=Side.OUTPUT)
    return targets


def write_adapter(folder: Path, targets: Targets, recipe: Recipe | None = None) -> dict[str, Pair]:
    """Write a folder; gives the pairs that reading it must give, by target."""
    recipe = recipe or Recipe()
    chosen = {
        name: target
        for name, target in targets.items()
        if recipe.modules is None or name.rpartition(".")[2] in recipe.modules
    }
    pairs = random_pairs(chosen, recipe)
    tensors: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        if chosen[name].kind is TargetKind.EMBEDDING:
            tensors[_key(recipe, name, "embedding_A")] = pair.a.T
            tensors[_key(recipe, name, "embedding_B")] = pair.b
        elif chosen[name].kind is TargetKind.LINEAR:
            tensors[_key(recipe, name, "A")] = pair.a
            tensors[_key(recipe, name, "B")] = pair.b
    tensors |= _expert_tensors(recipe, pairs, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(recipe.dtype).contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    (folder / CONFIG).write_text(json.dumps(config_of(recipe, chosen), indent=2))
    return pairs


def config_of(recipe: Recipe, targets: Targets) -> dict[str, Any]:
    parameters = []
    if recipe.experts in (ExpertFormat.PARAMETERS, ExpertFormat.PARAMETERS_SWAPPED):
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": False,
        "use_rslora": recipe.is_rank_stabilised,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": dict(recipe.ranks),
        "alpha_pattern": {},
        "target_modules": sorted({name.rpartition(".")[2] for name in targets}),
        "target_parameters": parameters or None,
    }
    if recipe.invocation_tokens is not None:
        config["alora_invocation_tokens"] = list(recipe.invocation_tokens)
    return {**config, **recipe.config}


def random_pairs(targets: Targets, recipe: Recipe) -> dict[str, Pair]:
    """Canonical pairs; those that the recipe's format makes equal or shared are."""
    generator = torch.Generator().manual_seed(recipe.seed)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator) * recipe.scale
        return drawn.to(torch.bfloat16).float()

    pairs: dict[str, Pair] = {}
    for name, target in targets.items():
        rank = recipe.ranks.get(name, recipe.rank)
        root = math.sqrt(rank) if recipe.is_rank_stabilised else rank
        into, out = (rank, target.in_features), (target.out_features, rank)
        if target.kind is TargetKind.EXPERTS:
            num_a, num_b = _num_matrices(name, target, recipe.experts)
            a, b = draw(num_a, *into), draw(num_b, *out)
            if name.endswith(".up_proj") and recipe.experts not in _SEPARATE:
                a = pairs[name.replace(".up_proj", ".gate_proj")].a
        else:
            a, b = draw(*into), draw(*out)
            a = a.T.contiguous() if target.kind is TargetKind.EMBEDDING else a
        pairs[name] = Pair(a, b, recipe.alpha / root)
    return pairs


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Set fields of the config; a value of `...` removes one."""
    config = json.loads((folder / CONFIG).read_text())
    config |= changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(config))


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors in place."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the safetensors header, and leave the data as it is."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


_SEPARATE = (ExpertFormat.PER_EXPERT, ExpertFormat.STACKED, ExpertFormat.SHARED_OUTER)
"""Formats in which gate and up each have an A of their own."""

_STACKED_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _key(recipe: Recipe, module: str, side: str) -> str:
    name = f".{recipe.adapter_name}" if recipe.adapter_name is not None else ""
    weight = "" if side.startswith("embedding") else ".weight"
    return f"{recipe.prefix}{module}.lora_{side}{name}{weight}"


def _num_matrices(name: str, target: Target, form: ExpertFormat) -> tuple[int, int]:
    count = target.num_experts or 1
    if form is not ExpertFormat.SHARED_OUTER:
        return count, count
    return (count, 1) if name.endswith(".down_proj") else (1, count)


def _expert_tensors(
    recipe: Recipe, pairs: Mapping[str, Pair], targets: Targets
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    names = [name for name in pairs if targets[name].kind is TargetKind.EXPERTS]
    for name in names:
        experts, _, leaf = name.rpartition(".")
        pair = pairs[name]
        if recipe.experts is ExpertFormat.PER_EXPERT:
            for expert in range(pair.a.shape[0]):
                module = f"{experts}.{expert}.{leaf}"
                tensors[_key(recipe, module, "A")] = pair.a[expert]
                tensors[_key(recipe, module, "B")] = pair.b[expert]
        elif recipe.experts in _SEPARATE or (
            recipe.experts is ExpertFormat.GATE_UP and leaf == "down_proj"
        ):
            module = f"{experts}.{_STACKED_NAMES[leaf]}"
            tensors[_key(recipe, module, "A")] = pair.a
            tensors[_key(recipe, module, "B")] = pair.b
        elif leaf != "up_proj":
            tensors |= _fused(recipe, pairs, experts, leaf, targets[name].is_interleaved)
    return tensors


def _fused(
    recipe: Recipe, pairs: Mapping[str, Pair], experts: str, leaf: str, is_interleaved: bool
) -> dict[str, Tensor]:
    """Gate and up in one, or down, of one layer."""
    a, b = pairs[f"{experts}.{leaf}"].a, pairs[f"{experts}.{leaf}"].b
    if leaf == "gate_proj":
        both = [b, pairs[f"{experts}.up_proj"].b]
        b = torch.stack(both, dim=2).flatten(1, 2) if is_interleaved else torch.cat(both, dim=1)
    if recipe.experts is ExpertFormat.GATE_UP:
        module = f"{experts}.gate_up_proj"
        return {_key(recipe, module, "A"): a, _key(recipe, module, "B"): b}
    if recipe.experts is ExpertFormat.PARAMETERS_SWAPPED:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    module = experts if leaf == "gate_proj" else f"{experts}.base_layer"
    flat_a = a.reshape(-1, a.shape[-1])
    flat_b = b.permute(1, 2, 0).reshape(b.shape[1], -1)
    return {_key(recipe, module, "A"): flat_a, _key(recipe, module, "B"): flat_b}
