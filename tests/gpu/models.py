"""Tiny random models and adapters for them, in shapes that the GPU's kernels serve."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from manyroots.adapter_names import LoraModule
from manyroots.bench.random_adapters import targets_of
from manyroots.config import engine_settings
from manyroots.kernels.mxfp4 import quantize
from manyroots.kernels.scaled import quantize_rows, quantize_rows_int8
from manyroots.models.source import resolve_source
from tests.helpers.adapter_folders import ExpertFormat, Recipe, rewrite_weights, write_adapter
from tests.unit.models.tiny import EXPERTS, save_tiny

KINDS = (
    "llama", "llama-biased", "mistral", "mistral-window", "qwen2", "qwen2-window", "qwen3",
    "gemma3", "gpt-oss", "qwen3-moe", "lfm2", "qwen3-next", "qwen3.5", "granite-h",
    "falcon-h1-norm", "llama-fp8-row", "qwen3-fp8-block", "qwen3-moe-fp8-row", "gpt-oss-mxfp4",
    "llama-int8", "granite", "smollm3", "mixtral", "olmo2", "olmo3", "phi3", "glm4-moe-norm",
    "gemma2", "nemotron-h", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "minicpm3",
    "kimi-linear", "deepseek-v3-fp8-block", "deepseek-v32", "glm-moe-dsa", "deepseek-v4",
)  # fmt: skip
FP8: dict[str, dict[str, Any]] = {
    "-fp8-row": {"quant_method": "fbgemm_fp8"},
    "-fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""How a kind's name ends whose layers' weights are in FP8, and what its config says then."""
MXFP4 = "-mxfp4"
"""The same of experts in MXFP4."""
INT8 = "-int8"
"""The same of products in INT8."""
_DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32}
_FEW_EXPERTS = {
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_group": 1, "topk_group": 1
}  # fmt: skip
"""One group: of two that are equally likely either may be chosen in half precision."""
_LATENT_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
}
_PUBLIC_LATENT_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
}
"""Those of DeepSeek and Kimi, which have kernels of their own."""
_INDEX = {"index_n_heads": 16, "index_topk": 500}
"""A GPU's decoding rows choose, since pages could hold more; and choose all, since in half
precision either of two nearly equal scores may be the greater."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 128},
    "gpt-oss": {"intermediate_size": 128},
    "qwen3-next": {"moe_intermediate_size": 128, **_DELTA},
    "granite-h": {"intermediate_size": 128, **_MAMBA},
    "mixtral": {"intermediate_size": 128},
    "glm4-moe-norm": {"moe_intermediate_size": 128},
    "deepseek-v2-lite": {**_FEW_EXPERTS, **_PUBLIC_LATENT_SIZES},
    "deepseek-v3": {**_FEW_EXPERTS, "q_lora_rank": 64, **_PUBLIC_LATENT_SIZES},
    "deepseek-v32": {
        **_FEW_EXPERTS,
        "q_lora_rank": 64,
        **_PUBLIC_LATENT_SIZES,
        **_INDEX,
        "index_head_dim": 128,
    },
    "glm-moe-dsa": {
        **_FEW_EXPERTS,
        "q_lora_rank": 64,
        **_LATENT_SIZES,
        **_INDEX,
        "index_head_dim": 64,
    },
    "deepseek-v4": {
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "o_lora_rank": 32,
        **_INDEX,
        "index_head_dim": 128,
        "hc_mult": 4,
        "sliding_window": 20,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    },
    "glm4-moe-lite": {**_FEW_EXPERTS, "q_lora_rank": 64, **_LATENT_SIZES},
    "kimi-linear": {
        "moe_intermediate_size": 128,
        "num_local_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 32,
        **_LATENT_SIZES,
    },
}
"""Those with experts, and how wide these are."""
_NUM_CLIPPED = 8
"""Of an expert's gates, and of its ups."""
VOCAB = 97
"""Which no tile of a kernel divides."""
MAX_LEN = 512
MAX_RANK = 64

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    # Each product keeps about the size of what it is given. With larger ones a rounding early in
    # the model grows from layer to layer until it hides what a wrong kernel would do.
    "initializer_range": 0.1,
}
_ODD_SIZES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    # Its embeddings are scaled up: tied to them, a head would only repeat the token before.
    "nemotron-h": {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32},
    "gemma2": {"tie_word_embeddings": False},
    "gemma3": {"tie_word_embeddings": False},
    "qwen3.5": _DELTA,
    "minicpm3": {
        "q_lora_rank": 48,
        "rope_parameters": None,
        "tie_word_embeddings": False,
        **_LATENT_SIZES,
    },
    "falcon-h1-norm": {"mamba_d_ssm": 256, **_MAMBA},
}
_ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk", "weights_proj", "kv_proj", "o_b_proj",
)  # fmt: skip
_MLP = (
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "input_linear", "output_linear", "w1",
    "w2", "w3",
)  # fmt: skip
_RECURRENT = (
    "in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
    "out_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
)  # fmt: skip
"""Modules that a model has not are left out."""
ROUTER = "gate"
"""Of mixtures alone: other models' adapters have the rest of such a recipe."""
_STRENGTH = 4.0


