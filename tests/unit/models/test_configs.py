"""Configs as we complete them, against transformers' own config classes.

Every field that a served architecture's config has, with every plausible other value, must
give the same description of the model. What transformers refuses we refuse, but for fields that are
of no account in the model at hand.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manyroots.errors import ModelError
from manyroots.layers.rotary import rope_frequencies
from manyroots.models.configs import Config, complete
from manyroots.models.fields import check_fields
from manyroots.models.load import describe
from manyroots.models.registry import CONFIG_TYPES, FIELDS, WRITTEN_FIELDS
from manyroots.models.source import ModelSource, SourceKind
from manyroots.models.spec import ModelSpec
from tests.helpers.seeded import Draw, for_seeds
from tests.soaks.config_fields import FULL, NOT_OF_THE_MODEL, SLIDING, cases, foreign_cases, ropes
from tests.soaks.config_fields import KINDS as MODELS
from tests.unit.models.tiny import tiny_config

OF_NO_ACCOUNT = ("layer_types", "layers_block_type")
"""Transformers refuses unknown names in them of models that don't look at them, too."""
SAME_CLASS = ("llama-biased", "granite-h-dense", "falcon-h1-norm", "phi3-long")
"""Kinds of tiny models whose config has nothing in it that another's has not."""
REFUSED_HERE = {("olmo3", "rope_theta")}
"""Fields by kind that transformers takes: its versions disagree on what they mean."""
TAKEN_HERE = {
    ("phi3", "rope_scaling"), ("phi3", "rope_parameters"), ("mixtral", "rope_parameters"),
    ("nemotron-h", "rope_scaling"), ("nemotron-h", "rope_parameters"),
    ("nemotron-h", "moe_latent_size"), ("nemotron-h", "num_key_value_heads"),
    ("nemotron-h", "mamba_ssm_cache_dtype"), ("nemotron-h", "mtp_layers_block_type"),
    ("nemotron-h", "time_step_limit"), ("deepseek-v32", "head_dim"), ("glm-moe-dsa", "head_dim"),
}  # fmt: skip
"""Fields by kind of which transformers refuses values that mean something, or nothing, here."""
OLDER_ROPES = {"rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq"}
TYPING = {
    "full_attn_idxs", "full_attention_interval", "sliding_window_pattern", "max_window_layers",
    "use_sliding_window",
}  # fmt: skip
"""Fields that count where layers have no types yet."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)


def theirs(written: Mapping[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(written))
    return AutoConfig.from_pretrained(folder)


def theirs_at_once(written: Mapping[str, Any], folder: Path) -> Any:
    """The same without the search for files of many other names and without a text of the config
    for a log that is off. Both take longer."""
    (folder / "config.json").write_text(json.dumps(written))

    def read(*_: object, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return PreTrainedConfig._dict_from_json_file(folder / "config.json"), options

    with (
        mock.patch.object(PreTrainedConfig, "get_config_dict", read),
        mock.patch.object(PreTrainedConfig, "__repr__", object.__repr__),
    ):
        return AutoConfig.from_pretrained(folder)


def ours(written: Mapping[str, Any]) -> Config:
    return complete(written["model_type"], written)


def spec(make: Callable[[], Any]) -> ModelSpec | Exception:
    """The description of a config, or why there is none."""
    try:
        config = make()
        return describe(ModelSource(SourceKind.FOLDER, Path("x"), config, "x", (2,), None))
    except Exception as error:
        return error


@cache
def tiny_json(kind: str) -> str:
    return str(tiny_config(kind).to_json_string())


def changed(kind: str, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tiny model's config.json with changes; None if it is refused before it is completed."""
    written = {**json.loads(tiny_json(kind)), **changes}
    if OLDER_ROPES & changes.keys():
        written.pop("rope_parameters", None)
    if TYPING & changes.keys():
        written.pop("layer_types", None)
    try:
        check_fields(written, "it", WRITTEN_FIELDS)
    except ModelError:
        return None
    return written


def check_same(kind: str, changes: Mapping[str, Any], folder: Path) -> None:
    written = changed(kind, changes)
    if written is None:
        return
    wanted, found = spec(lambda: theirs_at_once(written, folder)), spec(lambda: ours(written))
    of_kind = {(kind.removesuffix("-long"), field) for field in changes}
    if isinstance(found, Exception) and of_kind & REFUSED_HERE:
        return
    if isinstance(wanted, ModelSpec):
        assert found == wanted, (kind, changes)
    elif not changes.keys() & set(OF_NO_ACCOUNT) and not of_kind & TAKEN_HERE:
        assert isinstance(found, Exception), (kind, changes, wanted)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in SAME_CLASS])
