"""Makes a config from a GGUF file's metadata.

Takes an open `GGUFFile`; gives the content of a `config.json` and a `generation_config.json`: the
config object, the end-of-sequence tokens and the file's own rotary factors. Refuses metadata that
this version cannot compute.
"""

from __future__ import annotations

import numpy as np

from manyroots.errors import ModelError
from manyroots.files.gguf_tokens import special_token
from manyroots.layers.rotary import check_rope_type
from manyroots.models.architecture import GgufForm, Values
from manyroots.models.configs import Config, complete
from manyroots.models.fields import check_fields
from manyroots.models.gguf_unread import refuse_unread
from manyroots.models.registry import ARCHITECTURES, FIELDS
from manyroots.models.weights.gguf import ROPE_FACTORS
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import gguf_window

_F32 = 0
"""The number of plain float32 among GGUF's types."""
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>",
})  # fmt: skip
"""Texts of tokens that end a sequence: llama.cpp's rule, on which converters rely. Files of Gemma
name only <eos>, but its turns end with another token."""

_YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Fields of YaRN that the converter copies from a config if it has them, and their keys."""


def config_of(file: GGUFFile) -> Config:
    """The config of the model in `file`."""
    architecture, form = _form_of(file)
    values = _values(file, form)
    refuse_unread(file, form, values["head_dim"])
    window = gguf_window(file)
    if window:
        # For all layers. Like transformers, llama.cpp counts the query itself.
        values |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    # Before the config is made: it has a list with an entry per layer.
    check_fields(values, f"the metadata of {file.path}", FIELDS)
    values |= form.config(file, values)
    check_fields(values, f"the metadata of {file.path}", FIELDS)
    try:
        return complete(
            form.model_type, {"architectures": [architecture], "dtype": _dtype(file), **values}
        )
    except ValueError as error:
        raise ModelError(
            f"the metadata of {file.path} can't be used: {error} Convert the model again."
        ) from error


def _form_of(file: GGUFFile) -> tuple[str, GgufForm]:
    """The architecture's name in a config, and the form of its files."""
    arch = str(file.metadata.get("general.architecture"))
    forms = [(name, known.gguf) for name, known in ARCHITECTURES.items() if known.gguf is not None]
    same = [(name, form) for name, form in forms if form.name == arch]
    if not same:
        served = ", ".join(dict.fromkeys(form.name for _, form in forms))
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; this version serves GGUF files "
            f"of {served}."
        )
    has_experts = bool(file.metadata.get(f"{arch}.expert_count", 0))
    same = [(name, form) for name, form in same if form.has_experts == has_experts]
    if not same:
        served = ", ".join(dict.fromkeys(form.name for _, form in forms if form.has_experts))
        raise ModelError(
            f"{file.path} holds a mixture of experts of architecture {arch!r}; this version serves "
            f"those of {served}, and {arch!r} only dense."
            if has_experts
            else f"{file.path} is of architecture {arch!r} and has no experts; convert it again."
        )
    # The last form that matches the file: the general one of a name comes first.
    return next((name, form) for name, form in reversed(same) if form.is_meant(file))


def _dtype(file: GGUFFile) -> str:
    """float32 if every matrix has it; otherwise the dtype from which quantized models were made."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {_F32} else "bfloat16"


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end a sequence, the tokenizer's own first."""
    keys = (f"tokenizer.ggml.{key}" for key in _EOS_KEYS)
    found = [file.whole(key, least=0) for key in keys if key in file.metadata]
    named = "tokenizer.ggml.eos_token_id" in file.metadata
    if not named and (meant := special_token(file.metadata, "eos")) is not None:
        found.insert(0, meant)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found += [index for index, token in enumerate(tokens) if token in _ENDS]
    return tuple(dict.fromkeys(found))


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Llama 3's scaling in GGUF files: a divisor for each rotary frequency."""
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read(ROPE_FACTORS).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(
            f"{ROPE_FACTORS} of {file.path} has factors that are not positive numbers; convert "
            "the model again."
        )
    return tuple(factors.tolist())


def _values(file: GGUFFile, form: GgufForm) -> Values:
    arch = form.name
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path} has no token_embd.weight with rows and columns; it is not a whole model."
        )
    hidden = file.whole(f"{arch}.embedding_length")
    heads = file.whole(f"{arch}.attention.head_count")
    head_dim = file.whole(f"{arch}.attention.key_length", default=hidden // heads)
    rotated = file.whole(f"{arch}.rope.dimension_count", default=head_dim)
    if rotated != head_dim and "rope.dimension_count" not in form.reads:
        raise ModelError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions of each head; this version "
            "serves models that rotate whole heads."
        )
    eos = eos_token_ids(file)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole(f"{arch}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "num_hidden_layers": file.whole(f"{arch}.block_count"),
        "intermediate_size": file.whole(f"{arch}.feed_forward_length"),
        "max_position_embeddings": file.whole(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(eos) or None,
        "rope_parameters": _rope_parameters(file, form),
    }


def _rope_parameters(file: GGUFFile, form: GgufForm) -> Values:
    arch = form.name
    prefix = f"{arch}.rope.scaling"
    theta = file.number(f"{arch}.rope.freq_base", default=form.theta)
    older = file.number(f"{arch}.rope.scale_linear", default=0.0)
    # Zero means none.
    factor = file.number(f"{prefix}.factor", default=older) or 1.0
    # llama.cpp's rule: a factor alone is linear.
    kind = file.metadata.get(f"{prefix}.type", "none" if factor == 1.0 else "linear")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    check_rope_type(str(kind))
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = file.whole(f"{prefix}.original_context_length")
        parameters["original_max_position_embeddings"] = original
        for name, theirs in _YARN.items():
            if (key := f"{prefix}.{theirs}") in file.metadata:
                parameters[name] = file.number(key)
    return parameters