def _recipe(rank: int, modules: tuple[str, ...], seed: int, **more: Any) -> Recipe:
    """Half as strong as the product it changes, whatever the rank."""
    alpha = _STRENGTH * (1.0 if more.get("is_rank_stabilised") else math.sqrt(rank))
    return Recipe(rank=rank, modules=modules, alpha=alpha, seed=seed, scale=0.1, **more)


RECIPES = (
    _recipe(1, (*_ATTENTION, *_MLP, *_RECURRENT), 1),
    _recipe(8, _ATTENTION, 2),
    _recipe(12, ("q_proj", "down_proj"), 3, experts=ExpertFormat.SHARED_OUTER),
    _recipe(16, (*_ATTENTION, *_MLP), 4, is_rank_stabilised=True, experts=ExpertFormat.STACKED),
    _recipe(40, _MLP, 5),
    _recipe(64, (*_ATTENTION, *_MLP, *_RECURRENT), 6, experts=ExpertFormat.SHARED_OUTER),
    _recipe(8, (*_ATTENTION, *_MLP, ROUTER), 8),
    _recipe(5, ("embed_tokens", "v_proj", "lm_head"), 7),
)
NAMES = tuple(f"a{number}" for number in range(len(RECIPES)))


def make_model(folder: Path, kind: str, *, is_decisive: bool, **sizes: Any) -> None:
    """A checkpoint in `folder / "base"`, and adapters beside it.

    `is_decisive`: routers choose the same experts whatever is rounded. A token whose third and
    fourth expert are almost equally likely gets another one in half precision than in float32,
    on every device, and its outputs are then as far apart as two experts' are.
    """
    base = folder / "base"
    kind, _, fp8 = kind.partition("-fp8")
    is_mxfp4, kind = kind.endswith(MXFP4), kind.removesuffix(MXFP4)
    is_int8, kind = kind.endswith(INT8), kind.removesuffix(INT8)
    save_tiny(base, kind, **{**_SIZES, **_ODD_SIZES.get(kind, {}), **sizes})
    if kind in ("gemma2", "gemma3"):
        _shrink_embedding(base / "model.safetensors")
    if kind == "deepseek-v4":
        _clip_few(base / "model.safetensors")
    if is_decisive and kind in MIXTURES:
        _decide_experts(base / "model.safetensors")
    if fp8:
        _quantize(base, FP8[f"-fp8{fp8}"])
    if is_mxfp4:
        pack_experts(base)
    if is_int8:
        _quantize_int8(base)
    targets = targets_of(resolve_source(engine_settings({"model": str(base)}).model))
    for name, recipe in zip(NAMES, RECIPES, strict=True):
        pairs = write_adapter(folder / name, targets, recipe)
        if is_decisive and any(target.endswith(f".{ROUTER}") for target in pairs):
            rewrite_weights(folder / name, partial(_decide_adapter, recipe.alpha / recipe.rank))


def is_fp8(kind: str) -> bool:
    return kind.endswith(tuple(FP8))


