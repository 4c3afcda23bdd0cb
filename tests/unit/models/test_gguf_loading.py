"""GGUF files give the same model as the checkpoint they were made from."""

from __future__ import annotations

import platform
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from manyroots.config import DEFAULT_MODEL, ModelSettings
from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.blocks import BlockMatrix, can_multiply_blocks
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.rotary import rope_frequencies
from manyroots.models.gguf_config import eos_token_ids
from manyroots.models.load import describe, load_model
from manyroots.models.quantization import keeps_blocks
from manyroots.models.source import resolve_source
from manyroots.models.spec import ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from tests.helpers.quick_gguf import quick_gguf
from tests.unit.models.gguf_writing import write_gguf
from tests.unit.models.tiny import (
    LLAMA3,
    WINDOW,
    YARN,
    load_tiny,
    save_tiny,
    tensors_of,
    tiny_config,
    tiny_spec,
)
from tests.unit.text.plain_sentencepiece import EOS, vocabulary, write_file

CPU = torch.device("cpu")
IN_GGUF: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "granite": {},
    "smollm3": {"num_hidden_layers": 5},
    "mixtral": {},
    "olmo2": {},
    "olmo3": {"rope_parameters": None},
    "phi3": {"sliding_window": None},
    "phi3-long": {},
    "glm4-moe": {},
    "glm4-moe-norm": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16},
}
"""Kinds, and what llama.cpp takes for granted of them and no file says."""


@pytest.mark.parametrize(
    "kind",
    ["llama", "llama-tied", "llama-biased", "mistral", "qwen2", "qwen3", *IN_GGUF],
)
def test_a_gguf_file_loads_as_the_checkpoint_it_was_made_from(kind: str, tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path / "folder", kind, **IN_GGUF.get(kind, {}))
    state = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    file = write_gguf(tmp_path / "model.gguf", theirs.config, state)
    by_folder, by_file = load_tiny(tmp_path / "folder"), load_tiny(file)
    # A Mistral without a window is a Llama to such files.
    found = replace(by_file.spec, architecture=by_folder.spec.architecture)
    assert as_float32(found) == as_float32(by_folder.spec)
    from_folder, from_file = tensors_of(by_folder), tensors_of(by_file)
    assert from_folder.keys() == from_file.keys()
    for name, weight in from_folder.items():
        assert torch.equal(weight, from_file[name]), name


def test_a_layer_that_predicts_tokens_ahead_is_left_out(tmp_path: Path) -> None:
    """Files of GLM-4.5 have it as one more block, with parts of its own."""
    theirs = save_tiny(tmp_path / "folder", "glm4-moe", num_hidden_layers=3)
    by_folder, state = load_tiny(tmp_path / "folder"), dict(theirs.state_dict())
    last = {name for name in state if name.startswith("model.layers.2.")}
    state |= {name.replace(".2.", ".3.", 1): state[name] for name in last}
    theirs.config.num_hidden_layers = 4
    file = write_gguf(
        tmp_path / "model.gguf", theirs.config, state,
        extra_metadata={"nextn_predict_layers": 1},
        extra_tensors={
            "blk.3.nextn.eh_proj.weight": np.zeros((48, 96), np.float32),
            "blk.3.nextn.shared_head_norm.weight": np.zeros(48, np.float32),
        },
    )  # fmt: skip
    from_folder, from_file = tensors_of(by_folder), tensors_of(load_tiny(file))
    assert from_folder.keys() == from_file.keys()
    for name, weight in from_folder.items():
        assert torch.equal(weight, from_file[name]), name


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_the_attention_factor_of_an_olmo_3_is_read_from_either_key(
    key: str, tmp_path: Path
) -> None:
    """The converter copies the config's attention_factor; it has written it under both."""
    yarn = {**YARN, "attention_factor": 1.25}
    plain = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
    ropes = {"full_attention": yarn, "sliding_attention": plain}
    config = tiny_config("olmo3", rope_parameters=ropes)
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        f"rope.scaling.{key}": 1.25,
    }
    file = write_gguf(tmp_path / "m.gguf", config, extra_metadata=metadata)
    spec = describe(resolve_source(ModelSettings(model=str(file))))
    assert spec.ropes == tiny_spec("olmo3", rope_parameters=ropes).ropes


