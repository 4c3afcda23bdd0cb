"""Every field of a config, one at a time: ours against transformers.

    python -m tests.soaks.config_fields [--kind NAME] [--field NAME]

For each architecture that is served: the fields of its config class, those that its modelling code
and transformers' shared code read, and those of all other architectures (which strangers leave in
config.json, too), each with every plausible other value. The model that transformers makes of that
config.json must have our logits, or we must refuse it in words that name the field. Prints a line
for each that is neither, and a table of how the fields ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from manyroots.errors import ModelError
from tests.soaks.odd_models import Theirs
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import MODELS, load_tiny, randomise, tiny_config

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
TOKENS = {"a": [(i * 37 + i * i) % 90 for i in range(37)], "b": [5]}
SHARED_CODE = ("masking_utils", "modeling_rope_utils", "modeling_utils", "integrations.moe")
KINDS = (
    "llama", "llama-biased", "mistral", "mistral-window", "qwen2", "qwen2-window", "qwen3",
    "qwen3-window", "qwen3-moe", "qwen3-moe-window", "gemma3", "gpt-oss", "lfm2", "qwen3-next",
    "qwen3.5", "qwen3.5-moe", "granite-h", "granite-h-dense", "falcon-h1", "falcon-h1-norm",
    "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "minicpm3", "kimi-linear", "ministral",
    "mixtral", "gemma2", "olmo2", "olmo3", "phi3", "phi3-long", "smollm3", "granite", "glm4-moe",
    "nemotron-h", "deepseek-v32", "glm-moe-dsa", "deepseek-v4",
)  # fmt: skip
NOT_OF_THE_MODEL = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map",
    "text_config", "vision_config", "quantization_config", "sub_configs", "base_model_tp_plan",
    "base_model_pp_plan", "distributed_config", "fusion_config", "json", "id2label", "label2id",
    "transformers_weights", "name_or_path", "problem_type",
}  # fmt: skip
"""Which model it is, what is of classes and not of configs, and what other tests look at."""
EVERYWHERE = (
    "is_causal", "per_layer_config", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "head_dim", "sliding_window", "layer_types", "layers_block_type",
)  # fmt: skip
"""Fields that shared code reads, of whatever config has them."""


OF_NO_ACCOUNT = "of no account"


class Ending(NamedTuple):
    """What came of a config, and what was said of it."""

    how: str
    words: str = ""


def ropes(theta: float = 1e4) -> list[dict[str, Any]]:
    """Of each kind that transformers has, complete and not."""
    half = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    plain = {"rope_type": "default", "rope_theta": theta}
    scaled = {"rope_theta": theta, "factor": 4.0, "original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds: list[dict[str, Any]] = [
        plain,
        {**plain, "rope_theta": 77.0},
        {**plain, "partial_rotary_factor": 0.5},
        {**plain, "factor": 4.0},
        {**plain, "attention_factor": 2.0},
        {**plain, "mrope_section": [1, 1, 2], "mrope_interleaved": True},
        {**plain, "mrope_section": [2, 1, 1], "mrope_interleaved": False},
        {"rope_type": "default"},
        {"rope_theta": theta},
        {**scaled, "rope_type": "linear"},
        {**scaled, "rope_type": "linear", "partial_rotary_factor": 0.5},
        {**scaled, "type": "linear"},
        {**scaled, "rope_type": "dynamic"},
        {**scaled, "rope_type": "dynamic", "alpha": 10.0},
        {**scaled, "rope_type": "proportional"},
        {**scaled, "rope_type": "proportional", "partial_rotary_factor": 0.5},
        {**scaled, **half, "rope_type": "longrope"},
        {**scaled, **llama3},
        {**scaled, **llama3, "partial_rotary_factor": 0.5},
        {**scaled, "rope_type": "yarn"},
        {**scaled, "rope_type": "yarn", "attention_factor": 0.7},
        {**scaled, "rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4},
        {**scaled, "rope_type": "yarn", "mscale": 0.7},
        {**scaled, "rope_type": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {**scaled, "rope_type": "yarn", "partial_rotary_factor": 0.5},
        {**scaled, "rope_type": "yarn", "finetuned": True, "extrapolation_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0},
        {**scaled, "rope_type": "mrope"},
        {**scaled, "rope_type": "su"},
    ]
    by_type = {FULL: {**scaled, "rope_type": "linear"}, SLIDING: plain}
    return [*kinds, by_type, {FULL: plain}, {**by_type, RECURRENT: plain}]


def patterns(layers: int) -> list[list[str]]:
    every = ["full_attention", "sliding_attention", "linear_attention", "conv", "chunked_attention",
             "mamba", "attention", "hybrid", "sparse"]  # fmt: skip
    alternating = [[a if i % 2 else b for i in range(layers)] for a, b in pairwise(every)]
    return [[kind] * layers for kind in every] + alternating + [[FULL] * (layers - 1)]


VALUES: dict[str, list[Any]] = {
    "hidden_act": sorted(ACT2FN),
    "hidden_activation": sorted(ACT2FN),
    "sliding_window": [None, 1, 7, 11, 500, 0],
    "num_key_value_heads": [1, 2, 3, 6, None],
    "num_attention_heads": [2, 4, 6, 8, 12],
    "head_dim": [4, 8, 10, 16, 32, None],
    "hidden_size": [36, 54, 60, 96],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "rope_theta": [77.0, 5e5],
    "rope_local_base_freq": [77.0],
    "rope_scaling": [
        None, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0}, {"type": "default"}, {"type": "yarn", "factor": 2.0},
        {"type": "mrope", "mrope_section": [1, 1, 2]},
    ],
    "time_step_limit": [[0.0, 0.1], [0.01, 100.0], None],
    "time_step_min": [0.5], "time_step_max": [0.1], "time_step_floor": [0.5],
    "mamba_dt_min": [0.5], "mamba_dt_limit": [[0.0, 0.1]],
    "position_embedding_type": ["rope", "nope", None, "alibi", "absolute"],
    "attention_chunk_size": [3],
    "is_causal": [False, True],
    "is_decoder": [False, True],
    "use_bidirectional_attention": [True, "all", "vision"],
    "per_layer_config": [
        {"0": {"intermediate_size": 16}}, {"1": {"rms_norm_eps": 0.5}},
        {"1": {"sliding_window": 3}}, {"0": {"num_key_value_heads": 1}},
        {"0": {"hidden_act": "relu"}}, {},
    ],
    "mlp_only_layers": [[0], [1, 2], []],
    "attn_logit_softcapping": [None, 5.0], "final_logit_softcapping": [None, 5.0],
    "logit_softcapping": [5.0], "router_logit_softcapping": [5.0],
    "attention_multiplier": [0.05, 2.0], "logits_scaling": [0.3, 3.0], "logit_scale": [0.5],
    "eos_token_id": [None, 5, [1, 2]], "pad_token_id": [None, 0, 5], "bos_token_id": [None, 5],
    "sliding_window_pattern": [2, 3], "_sliding_window_pattern": [2, 3],
    "full_attention_interval": [1, 2], "interleave_moe_layer_step": [2], "n_group": [2, 4],
    "topk_group": [1, 2], "routed_scaling_factor": [2.5], "n_shared_experts": [1, 2],
    "scoring_func": ["sigmoid"], "first_k_dense_replace": [1, 2], "topk_method": ["noaux_tc"],
    "num_shared_experts": [1], "use_qk_norm": [True, False], "qk_layernorm": [True, False],
    "qk_norm": [True], "use_qkv_bias": [True], "qkv_bias": [True, False], "no_rope_layers": [[0]],
    "no_rope_layer_interval": [2], "attention_out_bias": [True], "o_bias": [True],
    "use_rope": [False], "rotary_pct": [0.5], "rotary_dim": [4], "rope_interleaved": [True],
    "rope_traditional": [True], "rope_ratio": [4.0], "attn_temperature_tuning": [True],
    "norm_type": ["layernorm"], "layer_norm_eps": [0.5], "layer_norm_epsilon": [0.5],
    "norm_epsilon": [0.5], "block_norm_eps": [0.5], "rms_norm_offset": [1.0],
    "add_unit_offset": [True], "scale_emb": [12.0], "scale_depth": [1.4], "dim_model_base": [16],
    "sandwich_norm": [True], "parallel_residual": [True], "use_parallel_residual": [True],
    "swiglu_limit": [None, 0.5, 7.0], "swiglu_alpha": [None, 1.0, 1.702], "use_sinks": [False],
    "attention_sink": [True], "pretraining_tp": [2], "use_mup": [True], "mup_enabled": [True],
    "layers_block_type": patterns(3),
    "block_ff_dim": [64], "block_dim": [60], "use_pos_enc": [False], "theta": [77.0],
    "conv_dim": [60], "conv_dim_out": [60], "block_use_swiglu": [False],
    "full_attn_idxs": [[0], [1, 2]], "num_heads": [2], "tie_embedding": [False, True],
    "mtp_num_hidden_layers": [1], "num_nextn_predict_layers": [1], "attn_output_gate": [False],
    "mamba_use_mlp": [False], "mamba_rms_norm": [True, False], "output_gate_type": ["silu"],
    "mlp_expansion_factor": [4], "router_bias": [False], "clip_qkv": [0.1],
    "norm_after": [True], "logits_soft_cap": [5.0], "num_logits_to_keep": [1, 2],
    "expert_layer_period": [2], "expert_layer_offset": [1], "attn_layer_period": [2],
    "attention_dropout": [0.5], "embd_pdrop": [0.5], "resid_pdrop": [0.5],
    "residual_dropout": [0.5], "embedding_dropout": [0.5], "router_jitter_noise": [0.5],
    "use_cache": [False], "output_attentions": [True], "output_hidden_states": [True],
    "return_dict": [False], "cross_attention_hidden_size": [16], "add_cross_attention": [True],
    "is_encoder_decoder": [True], "tie_encoder_decoder": [True], "pruned_heads": [{"0": [1]}],
    "chunk_size_feed_forward": [2], "attn_implementation": ["sdpa"], "vocab_size": [90, 131],
    "num_local_experts": [0, 1, 4, 8], "num_experts": [0, 1, 4, 8],
    "num_experts_per_tok": [1, 2, 8], "temperature": [0.3], "suppress_tokens": [[3, 4]],
}  # fmt: skip
"""By field: what it may be in some config of the world."""


def others(field: str, now: Any) -> list[Any]:
    """Plausible values of a field other than the one that it has."""
    if field in ("rope_parameters", "layer_types"):
        made: list[Any] = ropes() if field == "rope_parameters" else [*patterns(3), *patterns(4)]
        return [*made, None]
    if field in VALUES:
        found = VALUES[field]
    elif isinstance(now, bool):
        found = [not now]
    elif isinstance(now, int):
        found = [now + 1, now * 2, max(1, now // 2)]
    elif isinstance(now, float):
        found = [now * 3 + 0.1, now / 2]
    elif isinstance(now, list) and now and all(isinstance(one, float | int) for one in now):
        found = [[one * 1.5 for one in now]]
    else:
        found = [True, 2, 0.5]
    return [value for value in found if value != now or type(value) is not type(now)]


def fields_of(kind: str) -> dict[str, Any]:
    """Of its config class, with what they are in the tiny model."""
    config = tiny_config(kind)
    own = {one.name for one in dataclasses.fields(config)} | set(config.to_dict())
    return {name: getattr(config, name, None) for name in sorted(own)}


def fields_read(kind: str) -> set[str]:
    """What its modelling code, and the code that all share, asks a config for."""
    config_class = MODELS[kind][0]
    modelling = config_class.__module__.replace(".configuration_", ".modeling_")
    found: set[str] = set()
    for module in (modelling, *(f"transformers.{name}" for name in SHARED_CODE)):
        source = Path(module_file(module)).read_text()
        found |= set(re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", source))
        found |= set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", source))
    return found


def module_file(module: str) -> Path:
    root = Path(str(transformers.__file__)).parent
    return root.joinpath(*module.split(".")[1:]).with_suffix(".py")


def cases(kind: str) -> list[tuple[str, Any]]:
    """(field, value) for all that its config class has and that code which it runs reads."""
    own = fields_of(kind)
    names = {**dict.fromkeys([*EVERYWHERE, *sorted(fields_read(kind))]), **own}
    return [(name, value) for name, now in names.items() for value in others(name, now)]


def foreign_cases(kind: str) -> list[tuple[str, Any]]:
    """The same for all that other architectures' configs have, and some that are not served."""
    own = {*fields_of(kind), *fields_read(kind), *EVERYWHERE}
    names: dict[str, Any] = dict.fromkeys(VALUES)
    for other in KINDS:
        names |= fields_of(other)
    return [
        (name, value)
        for name, now in names.items() if name not in own
        for value in others(name, now)
    ]  # fmt: skip


