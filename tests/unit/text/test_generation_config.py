"""Sampling defaults from a model's generation_config.json, or a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from manyroots.errors import ConfigError, ModelError
from manyroots.sampling import SamplingParams
from manyroots.text.generation_config import FILE, NO_DEFAULTS, SamplingDefaults, sampling_defaults


def write(folder: Path, content: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_the_values_that_sampling_knows_are_taken(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_new_tokens": 99,
            "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": [7], "num_beams": 4,
        },
    )  # fmt: skip
    defaults = sampling_defaults(path, "auto")
    assert defaults.max_tokens == 99
    assert defaults.params(top_k=5) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=5, repetition_penalty=1.05
    )


@pytest.mark.parametrize("setting", ["none", "vllm"])
def test_it_can_be_switched_off(tmp_path: Path, setting: str) -> None:
    assert sampling_defaults(write(tmp_path, {"top_k": 1}), setting) is NO_DEFAULTS


def test_another_folder_or_file_can_be_named(tmp_path: Path) -> None:
    own = write(tmp_path / "own", {"top_k": 1})
    other = write(tmp_path / "other", {"top_k": 2})
    assert sampling_defaults(own, other) == SamplingDefaults({"top_k": 2})
    assert sampling_defaults(own, f"{other}/{FILE}") == SamplingDefaults({"top_k": 2})


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path), "auto") is NO_DEFAULTS
    assert sampling_defaults(write_gguf(tmp_path), "auto") == NO_DEFAULTS


def write_gguf(folder: Path, **values: float | int | str) -> str:
    """A GGUF file with these sampling keys and no tensor, by the methods of llama.cpp's package."""
    writer = GGUFWriter(folder / "model.gguf", "llama")
    for name, value in values.items():
        getattr(writer, f"add_sampling_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(folder / "model.gguf")


def test_a_gguf_file_has_them_in_its_metadata(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, temp=0.7, top_p=0.95, top_k=20, min_p=0.01, penalty_repeat=1.05)
    own = {
        "temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert sampling_defaults(path, "auto") == SamplingDefaults(own)
    assert sampling_defaults(path, "none") is NO_DEFAULTS
    assert sampling_defaults(path, "auto", '{"top_k": 7}') == SamplingDefaults({**own, "top_k": 7})
    # Named by itself, for another model.
    assert sampling_defaults(str(tmp_path), path) == SamplingDefaults(own)


def test_what_of_a_gguf_file_cannot_be_applied_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling_defaults(write_gguf(tmp_path, mirostat=0, xtc_probability=0.0), "auto")
    assert caplog.text == ""
    sampling_defaults(write_gguf(tmp_path, mirostat=2, mirostat_tau=5.0, sequence="kp"), "auto")
    assert "sets mirostat, sequence, which this server does not apply" in caplog.text
    with pytest.raises(ModelError, match=r"model\.gguf: .*top_p.*--generation-config none"):
        sampling_defaults(write_gguf(tmp_path, top_p=3.0), "auto")


@pytest.mark.parametrize("content", ["{", "[]", {"top_p": 3}, {"temperature": "hot"}])
def test_a_broken_file_is_named_with_the_way_out(tmp_path: Path, content: Any) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ModelError, match=r"generation_config\.json.*(--generation-config|repair)"):
        sampling_defaults(path, "auto")


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        sampling_defaults(str(tmp_path), str(tmp_path / "nowhere"))


def test_g10_an_override_goes_before_the_models_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"top_k": 1, "top_p": 0.5, "max_new_tokens": 9})
    defaults = sampling_defaults(path, "auto", '{"top_k": 7, "temperature": 0.1}')
    assert defaults == SamplingDefaults({"top_k": 7, "top_p": 0.5, "temperature": 0.1}, 9)
    assert sampling_defaults(path, "none", '{"max_new_tokens": 3}') == SamplingDefaults({}, 3)
    for bad in ("{", "[]", '{"temp": 1}', '{"top_p": 7}'):
        with pytest.raises(ConfigError, match="--override-generation-config"):
            sampling_defaults(path, "auto", bad)


def test_what_is_not_applied_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = {"num_beams": 1, "typical_p": 1.0, "suppress_tokens": None, "no_repeat_ngram_size": 0}
    sampling_defaults(write(tmp_path, usual), "auto")
    assert caplog.text == ""
    sampling_defaults(write(tmp_path, {**usual, "suppress_tokens": [3], "num_beams": 4}), "auto")
    assert "sets num_beams, suppress_tokens, which this server does not apply" in caplog.text
