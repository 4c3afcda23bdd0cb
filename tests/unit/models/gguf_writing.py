"""GGUF files made with the `gguf` package's own writer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from torch import Tensor

_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "glm4_moe": "glm4moe",
}
"""llama.cpp's names of model types, where they are not the same."""
_PAIRED = ("llama", "granite", "smollm3")
"""Architectures whose queries and keys its converter reorders."""
_LESS_ONE = ("gemma2", "gemma3")
"""Architectures to whose norms its converter adds 1."""


def write_gguf(
    path: Path,
    config: Any,
    state: Mapping[str, Tensor] | None = None,
    *,
    extra_metadata: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    tokens: Sequence[str] | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """Write a model as llama.cpp's converter would, in float32; only an embedding by default. In
    parts if they may have so many tensors, and gives the first's path then."""
    arch = _ARCHITECTURES.get(config.model_type, config.model_type)
    [known] = [one for one, name in MODEL_ARCH_NAMES.items() if name == arch]
    names = get_tensor_name_map(known, config.num_hidden_layers)  # llama.cpp's own
    writer = GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_dim)
    rope = config.rope_parameters
    if "full_attention" in rope:
        # Nothing of the other layers' rotation, nor, of Gemma 3, which layers these are.
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
        if arch != "gemma3":
            kinds = [kind == "sliding_attention" for kind in config.layer_types]
            writer.add_sliding_window_pattern(kinds)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    if tokens is not None:
        writer.add_token_list(tokens)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if arch == "glm4moe":
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if "long_factor" in rope:
        length = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(length)
        scale = config.max_position_embeddings / length
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(length)))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in (extra_metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    if state is None:
        writer.add_tensor(
            "token_embd.weight", np.zeros((config.vocab_size, config.hidden_size), np.float32)
        )
    for name, tensor in _experts_apart(state or {}).items():
        values = tensor.detach().float().numpy()
        part = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        if arch in _PAIRED and part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            values = _pairs_from_halves(values, heads)
        if arch in _LESS_ONE and part.endswith("norm"):
            values = values + 1
        name = name.replace("score_correction_bias", "score_correction.bias")
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, f"llama.cpp has no name for {name} of {arch}"
        writer.add_tensor(own_name, np.ascontiguousarray(values))
    for name, array in (extra_tensors or {}).items():
        is_half = array.dtype == np.float16
        kind = GGMLQuantizationType.F16 if is_half else GGMLQuantizationType.F32
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_part else path


def _experts_apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked, as both transformers and llama.cpp have experts, but gate and up each by itself."""
    apart = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            block = name.removesuffix("gate_up_proj")
            apart |= {f"{block}gate_proj.weight": gate, f"{block}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            apart[f"{name}.weight"] = tensor
        else:
            apart[name] = tensor
    return apart


def _pairs_from_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
