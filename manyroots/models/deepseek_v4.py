"""DeepSeek V4: attention with windows, and compressed groups of tokens before them.

There are three types of layers. All see a window of tokens. Two also see entries: one for each
group of few tokens, among which queries choose by an index, or one for each group of many. The
residual is several streams, joined by hyper-connections. In the first layers the token alone
determines the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import CLIP_LIMIT, Activation
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.rotary import RopeSpec
from manyroots.layers.spec import (
    CompressedSpec,
    DenseSpec,
    GroupSpec,
    HyperSpec,
    IndexSpec,
    LayerSpec,
    SharedSpec,
)
from manyroots.models.architecture import Architecture, ConfigType, Tensors, Values
from manyroots.models.fields import MAX_SIDE, NAME, POSITIVE, number, whole
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.windows import SLIDING

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATE = {0: SLIDING, 4: SPARSE, 128: HEAVY}
HASHED, ROUTED = "hash_moe", "moe"
_MAIN, _COMPRESS = "main", "compress"
_SCORINGS = {
    "sqrtsoftplus": Scoring.SQRT_SOFTPLUS_RENORMALISED,
    "sigmoid": Scoring.SIGMOID_RENORMALISED,
}
_NAMES = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"^(?=layers\.|norm\.|embed\.|hc_head_)", "model."),
        (r"^head\.", "lm_head."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^model\.hc_head_", "model.hc_head.hc_"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (
            r"\.self_attn\.indexer\.weights_proj\.",
            ".self_attn.compressor.indexer.scorer.weights_proj.",
        ),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn_sink$", ".sinks"),
        (r"(\.self_attn(?:\.compressor(?:\.indexer)?)?)\.norm\.", r"\1.kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.w(q_a|q_b|kv|o_a|o_b|gate)\.", r".\1_proj."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)
"""The names in published checkpoints, and transformers' names."""


def describe(reader: ConfigReader) -> ModelSpec:
    """DeepSeek-V4-Flash and V4-Pro."""
    text = reader.text
    _check(text)
    sizes = {SPARSE: text.compress_rates[SPARSE], HEAVY: text.compress_rates[HEAVY]}
    kinds = reader.layer_types((SLIDING, SPARSE, HEAVY))
    rope = reader.rope(_COMPRESS, is_partial=True)
    ropes = [reader.rope(_MAIN, is_partial=True), rope]
    ropes += [_by_group(rope, size) for size in sizes.values()]
    index = IndexSpec(
        num_heads=text.index_n_heads, head_dim=text.index_head_dim, num_chosen=text.index_topk
    )
    groups = {
        SLIDING: None,
        SPARSE: GroupSpec(size=sizes[SPARSE], overlaps=True, index=index, rope=2),
        HEAVY: GroupSpec(size=sizes[HEAVY], overlaps=False, index=None, rope=3),
    }
    blocks = {HASHED: _experts(reader, is_hashed=True), ROUTED: _experts(reader, is_hashed=False)}
    hyper = HyperSpec(
        num_streams=text.hc_mult, num_iterations=text.hc_sinkhorn_iters, eps=text.hc_eps
    )
    layers = [
        LayerSpec(mixers=(_attention(text, groups[kind]),), feed_forward=blocks[block], hyper=hyper)
        for kind, block in zip(kinds, text.mlp_layer_types, strict=True)
    ]
    return reader.model(layers, ropes=ropes)


def _attention(text: Any, groups: GroupSpec | None) -> CompressedSpec:
    return CompressedSpec(
        num_heads=text.num_attention_heads,
        head_dim=text.head_dim,
        window=text.sliding_window,
        q_rank=text.q_lora_rank,
        out_groups=text.o_groups,
        out_rank=text.o_lora_rank,
        rope=0 if groups is None else 1,
        scale=text.head_dim**-0.5,
        norm_eps=text.rms_norm_eps,
        groups=groups,
    )


