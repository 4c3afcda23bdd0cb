"""Resolves a model's name to files and a config.

Takes `ModelSettings`; gives a frozen `ModelSource`, after any download. Loads no weights.
"""

from __future__ import annotations

import enum
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyroots.config import ModelSettings
from manyroots.errors import ModelError
from manyroots.files.gguf_parts import model_files, model_name
from manyroots.models import gguf_config
from manyroots.models.configs import Config, complete
from manyroots.models.fields import TOKENS, check_fields
from manyroots.models.hub import download_folder
from manyroots.models.packaged import PACKAGED, packaged_model_path
from manyroots.models.registry import CONFIG_TYPES, WRITTEN_FIELDS
from manyroots.models.weights.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 << 20
_OF_ADAPTERS = "adapter_config.json"
_OF_MODELOPT = "hf_quant_config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class SourceKind(enum.Enum):
    """The kind of `ModelSource.path`."""

    FOLDER = "folder"
    """A Hugging Face folder with a config.json."""
    GGUF = "gguf"
    """One .gguf file, or the first of several."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine's disk."""

    kind: SourceKind
    path: Path
    config: Config
    name: str
    """Its name if the user gave no other."""
    eos_token_ids: tuple[int, ...]
    rope_factors: tuple[float, ...] | None
    """A GGUF file's own divisors of the rotary frequencies."""


def resolve_source(settings: ModelSettings) -> ModelSource:
    """Find, or fetch, the model of `settings.model`."""
    name = settings.model
    path = Path(name).expanduser()
    if path.exists():
        own_name = model_name(path) if path.is_file() else path.resolve().name
        return _stretched(_local(path, own_name, settings), settings.yarn_factor)
    if name in PACKAGED:
        source = _local(packaged_model_path(name), name, settings)
        return _stretched(source, settings.yarn_factor)
    if not HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ModelError(
            f"--model is {name!r}; there is no such file or folder, and it is not a hub id "
            "(owner/name). Check the path."
        )
    with_weights = settings.load_format != "dummy"
    folder = download_folder(name, settings.revision, with_weights=with_weights)
    return _stretched(_local(folder, name, settings), settings.yarn_factor)


def _stretched(source: ModelSource, factor: float | None) -> ModelSource:
    """With YaRN in its config, as model makers write it there."""
    if factor is None:
        return source
    text = source.config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if not isinstance(rope, dict) or kind != "default" or source.rope_factors is not None:
        raise ModelError(
            f"--yarn-factor is {factor}, and {source.name} can't be stretched: its config has "
            f"rope_parameters of {kind or 'several kinds'}. Leave it out, or edit the config."
        )
    length = text.max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    setattr(text, "rope_parameters", rope | yarn)  # noqa: B010  configs have no declared fields
    return source


def _local(path: Path, name: str, settings: ModelSettings) -> ModelSource:
    file = _gguf_file(path, settings.load_format)
    if file is not None:
        return _from_gguf(file, name)
    if not (path / "config.json").is_file():
        if (path / _OF_ADAPTERS).is_file():
            raise ModelError(
                f"{path} holds an adapter and no model; pass the model that it was trained for "
                f"with --model, and this folder with --lora-modules NAME={path}."
            )
        raise ModelError(
            f"{path} has neither a config.json nor exactly one .gguf file; point --model at a "
            "model's folder or at the .gguf file itself."
        )
    return _from_folder(path, name)


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The .gguf file at `path` or in it; None for a Hugging Face folder."""
    if path.is_file():
        if path.suffix != ".gguf" or load_format == "safetensors":
            raise ModelError(
                f"--model is the file {path}; only .gguf files are loaded by themselves, with "
                "--load-format auto or gguf. For safetensors pass the folder with config.json."
            )
        return path
    files = model_files(path)
    wanted = load_format == "gguf" or not (path / "config.json").is_file()
    if wanted and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} has several .gguf files ({names}); pass the one you mean.")
    if load_format == "gguf" and not files:
        raise ModelError(f"--load-format is gguf, but {path} has no .gguf file.")
    return files[0] if wanted and files else None


def _from_gguf(path: Path, name: str) -> ModelSource:
    file = GGUFFile(path)
    return ModelSource(
        kind=SourceKind.GGUF,
        path=path,
        config=gguf_config.config_of(file),
        name=name,
        eos_token_ids=gguf_config.eos_token_ids(file),
        rope_factors=gguf_config.rope_factors(file),
    )


def _from_folder(path: Path, name: str) -> ModelSource:
    file, generation_file = path / "config.json", path / "generation_config.json"
    generation = _read_json(generation_file)
    if (path / _OF_ADAPTERS).is_file():
        logger.warning(
            "%s holds an adapter beside the model (%s), which is not applied; pass it with "
            "--lora-modules, or remove it.", path, _OF_ADAPTERS,
        )  # fmt: skip
    check_fields(generation, str(generation_file), {"eos_token_id": TOKENS})
    written = _read_json(file)
    check_fields(written, str(file), WRITTEN_FIELDS)
    if not written.get("quantization_config") and (path / _OF_MODELOPT).is_file():
        written["quantization_config"] = _modelopt(path / _OF_MODELOPT)
    if isinstance(written.get("text_config"), dict):
        check_fields(written["text_config"], f"the text_config of {file}", WRITTEN_FIELDS)
    if not isinstance(written.get("model_type"), str):
        raise ModelError(f"{file} can't be used: it has no model_type. Check the file.")
    try:
        config = complete(written["model_type"], written)
    except Exception as error:  # values of wrong types raise various errors
        raise ModelError(f"{file} can't be used: {_in_words(error)} Check the file.") from error
    text = config.get_text_config()
    is_known = config.model_type in CONFIG_TYPES  # others are refused by name, with what is served
    if text is config and is_known and written.get("text_config") is not None:
        raise ModelError(
            f"{file} has a text_config, which models of type {config.model_type!r} don't have; "
            "remove it, or correct model_type."
        )
    eos = [*_ids(generation.get("eos_token_id")), *_ids(getattr(text, "eos_token_id", None))]
    return ModelSource(
        kind=SourceKind.FOLDER,
        path=path,
        config=config,
        name=name,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        rope_factors=None,
    )


def _modelopt(file: Path) -> dict[str, Any]:
    """Older exports of ModelOpt have the quantization in a file of its own."""
    said = _read_json(file).get("quantization")
    if not isinstance(said, dict):
        raise ModelError(f"{file} can't be used: it has no quantization. Check the file.")
    return {**said, "quant_method": "modelopt"}


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}."


def _ids(value: Any) -> list[int]:
    """Configs write one id, a list of ids, or nothing."""
    if value is None:
        return []
    return [*value] if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES} bytes")
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} can't be used: it is not readable JSON ({error}); repair or replace it."
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} can't be used: it does not hold a JSON object; repair it.")
    return content
