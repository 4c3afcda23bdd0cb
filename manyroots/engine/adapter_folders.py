"""Checks at start where adapters' files may be; refuses what could never be loaded.

Checks folders and the syntax of addresses. It does not open files or use the network: the loader
does.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.errors import AdapterError, ConfigError
from manyroots.lora.files.folder import CONFIG_FILE
from manyroots.store.sources.address import is_address, looks_like_hub_id, parse_address


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
    for source in settings.lora_source:
        if is_address(source):
            _check_address("--lora-source", source)
        elif not Path(source).expanduser().is_dir():
            raise ConfigError(
                f"--lora-source has {source!r}, which is neither a folder nor an address such as "
                "s3://bucket/path."
            )


def _check_module(module: LoraModule) -> None:
    if is_address(module.path):
        _check_address(f"--lora-modules {module.name}", module.path)
        return
    folder = Path(module.path).expanduser()
    if not folder.exists() and looks_like_hub_id(module.path):
        return
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


def _check_address(flag: str, text: str) -> None:
    try:
        parse_address(text)
    except AdapterError as error:
        raise ConfigError(f"{flag}: {error}") from error
