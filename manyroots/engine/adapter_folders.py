"""Where adapters' files may be: noted at start, or below the folders that --lora-dirs allows.

Looks at folders, never into the files: reading and checking those is for whoever loads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.errors import AdapterError, ConfigError
from manyroots.lora.files.folder import CONFIG_FILE, check_folder


def check_folders(settings: LoraSettings, base_names: Collection[str]) -> None:
    """Refuse at start what could never be loaded. Costs a few system calls per adapter."""
    for module in settings.lora_modules:
        if module.name in base_names:
            raise ConfigError(
                f"--lora-modules names an adapter {module.name!r}, which is what the base model is "
                "called; give it another name, or the model one with --served-model-name."
            )
        _check_module(module)
    for folder in settings.lora_dirs:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(f"--lora-dirs has {folder!r}, which is not a folder; make it first.")


def _check_module(module: LoraModule) -> None:
    folder = Path(module.path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"--lora-modules {module.name}={module.path}: there is no such folder; give the one "
            f"that holds {CONFIG_FILE}."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--lora-modules {module.name}={module.path}: the folder has no {CONFIG_FILE}; give "
            "the folder that PEFT's save_pretrained wrote."
        )


def find_folder(path: str, lora_dirs: Sequence[str]) -> Path:
    """The folder that a caller's path means; refused unless it is below --lora-dirs.

    A relative path is looked up in each of them. Without any, every folder is allowed: then the
    caller is whoever runs this process, since the server's endpoints can't be without.
    """
    if not lora_dirs:
        return check_folder(path, None)
    allowed = [Path(folder) for folder in lora_dirs]
    refusal: AdapterError | None = None
    for candidate in [path] if path[:1] in ("", "/", "~") else [f"{d}/{path}" for d in allowed]:
        try:
            return check_folder(candidate, allowed)
        except AdapterError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal
