"""A config from a GGUF file's metadata.

Takes an open `GGUFFile`; gives what a `config.json` and a `generation_config.json` would have
said: the config object, the end-of-sequence tokens and the file's own rotary factors. Everything
that the metadata says and this version can't compute is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from manyroots.errors import ModelError
from manyroots.files.gguf_tokens import special_token
from manyroots.layers.rotary import check_rope_type
from manyroots.models.configs import Config, complete
from manyroots.models.fields import check_fields, shown
from manyroots.models.gguf_unread import refuse_unread
from manyroots.models.weights.gguf import ROPE_FACTORS
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import FULL, SLIDING

_CONFIGS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""The model type and the architecture's name, by GGUF's."""
_SERVED = tuple(arch for arch in _CONFIGS if arch != "mistral")
_WITH_EXPERTS = ("qwen3moe",)
_THETA = {"gemma3": 1_000_000.0}
"""Rotary bases that files may leave out, where it is not Llama's."""
_F32 = 0
"""The number of plain float32 among GGUF's types."""
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>",
})  # fmt: skip
"""Tokens that end a sequence by their text: llama.cpp's rule, on which converters rely. Files of
Gemma name <eos> alone, and a turn of its ends with another."""


def config_of(file: GGUFFile) -> Config:
    """The config of the model in `file`."""
    arch = str(file.metadata.get("general.architecture"))
    if arch not in _SERVED:
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; this version serves GGUF files "
            f"of {', '.join(_SERVED)}."
        )
    has_experts = arch in _WITH_EXPERTS
    if file.metadata.get(f"{arch}.expert_count", 0) and not has_experts:
        raise ModelError(
            f"{file.path} holds a mixture of experts of architecture {arch!r}; this version serves "
            f"those of {', '.join(_WITH_EXPERTS)}, and {arch!r} only dense."
        )
    window = _whole(file, f"{arch}.attention.sliding_window", least=0, default=0)
    # Files of Mistral are of architecture llama; what tells them apart is the window.
    model_type, architecture = _CONFIGS["mistral" if arch == "llama" and window else arch]
    values = _values(file, arch) | (_experts(file, arch) if has_experts else {})
    refuse_unread(file, arch, values["head_dim"])
    if architecture == "LlamaForCausalLM":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if arch == "gemma3":
        check_fields(values, f"the metadata of {file.path}")  # which has a list by layers, too
        values |= _gemma3(file, values)
    elif window:
        # Of all layers. Like transformers, llama.cpp counts the query itself.
        values |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    # Before the config is made: it has a list as long as there are layers.
    check_fields(values, f"the metadata of {file.path}")
    try:
        return complete(
            model_type, {"architectures": [architecture], "dtype": _dtype(file), **values}
        )
    except ValueError as error:
        raise ModelError(
            f"the metadata of {file.path} can't be used: {error} Convert the model again."
        ) from error


def _dtype(file: GGUFFile) -> str:
    """float32 if every matrix is written so; else what models that are quantized were made in."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {_F32} else "bfloat16"


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end a sequence, the tokenizer's own first."""
    keys = (f"tokenizer.ggml.{key}" for key in _EOS_KEYS)
    found = [_whole(file, key, least=0) for key in keys if key in file.metadata]
    named = "tokenizer.ggml.eos_token_id" in file.metadata
    if not named and (meant := special_token(file.metadata, "eos")) is not None:
        found.insert(0, meant)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found += [index for index, token in enumerate(tokens) if token in _ENDS]
    return tuple(dict.fromkeys(found))


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Llama 3's scaling as GGUF files carry it: what each rotary frequency is divided by."""
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read(ROPE_FACTORS).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(
            f"{ROPE_FACTORS} of {file.path} has factors that are not positive numbers; convert "
            "the model again."
        )
    return tuple(factors.tolist())


