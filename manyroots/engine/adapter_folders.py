"""Where adapters' files may be: noted at start, or below the folders that --lora-dirs allows.

Looks at folders, never into the files: reading and checking those is for whoever loads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.errors import ConfigError, RequestError

CONFIG_FILE = "adapter_config.json"


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
        if not Path(folder).is_dir():
            raise ConfigError(f"--lora-dirs has {folder!r}, which is not a folder; make it first.")


def _check_module(module: LoraModule) -> None:
    folder = Path(module.path)
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


def allowed_folder(path: str, lora_dirs: Sequence[str]) -> Path:
    """The folder that `path` means, links followed; refused unless it is below --lora-dirs.

    A relative path is looked up in each of them. Without any, every folder is allowed: then the
    caller is whoever runs this process, since the server's endpoints can't be without.
    """
    roots = [Path(folder).resolve() for folder in lora_dirs]
    # What lies outside must read the same whether it exists or not.
    refusal = RequestError(
        f"lora_path is {path[:200]!r}, which is not a folder below those that --lora-dirs allows.",
        field="lora_path",
    )
    if not path or "\0" in path:
        raise refusal
    given = Path(path)
    for candidate in [given] if given.is_absolute() or not roots else [r / given for r in roots]:
        try:
            folder = candidate.resolve(strict=True)
            is_folder = folder.is_dir()
        except (OSError, RuntimeError):  # not there, not ours to read, or a loop of links
            continue
        if is_folder and (not roots or any(folder.is_relative_to(root) for root in roots)):
            return folder
    if not roots:
        raise RequestError(
            f"lora_path is {path[:200]!r}, and there is no such folder.", field="lora_path"
        )
    raise refusal
