"""Turns tensors of an adapter in training into the form of its two files.

Takes a state dict and a config as PEFT gives them; gives a `MemoryAdapter` with a copy of them, so
that training may continue at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.lora.files.memory import MemoryAdapter

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


def memory_adapter(tensors: Mapping[str, Tensor], config: object) -> MemoryAdapter:
    """`config`: a mapping, or a PEFT config. AdapterError names unsupported values."""
    about: dict[str, Any] = {}
    pieces: list[memoryview | bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{name} is {tensor.dtype}; give float32, float16 or bfloat16 tensors."
            )
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        flat = copy.view(-1).view(torch.uint8).numpy()
        end = offset + flat.nbytes
        about[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        pieces.append(flat.data)
        offset = end
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return MemoryAdapter.of(
        _config_bytes(config), [len(header).to_bytes(8, "little"), header, *pieces]
    )


def _config_bytes(config: object) -> bytes:
    values = config if isinstance(config, Mapping) else None
    if values is None and hasattr(config, "to_dict"):
        values = config.to_dict()
    if not isinstance(values, Mapping):
        raise AdapterError(
            f"config is a {type(config).__name__}; give a mapping, or a config of PEFT."
        )
    return json.dumps(dict(values), default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise AdapterError(f"config has a {type(value).__name__}, which is no JSON.")