def _values(file: GGUFFile, arch: str) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path} has no token_embd.weight with rows and columns; it is not a whole model."
        )
    hidden = _whole(file, f"{arch}.embedding_length")
    heads = _whole(file, f"{arch}.attention.head_count")
    head_dim = _whole(file, f"{arch}.attention.key_length", default=hidden // heads)
    rotated = _whole(file, f"{arch}.rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions of each head; this version "
            "serves models that rotate whole heads."
        )
    eos = eos_token_ids(file)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(file, f"{arch}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "num_hidden_layers": _whole(file, f"{arch}.block_count"),
        "intermediate_size": _whole(file, f"{arch}.feed_forward_length"),
        "max_position_embeddings": _whole(file, f"{arch}.context_length"),
        "rms_norm_eps": _number(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(eos) or None,
        "rope_parameters": _rope_parameters(file, arch),
    }


def _experts(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Such files have experts in every layer, whose weights add up to one unless a newer key says
    otherwise: most have none for it."""
    return {
        "num_experts": _whole(file, f"{arch}.expert_count"),
        "num_experts_per_tok": _whole(file, f"{arch}.expert_used_count"),
        "moe_intermediate_size": _whole(file, f"{arch}.expert_feed_forward_length"),
        "norm_topk_prob": file.metadata.get(f"{arch}.expert_weights_norm", True),
    }


GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_PERIOD = 6
_GEMMA3_27B_LAYERS = 62


def _gemma3(file: GGUFFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a Gemma 3. Its converter wrote the window and the rotation of the layers that see
    everything; that these are every sixth layer, and that the others turn by a base of their own
    and are not scaled, is the same in all of them and in no file. llama.cpp and transformers
    fill in the same numbers; newer keys for them win where a file has them.
    """
    full = values["rope_parameters"]
    base = _number(file, "gemma3.rope.freq_base_swa", default=GEMMA3_LOCAL_THETA)
    layers = range(values["num_hidden_layers"])
    is_local = _gemma3_pattern(file, len(layers))
    is_27b = values["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = (
        values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    )
    return {
        "sliding_window": _whole(file, "gemma3.attention.sliding_window"),
        "layer_types": [SLIDING if is_local(layer) else FULL for layer in layers],
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": base}},
        # llama.cpp's rule, too: scores are divided by the root of a head's size, in all but one.
        "query_pre_attn_scalar": scalar,
    }


def _gemma3_pattern(file: GGUFFile, num_layers: int) -> Callable[[int], bool]:
    """Which layers have a window: all but every so manieth, or those that a list says."""
    key = "gemma3.attention.sliding_window_pattern"
    listed = file.metadata.get(key)
    if isinstance(listed, list):
        if len(listed) != num_layers or not all(type(one) is bool for one in listed):
            raise ModelError(
                f"{key} of {file.path} is {shown(listed)}; it must have true or false for each of "
                f"{num_layers} layers. Convert the model again."
            )
        return lambda layer: bool(listed[layer])
    period = _whole(file, key, default=GEMMA3_PERIOD)
    return lambda layer: (layer + 1) % period != 0


def _whole(file: GGUFFile, key: str, *, least: int = 1, default: int | None = None) -> int:
    value = _get(file, key, default)
    if type(value) is not int or value < least:
        raise ModelError(
            f"{key} of {file.path} is {shown(value)}; it must be a whole number of at least "
            f"{least}. Convert the model again."
        )
    return value


def _number(file: GGUFFile, key: str, *, default: float | None = None) -> float:
    value = _get(file, key, default)
    if type(value) not in (int, float):
        raise ModelError(
            f"{key} of {file.path} is {shown(value)}; it must be a number. Convert the model again."
        )
    return float(value)


def _get(file: GGUFFile, key: str, default: Any) -> Any:
    value = file.metadata.get(key, default)
    if value is None:
        raise ModelError(f"{file.path} lacks {key} in its metadata; convert the model again.")
    return value


def _rope_parameters(file: GGUFFile, arch: str) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling"
    theta = _number(file, f"{arch}.rope.freq_base", default=_THETA.get(arch, 10_000.0))
    older = _number(file, f"{arch}.rope.scale_linear", default=0.0)
    # Zero is how a file says that there is none.
    factor = _number(file, f"{prefix}.factor", default=older) or 1.0
    # llama.cpp's rule: a factor alone is linear.
    kind = file.metadata.get(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    check_rope_type(str(kind))
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = _whole(file, f"{prefix}.original_context_length")
        parameters["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (key := f"{prefix}.yarn_{name}") in file.metadata:
                parameters[name] = _number(file, key)
    return parameters
