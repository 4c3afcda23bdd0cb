"""Models that are written as several GGUF files: which of them belong together, and in what order.

Takes paths and the first file's metadata; gives paths. llama.cpp's rules: parts are named
NAME-00001-of-00003.gguf and so on, the first has the metadata of all, and each says which it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyroots.errors import ModelError

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_JOIN = "join them with llama-gguf-split --merge and pass the joined file"


def model_files(folder: Path) -> list[Path]:
    """What may be passed of a folder's .gguf files: of a model in parts the first alone. All of
    them if that is not there, so that an error names them."""
    files = sorted(folder.glob("*.gguf"))
    return [file for file in files if _is_first(file)] or files


def model_name(path: Path) -> str:
    """What a model in this file is called: by the name that it was given, also where that is a
    link, as in the hub's cache."""
    part = _PART.fullmatch(path.stem)
    return part["model"] if part else path.stem


def parts_of(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """All files of the model that begins with `path`, that one first."""
    number, count = _place(path, metadata)
    if count == 1:
        return [path]
    named = _PART.fullmatch(path.stem)
    if named is None or (int(named["number"]), int(named["count"])) != (number + 1, count):
        raise ModelError(
            f"{path} is part {number + 1} of {count}, and is not named so: parts are found by "
            f"names that end with {_ending(number + 1, count)}. Rename them, or {_JOIN}."
        )
    parts = [path.with_name(named["model"] + _ending(each, count)) for each in range(1, count + 1)]
    if number:
        raise ModelError(
            f"{path} is part {number + 1} of {count}; pass the first, {parts[0].name}."
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path} is the first of {count} parts, of which {', '.join(missing[:8])} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it; put all of them into one "
            "folder."
        )
    return parts


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Refuse a file that is another part than its name says; `number` counts from zero."""
    if _place(path, metadata) != (number, count):
        raise ModelError(
            f"{path} does not hold part {number + 1} of {count}, as its name says; download or "
            "copy it again."
        )


def check_tensors(path: Path, metadata: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse parts that have not all the tensors of which the first of them, `path`, knows."""
    expected = metadata.get(_TENSORS, num_tensors)
    if expected != num_tensors:
        raise ModelError(
            f"the parts that begin with {path} hold {num_tensors} different tensors of {expected}; "
            "they are not of one model. Download or copy them again."
        )


def _place(path: Path, metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Which part this is, from zero, and of how many; files that are whole say nothing, or one."""
    number, count = metadata.get(_NUMBER, 0), metadata.get(_COUNT, 1) or 1
    if type(number) is not int or type(count) is not int or not 0 <= number < count <= 99_999:
        raise ModelError(
            f"{path} says that it is part {number!r} of {count!r}; download or copy it again."
        )
    return number, count


def _is_first(file: Path) -> bool:
    """Or whole; by name."""
    part = _PART.fullmatch(file.stem)
    return part is None or int(part["number"]) == 1


def _ending(number: int, count: int) -> str:
    return f"-{number:05}-of-{count:05}.gguf"
