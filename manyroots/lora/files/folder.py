"""Folders of adapters: what may be opened at all.

Takes what a user wrote; gives a resolved folder, or an `AdapterError`. Reads no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from manyroots.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MLX_WEIGHTS_FILE = "adapters.safetensors"
CONVERT_MLX = (
    "convert it to PEFT's form: lora_a and lora_b turned around, and scale as lora_alpha / r."
)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf")
_MAX_ENTRIES = 1000
_MAX_NAMED = 6


def check_folder(path: str | Path, allowed_dirs: Sequence[Path] | None) -> Path:
    """The resolved folder with an adapter's two files; None allows every folder."""
    text = str(path)
    if not text or "\0" in text:
        raise AdapterError(
            f"the adapter path {text!r} is empty or has a NUL character; give a folder.",
            field="lora_path",
        )
    try:
        folder = Path(text).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        # A caller that may not look around learns the same of a folder that exists.
        _refuse_outside(Path(text), _resolved(text), allowed_dirs)
        raise AdapterError(
            f"the adapter folder {text!r} does not exist or can't be entered; check the path.",
            field="lora_path",
        ) from error
    _refuse_outside(Path(text), folder, allowed_dirs)
    if not folder.is_dir():
        raise AdapterError(
            f"{text!r} is not a folder; give the folder that holds {CONFIG_FILE}.",
            field="lora_path",
        )
    return folder


def find_file(folder: Path, name: str, allowed_dirs: Sequence[Path] | None) -> Path:
    """A file of the folder, links followed (hub caches are made of them) but not outside."""
    try:
        file = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise AdapterError(_why_missing(folder, name)) from error
    _refuse_outside(folder / name, file, allowed_dirs)
    return file


def _resolved(text: str) -> Path:
    try:
        return Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return Path("/")


def _refuse_outside(path: Path, resolved: Path, allowed_dirs: Sequence[Path] | None) -> None:
    if allowed_dirs is None:
        return
    if not any(resolved.is_relative_to(allowed.resolve()) for allowed in allowed_dirs):
        raise AdapterError(
            f"{str(path)!r} is not in a folder that adapters may come from; move it into one of "
            "those that --lora-dirs names, without links that lead out.",
            field="lora_path",
        )


def _why_missing(folder: Path, name: str) -> str:
    wanted = f"{folder} has no {name}"
    there, inside = _contents(folder)
    if name == CONFIG_FILE and inside:
        return f"{wanted}, and {_listed(inside)} in it may: give the folder of one adapter."
    if name == WEIGHTS_FILE:
        if "adapter_model.bin" in there:
            return (
                f"{folder} has its weights as adapter_model.bin alone, a format that can run code; "
                f"save them as {WEIGHTS_FILE} (PEFT: save_pretrained with safe_serialization)."
            )
        if f"{WEIGHTS_FILE}.index.json" in there:
            return f"{folder} has its weights in several files; save them as one {WEIGHTS_FILE}."
        if MLX_WEIGHTS_FILE in there:
            return f"{wanted} but {MLX_WEIGHTS_FILE}, as MLX writes it; {CONVERT_MLX}"
        others = [file for file in there if file.endswith(_WEIGHTS)]
        if others:
            return (
                f"{wanted} but {_listed(others)}; save the adapter with PEFT's save_pretrained, or "
                "convert it to that form."
            )
    return f"{wanted}; give the folder that PEFT's save_pretrained wrote."


def _contents(folder: Path) -> tuple[list[str], list[str]]:
    """Names of files, and of folders that have a config, in order; those that can be seen."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                # `os.path.exists` says no where a folder can't be entered; `Path` would raise.
                if os.path.exists(os.path.join(entry.path, CONFIG_FILE)):
                    folders.append(entry.name)
                elif entry.name.isprintable():
                    files.append(entry.name)
    except OSError:
        return [], []
    return sorted(files), sorted(name for name in folders if name.isprintable())


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(name[:100] for name in names[:_MAX_NAMED]) + rest