def _quantize(base: Path, said: dict[str, Any]) -> None:
    """Its layers' projections in FP8, so that every engine that loads it has the same numbers."""
    path, config = base / "model.safetensors", base / "config.json"
    tensors = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("_proj.weight", "_with_mqa.weight")):
            tensors[name] = tensor
            continue
        stem = name.removesuffix("weight")
        if "weight_block_size" not in said:
            tensors[name], tensors[f"{stem}weight_scale"] = quantize_rows(tensor)
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        whole = tensor.new_zeros(128 * rows, 128 * columns)  # the last block may have less
        whole[: tensor.shape[0], : tensor.shape[1]] = tensor
        blocks = whole.view(rows, 128, columns, 128).transpose(1, 2)
        data, scales = quantize_rows(blocks.reshape(rows, columns, -1))
        data = data.view(rows, columns, 128, 128).transpose(1, 2).reshape(whole.shape)
        tensors[name] = data[: tensor.shape[0], : tensor.shape[1]].contiguous()
        tensors[f"{stem}weight_scale_inv"] = scales[..., 0].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))


def _quantize_int8(base: Path) -> None:
    """Its layers' projections in INT8, as compressed-tensors has them."""
    path, config = base / "model.safetensors", base / "config.json"
    tensors = {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale"] = quantize_rows_int8(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    said = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))


def pack_experts(base: Path) -> None:
    """gpt-oss' experts as they are published: 4 bits, and a power of two for each 32."""
    path, config = base / "model.safetensors", base / "config.json"
    tensors = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        blocks, tensors[f"{name}_scales"] = quantize(tensor.transpose(1, 2).contiguous())
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16))
    save_file(tensors, path, metadata={"format": "pt"})
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **said}))


def _shrink_embedding(path: Path) -> None:
    """So that what layers add counts beside what Gemma's embedding, scaled, begins with."""
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] /= math.sqrt(_SIZES["hidden_size"])
    save_file(tensors, path, metadata={"format": "pt"})


def _clip_few(path: Path) -> None:
    """Tiny models of this kind have gates and ups so large that most are clipped, and their experts
    give up to 150. Here some gates and other ups are clipped, so a product of both stays small."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".ffn.experts." in name and name.endswith(("w1.weight", "w3.weight")):
            first = _NUM_CLIPPED if name.endswith("w3.weight") else 0
            is_small = torch.ones(len(tensor), dtype=torch.bool)
            is_small[first : first + _NUM_CLIPPED] = False
            tensor[is_small] *= _SIZES["initializer_range"] / tensor.std()
    save_file(tensors, path, metadata={"format": "pt"})


def _decide_experts(path: Path) -> None:
    """Give every token three experts of its own: dimension e of its embedding is large where it
    wants expert e, and that is what routers read."""
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(3)
    routers = [
        tensor for name, tensor in tensors.items()
        if name.endswith(
            (
                "mlp.gate.weight", "ffn.gate.weight", "moe.gate.weight", "router.weight",
                "router.layer.weight",
            )
        )
    ]  # fmt: skip
    wants = torch.full((VOCAB, len(routers[0])), -6.0)
    for row in wants:
        row[torch.randperm(len(row), generator=generator)[: EXPERTS["num_experts_per_tok"]]] = 6.0
    tensors["model.embed_tokens.weight"][:, : wants.shape[1]] = wants
    for router in routers:
        router.copy_(torch.eye(*router.shape))
    for name, tensor in tensors.items():
        if name.endswith("mlp.router.bias"):
            tensor.zero_()
    save_file(tensors, path, metadata={"format": "pt"})


def _decide_adapter(scaling: float, tensors: dict[str, torch.Tensor]) -> None:
    """Make an adapter's routers choose the expert that follows the base model's choice."""
    for name, tensor in tensors.items():
        if f".mlp.{ROUTER}.lora_A" in name:
            tensor.copy_(torch.eye(*tensor.shape))
        elif f".mlp.{ROUTER}.lora_B" in name:
            count = len(tensor)
            turn = torch.eye(count).roll(1, dims=0) - torch.eye(count)
            tensor.zero_()
            tensor[:, :count] = turn / scaling


def modules_of(folder: Path) -> tuple[LoraModule, ...]:
    return tuple(LoraModule(name, str(folder / name)) for name in NAMES)