def as_float32(value: Any) -> Any:
    """A description with its numbers as a file's metadata can have them."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, tuple):
        return tuple(as_float32(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: as_float32(getattr(value, name)) for name in names})
    return value


def test_a_gguf_file_of_gemma_is_the_checkpoint_that_it_was_made_from(tmp_path: Path) -> None:
    """Its metadata has one rotation and one window: which layers have which is filled in. Norms
    have 1 added, in float32, where a few have no room for all of their own digits."""
    theirs = save_tiny(tmp_path / "folder", "gemma3", **GEMMA_IN_GGUF)
    state = {
        name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"
    }
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    file = write_gguf(tmp_path / "m.gguf", theirs.config, state, extra_metadata=scaled)
    ours, by_file = load_tiny(tmp_path / "folder"), load_tiny(file)
    assert windows_of(by_file.spec) == [WINDOW] * 5 + [None, WINDOW]
    assert by_file.spec.rms_norm_eps == np.float32(ours.spec.rms_norm_eps)
    assert replace(by_file.spec, rms_norm_eps=ours.spec.rms_norm_eps) == ours.spec
    wanted = tensors_of(ours)
    assert wanted.keys() == tensors_of(by_file).keys()
    for name, weight in tensors_of(by_file).items():
        assert torch.equal(weight, wanted[name]), name


GEMMA_IN_GGUF: dict[str, Any] = {
    "layer_types": None,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
}
"""What llama.cpp's converter takes for granted of a Gemma 3."""


@pytest.mark.parametrize(
    ("metadata", "windows"),
    [
        ({}, [WINDOW] * 5 + [None, WINDOW]),
        ({"attention.sliding_window_pattern": 2}, [WINDOW, None] * 3 + [WINDOW]),
        (
            {"attention.sliding_window_pattern": [True, False, False, True, True, True, False]},
            [WINDOW, None, None, WINDOW, WINDOW, WINDOW, None],
        ),
        ({"attention.sliding_window": 7}, [7] * 5 + [None, 7]),
    ],
)
def test_p09_what_newer_files_of_gemma_say_wins(
    metadata: dict[str, object], windows: list[int | None], tmp_path: Path
) -> None:
    """P09: the pattern and the local layers' base."""
    extra = {**metadata, "rope.freq_base_swa": 500.0}
    config = tiny_config("gemma3", **GEMMA_IN_GGUF)
    if "attention.sliding_window" in metadata:
        config.sliding_window = extra.pop("attention.sliding_window")
    file = write_gguf(tmp_path / "m.gguf", config, extra_metadata=extra)
    spec = describe(resolve_source(ModelSettings(model=str(file))))
    assert windows_of(spec) == windows
    local = {"rope_type": "default", "rope_theta": 500.0}
    assert spec.ropes[1] == tiny_spec(rope_parameters=local, head_dim=16).ropes[0]
    assert {layer.attention.rope for layer in spec.layers if layer.attention.memory.window} == {1}


def test_the_largest_gemma_scales_its_scores_by_another_number(tmp_path: Path) -> None:
    """llama.cpp knows 27B by its 62 layers."""
    for layers, scalar in ((62, 48 // 6), (48, 16)):
        config = tiny_config("gemma3", layer_types=None, num_hidden_layers=layers)
        file = write_gguf(tmp_path / f"{layers}.gguf", config)
        spec = describe(resolve_source(ModelSettings(model=str(file))))
        assert {layer.attention.scale for layer in spec.layers} == {scalar**-0.5}


def windows_of(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.memory.window for layer in spec.layers]


def test_a_file_of_float32_alone_is_a_float32_checkpoint_and_others_are_bfloat16(
    tmp_path: Path,
) -> None:
    config = tiny_config("llama")
    halves = {"blk.0.attn_q.weight": np.zeros((64, 64), dtype=np.float16)}
    for extra, dtype in ((None, torch.float32), (halves, torch.bfloat16)):
        file = write_gguf(tmp_path / "m.gguf", config, extra_tensors=extra)
        assert resolve_source(ModelSettings(model=str(file))).config.dtype is dtype


@pytest.mark.slow
def test_the_default_model_equals_transformers_reading_of_it() -> None:
    source = resolve_source(ModelSettings(model=DEFAULT_MODEL))
    ours = load_model(source, dtype=torch.float32, device=CPU, load_format="auto", seed=0)
    with quick_gguf():
        theirs = AutoModelForCausalLM.from_pretrained(
            source.path.parent, gguf_file=source.path.name, dtype=torch.float32
        ).state_dict()
    slots = tensors_of(ours)
    assert set(theirs) - set(slots) == {"lm_head.weight"}
    for name, weight in slots.items():
        assert torch.equal(weight, theirs[name]), name
    assert ours.spec.tie_word_embeddings
    assert ours.spec.eos_token_ids == (2, 0)  # <|im_end|>, and <|endoftext|> by its text
    assert ours.spec.ropes == (rope_frequencies(source.config, 64),)


def test_tokens_that_end_a_turn_are_known_by_their_text(tmp_path: Path) -> None:
    """As to llama.cpp: files of Gemma name <eos> alone, and its turns end with another."""
    names = ["<eos>", "<start_of_turn>", "</s>", "<end_of_turn>", "end", "<|eot_id|>"]
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tokens=names)
    assert resolve_source(ModelSettings(model=str(file))).eos_token_ids == (2, 3, 5)


def test_a_sentencepiece_file_that_names_no_end_means_llamas(tmp_path: Path) -> None:
    file = write_file(tmp_path / "m.gguf", vocabulary(["a"], []), has_ids=False)
    assert eos_token_ids(GGUFFile(file)) == (EOS,)


def test_llama3_scaling_comes_from_the_files_own_factors(tmp_path: Path) -> None:
    scaled = tiny_spec(rope_parameters=LLAMA3).ropes[0]
    plain = tiny_spec().ropes[0]
    factors = np.array(plain.frequencies, np.float32) / np.array(scaled.frequencies, np.float32)
    file = write_gguf(
        tmp_path / "m.gguf", tiny_config(), extra_tensors={"rope_freqs.weight": factors}
    )
    rope = describe(resolve_source(ModelSettings(model=str(file)))).ropes[0]
    assert_close(
        "rotary", torch.tensor(rope.frequencies), torch.tensor(scaled.frequencies), torch.float32
    )


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0},
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
          "rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 8.0,
          "rope.scaling.yarn_beta_slow": 2.0},
         {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}),
    ],
)  # fmt: skip
def test_scaling_is_what_llama_cpp_takes_from_the_same_keys(
    metadata: dict[str, object], parameters: dict[str, Any], tmp_path: Path
) -> None:
    """A factor without a type is linear, by its older key, too."""
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), extra_metadata=metadata)
    spec = describe(resolve_source(ModelSettings(model=str(file))))
    assert spec.ropes == tiny_spec(rope_parameters={"rope_theta": 10000.0, **parameters}).ropes