def _by_group(rope: RopeSpec, size: int) -> RopeSpec:
    return RopeSpec(rope.frequencies, rope.attention_scaling, group=size)


def _experts(reader: ConfigReader, *, is_hashed: bool) -> SharedSpec:
    text = reader.text
    inner = text.moe_intermediate_size
    return SharedSpec(
        experts=reader.experts(
            text.n_routed_experts,
            intermediate_size=inner,
            scoring=_SCORINGS[text.scoring_func],
            activation=Activation.CLIPPED_SILU,
            has_correction=not is_hashed,
            vocab_size=text.vocab_size if is_hashed else None,
            factor=float(text.routed_scaling_factor),
        ),
        shared=DenseSpec(
            intermediate_size=inner,
            activation=Activation.CLIPPED_SILU,
            bias=text.mlp_bias,
            name="mlp.shared_experts",
        ),
        gate=None,
    )


def _check(text: Any) -> None:
    """Refuse what this version does not compute."""
    served: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("hidden_act", ("silu",)),
        ("swiglu_limit", (CLIP_LIMIT,)),
        ("scoring_func", tuple(_SCORINGS)),
        ("num_key_value_heads", (1,)),
    )
    for field, values in served:
        value = getattr(text, field)
        if value not in values:
            raise ModelError(
                f"the model's {field} is {value!r}; this version computes "
                f"{' or '.join(map(repr, values))} in DeepSeek V4. Choose another checkpoint."
            )
    if text.num_attention_heads % text.o_groups:
        raise ModelError(
            f"the model has {text.num_attention_heads} attention heads and o_groups "
            f"{text.o_groups}; the first must be a multiple of the second. Check its config.json."
        )
    rotated = int(text.head_dim * text.partial_rotary_factor)
    if text.index_head_dim < rotated:
        raise ModelError(
            f"the model's index_head_dim is {text.index_head_dim}, and it rotates {rotated} "
            "numbers of each head; the first must be at least the second. Check its config.json."
        )
    if text.sliding_window < 1:
        raise ModelError(
            f"the model's sliding_window is {text.sliding_window}; it must be at least 1. Correct "
            "its config.json."
        )
    blocks, count = text.mlp_layer_types, text.num_hidden_layers
    if len(blocks) != count or set(blocks) - {HASHED, ROUTED}:
        raise ModelError(
            f"the model has {count} layers, and its mlp_layer_types {len(blocks)} entries "
            f"({', '.join(sorted(set(blocks)))[:200]}); there must be {HASHED!r} or {ROUTED!r} for "
            "each. Check its config.json."
        )


def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Tensors with transformers' names; without layers that draft tokens, which are not served."""
    return per_expert(_renamed(weights))


