"""Tensors of a Hugging Face folder, one file or many shards, in the safetensors format only.

Takes a folder; gives (checkpoint name, tensor on the CPU) pairs. Never opens a pickle: a folder
with only pickles is refused with a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.files.git_lfs import remedy_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_NAMED = 3
_MODEL = "model."
_WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.", "embedding_norm.", "final_layernorm.")
"""Prefixes of names in decoders that were saved without their head, like embedders; transformers
adds the prefix, too."""


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint in `folder`."""
    for file in weight_files(folder):
        yield from _of_file(file, None)


def ending_with(folder: Path, endings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors whose names end with one of these."""
    for file in weight_files(folder):
        yield from _of_file(file, endings)


def _of_file(file: Path, endings: tuple[str, ...] | None) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors, or those with these endings."""
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if endings is None or name.endswith(endings):
                    prefix = _MODEL if name.startswith(_WITHOUT_HEAD) else ""
                    yield prefix + name, shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        remedy = remedy_of(file, "it is damaged or incomplete. Download or copy it again")
        raise ModelError(f"{file} can't be read ({error}); {remedy}.") from error


def weight_files(folder: Path) -> list[Path]:
    """The existing files that make up the checkpoint. If there are both, the single file wins, as
    in transformers: an index beside it is left over."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        files = [folder / name for name in _shards(index)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(
                f"{index} names {', '.join(missing)}, which {folder} does not have; download or "
                "copy the missing files."
            )
        return files
    raise ModelError(_nothing_to_load(folder))


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{index} is not a safetensors index ({error!r}); download or copy it again."
        ) from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its folder: {outside}; don't use it.")
    return sorted(names)


def _nothing_to_load(folder: Path) -> str:
    shards = _named(folder, "*.safetensors")
    if shards:
        return (
            f"{folder} has {shards}, and neither {SINGLE_FILE} nor {INDEX_FILE}, which says what "
            "belongs together. Download or copy the index, too; a whole model in one file is "
            f"called {SINGLE_FILE}."
        )
    pickles = _named(folder, "*.bin", "*.pth", "*.pt")
    if pickles:
        return (
            f"{folder} has its weights only as pickles ({pickles}), which can run "
            "code when opened and are never loaded. Convert it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    if gguf := _named(folder, "*.gguf"):
        return (
            f"{folder} has no safetensors, but {gguf}, which is not read beside a config.json; "
            "pass the file itself, or --load-format gguf."
        )
    return (
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; point --model at a folder with "
        "weights, or use --load-format dummy."
    )


def _named(folder: Path, *patterns: str) -> str:
    """The first file that matches a pattern; empty if there is none."""
    names = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    return ", ".join(names[:_MAX_NAMED]) + (" and others" if len(names) > _MAX_NAMED else "")
