"""Folders of adapters: what may be opened at all.

Takes what a user wrote; gives a resolved folder, or an `AdapterError`. Reads no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from manyroots.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


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
        # Whoever may not look around learns the same of a folder that exists.
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
    # `os.path.exists` says no where a folder can't be entered; `Path.exists` would raise.
    if name == WEIGHTS_FILE:
        if os.path.exists(folder / "adapter_model.bin"):
            return (
                f"{folder} has its weights as adapter_model.bin alone, a format that can run code; "
                f"save them as {WEIGHTS_FILE} (PEFT: save_pretrained with safe_serialization)."
            )
        if os.path.exists(folder / f"{WEIGHTS_FILE}.index.json"):
            return f"{folder} has its weights in several files; save them as one {WEIGHTS_FILE}."
    return f"{folder} has no {name}; give the folder that PEFT's save_pretrained wrote."
