"""How a model's makers would sample from it: the `generation_config.json` beside its weights, or
what a GGUF file's metadata has of it.

Takes a model's path and what --generation-config says; gives values for what a request leaves
open. What a request says always counts. As in vLLM, `do_sample` is not read: a request that wants
the likeliest tokens asks for temperature 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyroots.errors import ConfigError, ModelError, RequestError
from manyroots.files.gguf_header import read_metadata
from manyroots.sampling import SamplingParams

FILE = "generation_config.json"
AUTO = "auto"
OFF = ("none", "vllm")
"""The second is what vLLM calls it: the engine's own defaults."""
logger = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "diversity_penalty": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "penalty_last_n": (-1,),
    "sequence": (),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
    "xtc_probability": (0,),
}
"""What transformers or llama.cpp would do that is not done here, and the values with which it does
nothing, beside null and nothing."""
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF = "general.sampling."
_GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Where llama.cpp's names are not transformers', whose files its converter takes values from."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What counts where a request says nothing."""

    values: Mapping[str, float | int] = field(default_factory=dict)
    """By name of `SamplingParams`."""
    max_tokens: int | None = None
    """Most tokens of a chat's answer whose request sets no limit; `max_new_tokens` in the file. A
    completion's limit is 16 where it sets none."""

    def params(self, **given: Any) -> SamplingParams:
        """Parameters with everything that is not given from here."""
        return SamplingParams(**{**self.values, **given})


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(
    model_path: str, setting: str, override: str | None = None
) -> SamplingDefaults:
    """Read what `setting` names: the model's own file, none, or a folder's or a file. `override`:
    JSON, whose values go before those of the file."""
    read = _of_setting(model_path, setting)
    if override is None:
        return read
    try:
        content = json.loads(override)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--override-generation-config is not JSON: {error}.") from error
    known = (*_NAMES, "max_new_tokens")
    if not isinstance(content, dict) or not content.keys() <= set(known):
        raise ConfigError(
            f"--override-generation-config is {override[:200]}; it must be a JSON object of "
            f"{', '.join(known)}."
        )
    try:
        mine = _checked(content)
    except RequestError as error:
        raise ConfigError(f"--override-generation-config: {error}") from error
    max_tokens = read.max_tokens if mine.max_tokens is None else mine.max_tokens
    return SamplingDefaults({**read.values, **mine.values}, max_tokens)


def _of_setting(model_path: str, setting: str) -> SamplingDefaults:
    if setting in OFF:
        return NO_DEFAULTS
    path = Path(model_path if setting == AUTO else setting).expanduser()
    file = path / FILE if path.is_dir() else path
    if setting == AUTO and not file.is_file():
        return NO_DEFAULTS  # a folder without
    content = _read_gguf(file) if file.suffix == ".gguf" else _read(file)
    _say_what_is_left_out(file, content)
    return _defaults(file, content)


def _say_what_is_left_out(file: Path, content: Mapping[str, Any]) -> None:
    names = [
        name
        for name, neutral in _NEUTRAL.items()
        if content.get(name) not in (None, [], {}, "") and content[name] not in neutral
    ]
    if names:
        logger.warning(
            "%s sets %s, which this server does not apply; a request may ask for what it has a "
            "parameter for.", file, ", ".join(names),
        )  # fmt: skip


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} is not readable JSON ({error}); repair it, or pass --generation-config none."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object; repair or remove it.")
    return content


def _read_gguf(file: Path) -> dict[str, Any]:
    found = {
        key.removeprefix(_GGUF): value
        for key, value in read_metadata(file).items()
        if key.startswith(_GGUF)
    }
    return {_GGUF_NAMES.get(name, name): _as_written(value) for name, value in found.items()}


def _as_written(value: Any) -> Any:
    """Of a number in single precision what it was rounded from: 0.95, not 0.949999988."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _defaults(file: Path, content: Mapping[str, Any]) -> SamplingDefaults:
    try:
        return _checked(content)
    except RequestError as error:
        raise ModelError(f"{file}: {error} Repair it, or pass --generation-config none.") from error


def _checked(content: Mapping[str, Any]) -> SamplingDefaults:
    values = {name: content[name] for name in _NAMES if content.get(name) is not None}
    max_tokens = content.get("max_new_tokens")
    SamplingParams(**values, max_tokens=max_tokens)
    return SamplingDefaults(values, max_tokens)