def test_every_field_means_what_transformers_makes_of_it(kind: str, tmp_path: Path) -> None:
    written = json.loads(tiny_json(kind))
    at_once, usual = theirs_at_once(written, tmp_path), theirs(written, tmp_path)
    assert at_once.to_diff_dict() == usual.to_diff_dict()
    for field, value in cases(kind):
        if field not in NOT_OF_THE_MODEL:
            check_same(kind, {field: value}, tmp_path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("deepseek-v3", "head_dim", 4),
        ("deepseek-v3", "head_dim", None),
        ("kimi-linear", "rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("kimi-linear", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_f01_rotations_that_the_model_does_not_have_are_refused_by_name(
    kind: str, field: str, value: Any
) -> None:
    """F01: transformers would rotate heads of another size, or refuses to read the config."""
    written = changed(kind, {field: value})
    assert written is not None
    refused = spec(lambda: ours(written))
    assert isinstance(refused, ModelError)
    assert f"the model's {field}" in str(refused)


def test_f01_a_head_of_another_size_counts_for_nothing_where_nothing_is_rotated() -> None:
    """F01: the published Kimi Linear says 72 beside 64."""
    written, other = changed("kimi-linear", {}), changed("kimi-linear", {"head_dim": 72})
    assert written is not None
    assert other is not None
    assert spec(lambda: ours(other)) == spec(lambda: ours(written))


@for_seeds(6)
def test_fields_together_mean_the_same(draw: Draw, tmp_path: Path) -> None:
    kind = draw.choice(MODELS)
    possible = [
        one for one in [*cases(kind), *foreign_cases(kind)] if one[0] not in NOT_OF_THE_MODEL
    ]
    for _ in range(10):
        check_same(kind, dict(draw.sample(possible, draw.randint(2, 5))), tmp_path)


@pytest.mark.parametrize("model_type", CONFIG_TYPES)
def test_what_a_file_leaves_out_has_transformers_defaults(model_type: str, tmp_path: Path) -> None:
    written: dict[str, Any] = {"model_type": model_type}
    if model_type in ("falcon_h1", "granitemoehybrid"):
        written |= {"mamba_n_heads": 64, "mamba_d_ssm": None}  # theirs do not go together
    # A config of V3 under another name, which transformers does not know by itself.
    same = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)
    wanted, found = theirs(written | {"model_type": same}, tmp_path), ours(written)
    for made, own in ((wanted, found), (wanted.get_text_config(), found.get_text_config())):
        names = {*FIELDS, "rope_parameters", "time_step_limit", "dtype", "swiglu_alpha"}
        if model_type == "falcon_h1":
            names.remove("layer_types")  # all alike, and not asked for
        if model_type != "nemotron_h":
            names.discard("layers_block_type")  # elsewhere another name of `layer_types`
        if model_type == "minicpm3":
            names.remove("logits_scaling")  # no field: a property that follows from two others
        for name in names - {"architectures", "is_causal", "model_type"}:
            if hasattr(own, name) or name in FIELDS:
                assert getattr(own, name, None) == getattr(made, name, None), name


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("is_tied", [True, False, None])
def test_the_text_part_of_a_model_that_sees(
    model_type: str, is_tied: bool | None, tmp_path: Path
) -> None:
    kind = {"gemma3": "gemma3", "qwen3_5": "qwen3.5", "qwen3_5_moe": "qwen3.5-moe"}[model_type]
    text = json.loads(tiny_config(kind).to_json_string())
    written = {"model_type": model_type, "text_config": text, "torch_dtype": "bfloat16"}
    if is_tied is not None:
        written["tie_word_embeddings"] = is_tied
    wanted, found = theirs(written, tmp_path), ours(written)
    assert spec(lambda: found) == spec(lambda: wanted)
    assert isinstance(spec(lambda: found), ModelSpec)
    assert found.dtype is wanted.dtype is torch.bfloat16


SERVED = ("linear", "llama3", "yarn")


@pytest.mark.parametrize("kind", MODELS)
def test_a_completed_config_is_the_same_to_transformers(kind: str) -> None:
    """The benches make its models of ours."""
    good = tiny_config(kind)
    made = AutoConfig.for_model(**ours(json.loads(good.to_json_string())).to_dict())
    assert type(made) is type(good)
    assert spec(lambda: made) == spec(lambda: good)


def rope_cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for parameters in ropes(5e5):
        if parameters.get("rope_type", parameters.get("type")) in SERVED:
            found.append({"rope_parameters": parameters})
            found.append({"rope_parameters": parameters, "original_max_position_embeddings": 64})
    for length in (2048, 8192, 131072):
        for factor in (1.0, 4.0, 7.7, 40):
            scaled = {"factor": factor, "original_max_position_embeddings": length}
            llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
            found += [
                {"rope_parameters": rope, "head_dim": 128, "rope_theta": 1e6}
                for rope in (scaled | llama3, scaled | {"rope_type": "yarn"})
            ]
    return [*found, {"rope_parameters": {"rope_type": "yarn", "factor": None}, "head_dim": 64}]


@pytest.mark.parametrize("changes", rope_cases(), ids=str)
def test_scaled_frequencies_are_transformers_to_the_last_bit(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of a model type that may turn a part of each head."""
    good = json.loads(tiny_config("qwen3.5").to_json_string())
    written = {**good, "partial_rotary_factor": 1.0, **changes}
    config, made = ours(written), theirs(written, tmp_path)
    kind = made.rope_parameters["rope_type"]
    exact, scaling = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"))
    found = rope_frequencies(config, config.head_dim, is_partial=True)
    assert found.frequencies == tuple(exact.tolist())
    assert found.attention_scaling == scaling


def test_ropes_by_type_of_layer_are_scaled_as_transformers_does(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "truncate": False}
    parameters = {FULL: yarn, SLIDING: {"rope_type": "linear", "factor": 2.0}}
    for beside in ({}, {"truncate": False}):
        written = changed("gemma3", {"rope_parameters": parameters | beside})
        assert written is not None
        made, config = theirs(written, tmp_path), ours(written)
        for layer_type, kind in ((FULL, "yarn"), (SLIDING, "linear")):
            exact, scaling = ROPE_INIT_FUNCTIONS[kind](
                made, torch.device("cpu"), layer_type=layer_type
            )
            found = rope_frequencies(config, config.head_dim, layer_type=layer_type)
            assert found.frequencies == tuple(exact.tolist())
            assert found.attention_scaling == scaling