def in_bundles(found: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Sets of cases with each field once."""
    while found:
        bundle = dict(reversed(found))
        yield list(bundle.items())
        found = [one for one in found if not any(one[1] is value and one[0] == name
                                                 for name, value in bundle.items())]  # fmt: skip


class Trial:
    """One kind of model, and how configs that differ from it in one field end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._good: dict[str, Any] = json.loads(tiny_config(kind).to_json_string())
        made = self._make(self._good)
        self._weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        self._logits = Theirs(made).logits(TOKENS["a"])

    def compare(self, changes: Mapping[str, Any]) -> Ending:
        """The ending of a config with these changes, of which the first counts for names."""
        config = {**self._good, **changes}
        if {"rope_scaling", "rope_theta", "partial_rotary_factor"} & changes.keys():
            config.pop("rope_parameters", None)  # as they were written before there were any
        if "full_attn_idxs" in changes:
            config.pop("layer_types", None)
        try:
            theirs = self._make(config)
            wanted = {name: Theirs(theirs).logits(tokens) for name, tokens in TOKENS.items()}
        except Exception as error:
            return Ending("not by transformers", str(error)[:200])
        has_effect = wanted["a"].shape != self._logits.shape or not torch.allclose(
            wanted["a"], self._logits, atol=1e-6
        )
        theirs.save_pretrained(self._folder)
        (self._folder / "config.json").write_text(json.dumps(config))
        try:
            ours = load_tiny(self._folder)
        except ModelError as error:
            return self._refusal(changes, str(error), has_effect=has_effect)
        try:
            Theirs(theirs).compare(PagedModel(ours).step(TOKENS), TOKENS)
        except AssertionError as error:
            return Ending("DIFFERS", str(error).splitlines()[0][:200])
        return Ending("read" if has_effect else OF_NO_ACCOUNT)

    def _refusal(self, changes: Mapping[str, Any], words: str, *, has_effect: bool) -> Ending:
        field, value = next(iter(changes.items()))
        parts = [field, *(value if isinstance(value, dict) else ()), "rotary", "rotates"]
        named = parts if "rope" in field or "rot" in field else parts[:-2]
        if not any(str(part) in words for part in named):
            return Ending("REFUSED, NOT BY NAME", words[:400])
        return Ending("refused by name" if has_effect else "refused, of no account", words[:400])

    def _make(self, config: Mapping[str, Any]) -> Any:
        """Transformers' model of a config.json, with the usual weights where they fit."""
        (self._folder / "config.json").write_text(json.dumps(config))
        read = AutoConfig.from_pretrained(self._folder)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(read, attn_implementation="eager").eval()
        if hasattr(read, "num_experts_per_tok"):
            model.set_experts_implementation("eager")
        randomise(model, self._kind, torch.default_generator)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        known: dict[str, Tensor] = getattr(self, "_weights", {})
        if shapes == {name: tensor.shape for name, tensor in known.items()}:
            model.load_state_dict(known)
        return model


def judge(trial: Trial, changes: Mapping[str, Any]) -> Ending:
    try:
        return trial.compare(changes)
    except Exception as error:
        return Ending("CRASH", f"{type(error).__name__}: {error}"[:400])


def judge_bundle(trial: Trial, bundle: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, Ending]]:
    """All of them at once, and one by one where together they are not of no account."""
    ending = judge(trial, dict(bundle))
    if ending.how == OF_NO_ACCOUNT or len(bundle) == 1:
        yield from ((field, value, ending) for field, value in bundle)
        return
    middle = len(bundle) // 2
    yield from judge_bundle(trial, bundle[:middle])
    yield from judge_bundle(trial, bundle[middle:])


def judgements(
    trial: Trial, kind: str, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    def is_wanted(field: str) -> bool:
        return field not in NOT_OF_THE_MODEL and (fields is None or field in fields)

    for field, value in cases(kind):
        if is_wanted(field):
            yield field, value, judge(trial, {field: value})
    for bundle in in_bundles([one for one in foreign_cases(kind) if is_wanted(one[0])]):
        yield from judge_bundle(trial, bundle)


def is_fault(how: str) -> bool:
    return how.isupper()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--field", action="append")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    endings: Counter[str] = Counter()
    for kind in options.kind or KINDS:
        of_field: dict[str, Counter[str]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for field, value, ending in judgements(Trial(kind, Path(folder)), kind, options.field):
                endings[ending.how] += 1
                of_field.setdefault(field, Counter())[ending.how] += 1
                if options.field or is_fault(ending.how):
                    shown = json.dumps(value)[:160]
                    print(f"{kind} {field}={shown}: {ending.how} {ending.words}", flush=True)
        for field, counts in of_field.items():
            print(f"| {kind} | {field} | {', '.join(f'{n} {h}' for h, n in counts.items())} |")
    print(json.dumps(dict(endings)))
    return int(any(map(is_fault, endings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