UNREAD: list[tuple[str, str, object, object]] = [
    ("llama", "attention.scale", 0.5, 8**-0.5),
    ("llama", "logit_scale", 0.25, 1.0),
    ("llama", "residual_scale", 0.25, 1.0),
    ("llama", "embedding_scale", 12.0, 0.0),
    ("llama", "attention.temperature_scale", 0.125, 0.0),
    ("llama", "attention.clamp_kqv", 8.0, 0.0),
    ("llama", "attention.value_length", 16, 8),
    ("llama", "rope.scaling.attn_factor", 0.75, 1.0),
    ("llama", "rope.scaling.yarn_attn_factor", 0.75, 1.0),
    ("llama", "rope.scaling.yarn_log_multiplier", 0.125, 0.0),
    ("qwen2", "final_logit_softcapping", 30.0, 0.0),
    ("qwen3", "attention.causal", 2, True),
    ("qwen3-moe", "expert_weights_scale", 2.5, 1.0),
    ("qwen3-moe", "expert_gating_func", 2, 1),
    ("qwen3-moe", "expert_shared_count", 1, 0),
    ("gemma3", "final_logit_softcapping", 30.0, 0.0),
]


@pytest.mark.parametrize(("kind", "key", "value", "neutral"), UNREAD)
def test_metadata_that_would_be_left_out_of_account_is_refused_by_name(
    kind: str, key: str, value: object, neutral: object, tmp_path: Path
) -> None:
    """What a newer converter writes of a model that computes something more; as long as it says
    that it does not, it is taken."""
    config = tiny_config(kind, **(IN_GGUF if kind == "gemma3" else {}))
    file = write_gguf(tmp_path / "m.gguf", config, extra_metadata={key: value})
    with pytest.raises(ModelError, match=rf"{key} of .* is {value:g}.*safetensors"):
        resolve_source(ModelSettings(model=str(file)))
    file = write_gguf(tmp_path / "m.gguf", config, extra_metadata={key: neutral})
    describe(resolve_source(ModelSettings(model=str(file))))


def test_yarn_metadata_becomes_yarn_parameters(tmp_path: Path) -> None:
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), extra_metadata=metadata)
    spec = describe(resolve_source(ModelSettings(model=str(file))))
    assert spec.ropes == tiny_spec(rope_parameters=YARN).ropes


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_p09_a_window_in_the_metadata_is_found(kind: str, tmp_path: Path) -> None:
    """P09: llama.cpp's convention, counting the query itself."""
    metadata = {"attention.sliding_window": 32}
    file = write_gguf(tmp_path / "m.gguf", tiny_config(kind), extra_metadata=metadata)
    layers = describe(resolve_source(ModelSettings(model=str(file)))).layers
    assert {layer.attention.memory.window for layer in layers} == {32}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "'longrope'"),
        ({"rope.scaling.type": "yarn"}, "original_context_length"),
        ({"rope.dimension_count": 4}, "rotates 4 of 8 dimensions"),
    ],
)
def test_what_this_version_can_not_compute_is_refused(
    metadata: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), extra_metadata=metadata)
    with pytest.raises(ModelError, match=message):
        describe(resolve_source(ModelSettings(model=str(file))))


