"""A transformers config from a GGUF file's metadata.

Takes an open `GGUFFile`; gives what a `config.json` and a `generation_config.json` would have
said: the config object, the end-of-sequence tokens and the file's own rotary factors. Everything
that the metadata says and this version can't compute is refused here.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from manyroots.errors import ModelError
from manyroots.layers.rotary import check_rope_type
from manyroots.models.weights.gguf import ROPE_FACTORS
from manyroots.models.weights.gguf_file import GGUFFile

_CONFIGS: dict[str, tuple[type[PretrainedConfig], str]] = {
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "mistral": (MistralConfig, "MistralForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
    "qwen3moe": (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
}
_SERVED = tuple(arch for arch in _CONFIGS if arch != "mistral")
_WITH_EXPERTS = ("qwen3moe",)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_of(file: GGUFFile) -> PretrainedConfig:
    """The config of the model in `file`."""
    arch = str(file.metadata.get("general.architecture"))
    if arch not in _SERVED:
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; this version serves GGUF files "
            f"of {', '.join(_SERVED)}."
        )
    if int(file.metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them with "
            "llama-gguf-split --merge and pass the joined file."
        )
    has_experts = arch in _WITH_EXPERTS
    if file.metadata.get(f"{arch}.expert_count", 0) and not has_experts:
        raise ModelError(
            f"{file.path} holds a mixture of experts of architecture {arch!r}; this version serves "
            f"those of {', '.join(_WITH_EXPERTS)}, and {arch!r} only dense."
        )
    window = file.metadata.get(f"{arch}.attention.sliding_window")
    # Files of Mistral are of architecture llama; what tells them apart is the window.
    config_class, architecture = _CONFIGS["mistral" if arch == "llama" and window else arch]
    values = _values(file, arch) | (_experts(file, arch) if has_experts else {})
    if architecture == "LlamaForCausalLM":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if window:
        # Of all layers. Like transformers, llama.cpp counts the query itself.
        values |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return config_class(architectures=[architecture], dtype="bfloat16", **values)


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end a sequence, the tokenizer's own first."""
    found = (file.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Llama 3's scaling as GGUF files carry it: what each rotary frequency is divided by."""
    if ROPE_FACTORS not in file.tensors:
        return None
    return tuple(file.read(ROPE_FACTORS).tolist())


def _values(file: GGUFFile, arch: str) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no token_embd.weight; it is not a whole model.")
    hidden, heads = _get(file, arch, "embedding_length"), _get(file, arch, "attention.head_count")
    head_dim = file.metadata.get(f"{arch}.attention.key_length", hidden // heads)
    rotated = file.metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions of each head; this version "
            "serves models that rotate whole heads."
        )
    eos = eos_token_ids(file)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": file.metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": _get(file, arch, "block_count"),
        "intermediate_size": _get(file, arch, "feed_forward_length"),
        "max_position_embeddings": _get(file, arch, "context_length"),
        "rms_norm_eps": _get(file, arch, "attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(eos) or None,
        "rope_parameters": _rope_parameters(file, arch),
    }


def _experts(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Such files have experts in every layer, whose weights add up to one: llama.cpp knows no
    other, and there is no key for it."""
    return {
        "num_experts": _get(file, arch, "expert_count"),
        "num_experts_per_tok": _get(file, arch, "expert_used_count"),
        "moe_intermediate_size": _get(file, arch, "expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _get(file: GGUFFile, arch: str, key: str) -> Any:
    try:
        return file.metadata[f"{arch}.{key}"]
    except KeyError:
        raise ModelError(
            f"{file.path} lacks {arch}.{key} in its metadata; convert the model again."
        ) from None


def _rope_parameters(file: GGUFFile, arch: str) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling"
    theta = float(file.metadata.get(f"{arch}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    check_rope_type(kind)
    factor = float(file.metadata.get(f"{prefix}.factor", 1.0))
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = file.metadata.get(f"{prefix}.original_context_length")
        if original is None:
            raise ModelError(
                f"{file.path} uses yarn but lacks {prefix}.original_context_length; "
                "convert the model again."
            )
        parameters["original_max_position_embeddings"] = int(original)
    return parameters
