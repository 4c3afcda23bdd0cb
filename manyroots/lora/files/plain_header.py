"""A header in the form in which the safetensors library writes it, read without a JSON parser.

Takes the bytes of a header; gives its tensors, or None where it has any other form, or one that
must be refused: then `header.py` reads it as JSON and says what is wrong. What is given here is
exactly what it would give. A mixture of experts has tens of thousands of tensors, and this takes a
third of the time.

The form: no white space, names of plain characters, and per tensor dtype, shape and offsets in
this order, in the order of the data and without holes.
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from itertools import accumulate, pairwise

from manyroots.errors import AdapterError
from manyroots.lora.files.strict_json import parse_object
from manyroots.lora.files.tensors import BYTES_PER_ELEMENT, MAX_NAME_CHARS, TensorEntry

_METADATA = re.compile(r'\{"__metadata__":(\{[^{}]*\}),')
_PLAIN = bytes(code for code in range(0x20, 0x7F) if chr(code) != "\\")
"""Without escapes a quote ends a name, and nothing else does."""
_SHAPE = re.compile(r":\[[1-9][0-9]{0,9}(?:,[1-9][0-9]{0,9}){0,3}\],")
_BETWEEN = {2: ":{", 3: "dtype", 4: ":", 6: ",", 7: "shape", 9: "data_offsets"}
_STEP = 10
"""Of the pieces between quotes, each tensor has ten: its name is the first of them, its dtype the
fifth, its shape the eighth, its offsets the last; what the others must be is above."""


def parse_plain(raw: bytes) -> list[TensorEntry] | None:
    if raw.translate(None, _PLAIN):
        return None
    text = raw.decode("ascii").rstrip(" ")
    metadata = _METADATA.match(text)
    if metadata is not None:
        if not _is_object(metadata.group(1)):
            return None
        text = "{" + text[metadata.end() :]
    pieces = text.split('"')
    num_tensors, rest = divmod(len(pieces), _STEP)
    if num_tensors == 0 or rest != 1 or pieces[0] != "{":
        return None
    for place, wanted in _BETWEEN.items():
        if pieces[place::_STEP].count(wanted) != num_tensors:
            return None
    names, dtypes = pieces[1::_STEP], pieces[5::_STEP]
    if not _are_names(names) or not set(dtypes) <= BYTES_PER_ELEMENT.keys():
        return None
    return _entries(names, dtypes, pieces[8::_STEP], pieces[10::_STEP])


def _is_object(text: str) -> bool:
    try:
        parse_object(text.encode(), "the metadata")
    except AdapterError:
        return False
    return True


def _are_names(names: list[str]) -> bool:
    """Whether JSON would give as many tensors, all of them with names that may be printed."""
    distinct = set(names)
    return (
        len(distinct) == len(names)
        and "__metadata__" not in distinct
        and max(map(len, names)) <= MAX_NAME_CHARS
    )


def _entries(
    names: list[str], dtypes: list[str], shape_texts: list[str], offset_texts: list[str]
) -> list[TensorEntry] | None:
    """Where the data lies follows from the shapes; the header must say the same."""
    shapes = {text: _shape(text) for text in set(shape_texts)}
    if None in shapes.values():
        return None
    num_bytes = {
        (dtype, text): math.prod(shape or ()) * BYTES_PER_ELEMENT[dtype]
        for text, shape in shapes.items()
        for dtype in set(dtypes)
    }
    kinds = zip(dtypes, shape_texts, strict=True)
    bounds = list(accumulate(map(num_bytes.__getitem__, kinds), initial=0))
    wanted = [f":[{start},{end}]}}," for start, end in pairwise(bounds)]
    wanted[-1] = wanted[-1][:-1] + "}"
    if offset_texts != wanted:
        return None
    columns = zip(
        names, dtypes, map(shapes.__getitem__, shape_texts), bounds[:-1], bounds[1:], strict=True
    )
    # As TensorEntry(*row), without a Python frame for each.
    return list(map(partial(tuple.__new__, TensorEntry), columns))


def _shape(text: str) -> tuple[int, ...] | None:
    return tuple(json.loads(text[1:-1])) if _SHAPE.fullmatch(text) else None