def test_experts_of_an_architecture_that_has_none_here_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config("qwen2"), extra_metadata={"expert_count": 8})
    with pytest.raises(ModelError, match=r"experts of architecture 'qwen2'.*llama, qwen3moe"):
        resolve_source(ModelSettings(model=str(file)))


def test_a_mixture_of_experts_has_llama_cpps_routing(tmp_path: Path) -> None:
    config = tiny_config("qwen3-moe", norm_topk_prob=False)
    file = write_gguf(tmp_path / "m.gguf", config)
    layers = describe(resolve_source(ModelSettings(model=str(file)))).layers
    assert layers == tiny_spec("qwen3-moe", norm_topk_prob=True).layers
    file = write_gguf(tmp_path / "m.gguf", config, extra_metadata={"expert_weights_norm": False})
    layers = describe(resolve_source(ModelSettings(model=str(file)))).layers
    assert layers == tiny_spec("qwen3-moe", norm_topk_prob=False).layers


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    config.model_type = "mamba"
    file = write_gguf(tmp_path / "m.gguf", config)
    with pytest.raises(ModelError, match=r"'mamba'.*llama, .*qwen2, qwen3"):
        resolve_source(ModelSettings(model=str(file)))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), extra_tensors=extra)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        load_tiny(file)


@pytest.mark.parametrize("kept", [0, 3, 20, 300])
def test_a_file_cut_in_its_header_is_refused(kept: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config())
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="is not a readable GGUF file"):
        resolve_source(ModelSettings(model=str(file)))


def test_a_file_cut_in_its_data_names_the_tensor(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config())
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"'token_embd\.weight'.*incomplete"):
        load_tiny(file)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK" * 100)
    with pytest.raises(ModelError, match="begins with b'PKPK' instead of b'GGUF'"):
        resolve_source(ModelSettings(model=str(file)))


@pytest.mark.skipif(not can_multiply_blocks(CPU, torch.float32), reason="no such operator here")
def test_q03_products_of_4_bit_weights_are_multiplied_as_blocks(tmp_path: Path) -> None:
    """Q03: what lies on 16 places in each group, and nothing else; the numbers stay the file's."""
    theirs = save_tiny(tmp_path / "folder", "llama", hidden_size=96, intermediate_size=64)
    state, draws = dict(theirs.state_dict()), torch.Generator().manual_seed(1)
    for name, weight in state.items():
        if "mlp" in name:
            codes = torch.randint(0, 16, weight.shape, generator=draws).float()
            state[name] = 0.01 * codes - 0.05
    file = write_gguf(tmp_path / "model.gguf", theirs.config, state)
    model = load_model(
        resolve_source(ModelSettings(model=str(file))), dtype=torch.float32, device=CPU,
        load_format="auto", seed=0, quantization="w4a8",
    )  # fmt: skip
    layer = model.layers[0]
    assert isinstance(layer.feed_forward, GatedMLP)
    for product in layer.feed_forward.products():
        assert isinstance(product.weight.operand, BlockMatrix)
    for product in layer.mixers[0].products():
        assert not isinstance(product.weight.operand, BlockMatrix)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(model.weights()[name].values, state[name])


def test_q03_w4a8_of_other_files_and_machines_is_refused_by_name(tmp_path: Path) -> None:
    """Q03: the flag names what it needs."""
    save_tiny(tmp_path, "llama")
    source = resolve_source(ModelSettings(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="GGUF"):
        keeps_blocks("w4a8", source, torch.float32, CPU)
    file = write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path / "again", "llama").config)
    with pytest.raises(ConfigError, match="leave the flag out"):
        keeps_blocks("w4a8", resolve_source(ModelSettings(model=str(file))), torch.bfloat16, CPU)
    assert not keeps_blocks("auto", source, torch.float32, CPU)


def test_q03_on_x86_w4a8_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q03: what is Arm's is asked for on Arm alone."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    source = resolve_source(
        ModelSettings(model=str(write_gguf(tmp_path / "m.gguf", tiny_config("llama"))))
    )
    with pytest.raises(ConfigError, match=r"on Arm CPUs with KleidiAI.*leave the flag out"):
        keeps_blocks("w4a8", source, torch.float32, CPU)