def _renamed(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name.startswith(("mtp.", "model.mtp.")):
            continue
        for theirs, ours in _NAMES:
            name = theirs.sub(ours, name)
        yield name, tensor


def _finish(values: Values) -> None:
    count = values["num_hidden_layers"]
    rates = dict(
        {SPARSE: 4, HEAVY: 128} if values["compress_rates"] is None else values["compress_rates"]
    )
    for name, older in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        if values.get(older) is not None:
            rates[name] = values[older]
    values["compress_rates"] = rates
    if values["layer_types"] is None:
        given = values.get("compress_ratios")
        if given is not None:
            values["layer_types"] = [_BY_RATE[rate] for rate in given]
        else:
            rest = [SPARSE if n % 2 else HEAVY for n in range(max(count - 2, 0))]
            values["layer_types"] = [HEAVY] * min(count, 2) + rest
    values["layer_types"] = values["layer_types"][:count]
    if values["mlp_layer_types"] is None:
        num_hashed = values.get("num_hash_layers")
        num_hashed = 3 if num_hashed is None else num_hashed
        values["mlp_layer_types"] = [HASHED if n < num_hashed else ROUTED for n in range(count)]
    values["mlp_layer_types"] = values["mlp_layer_types"][:count]
    if values["partial_rotary_factor"] is None:
        rotated = values.get("qk_rope_head_dim")
        values["partial_rotary_factor"] = (
            64 / 512 if rotated is None else rotated / values["head_dim"]
        )
    values["qk_rope_head_dim"] = int(values["head_dim"] * values["partial_rotary_factor"])
    values["rope_parameters"] = _ropes(values)
    said, dtype = values.get("quantization_config"), values.get("expert_dtype")
    if isinstance(said, dict) and dtype is not None:
        values["quantization_config"] = {"expert_dtype": dtype, **said}


def _ropes(values: Values) -> Any:
    """Two sets, from any spelling: layers without groups have the first."""
    written = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(written, dict):
        return written  # refused when it is read
    if isinstance(written.get(_MAIN), dict) and isinstance(written.get(_COMPRESS), dict):
        return {name: written[name] for name in (_MAIN, _COMPRESS)}
    partial = values["partial_rotary_factor"]
    scaled = {name: one for name, one in written.items() if name not in (_MAIN, _COMPRESS)}
    scaled |= {"rope_theta": values["compress_rope_theta"]}
    scaled.setdefault("rope_type", scaled.get("type", "default"))
    scaled["partial_rotary_factor"] = partial
    if scaled["rope_type"] == "yarn":
        scaled.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
        scaled.setdefault("attention_factor", 1.0)
    plain = {
        "rope_type": "default",
        "rope_theta": values["rope_theta"],
        "partial_rotary_factor": partial,
    }
    return {_MAIN: plain, _COMPRESS: scaled}


def _are_rates(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and {SPARSE, HEAVY} <= set(value)
        and all(type(one) is int and 1 <= one <= 1024 for one in value.values())
    )


ARCHITECTURES = {
    "DeepseekV4ForCausalLM": Architecture(
        {
            "deepseek_v4": ConfigType(
                {
                    "hidden_act": "silu",
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                    "vocab_size": 129280,
                    "hidden_size": 4096,
                    "moe_intermediate_size": 2048,
                    "num_hidden_layers": 43,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 1,
                    "head_dim": 512,
                    "q_lora_rank": 1024,
                    "num_experts_per_tok": 6,
                    "n_routed_experts": 256,
                    "n_shared_experts": 1,
                    "scoring_func": "sqrtsoftplus",
                    "norm_topk_prob": True,
                    "routed_scaling_factor": 1.5,
                    "max_position_embeddings": 1048576,
                    "rope_theta": 10000.0,
                    "layer_types": None,
                    "compress_rates": None,
                    "compress_rope_theta": 160000.0,
                    "hc_mult": 4,
                    "hc_sinkhorn_iters": 20,
                    "hc_eps": 1e-6,
                    "mlp_layer_types": None,
                    "swiglu_limit": 10.0,
                    "sliding_window": 128,
                    "o_groups": 8,
                    "o_lora_rank": 1024,
                    "index_n_heads": 64,
                    "index_head_dim": 128,
                    "index_topk": 512,
                    "eos_token_id": 1,
                    "partial_rotary_factor": None,
                    "attention_bias": False,
                    "mlp_bias": False,
                },
                _finish,
                other_names={
                    "n_routed_experts": "num_local_experts",
                    "moe_intermediate_size": "intermediate_size",
                },
            )
        },
        describe,
        translate,
        fields={
            "compress_rates": (
                f"an object with {SPARSE} and {HEAVY}, each a whole number between 1 and 1024",
                _are_rates,
            ),
            "compress_rope_theta": POSITIVE,
            "scoring_func": NAME,
            "hc_mult": whole(1, 64),
            "hc_sinkhorn_iters": whole(1, 1000),
            "hc_eps": number("a number between 0 and 1", lambda value: 0 <= value <= 1),
            "o_groups": whole(1, MAX_SIDE),
            "o_lora_rank": whole(1, MAX_SIDE),
        },
    ),
}
