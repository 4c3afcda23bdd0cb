"""Turns tensors of an adapter in training into the form of its two files.

Takes a state dict and a config as PEFT gives them; gives a `MemoryAdapter` with a copy of them, so
that training may continue at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.lora.files.memory import MemoryAdapter

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
_MAX_THREADS = 8
"""That copy at once."""
_BYTES_PER_THREAD = 4 << 20
"""That make another thread worth while."""

FlatBytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def memory_adapter(tensors: Mapping[str, Tensor], config: object) -> MemoryAdapter:
    """`config`: a mapping, or a PEFT config. AdapterError names unsupported values."""
    if not isinstance(tensors, Mapping):
        raise AdapterError(
            f"tensors is a {type(tensors).__name__}; give a mapping from names to tensors."
        )
    about: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AdapterError(f"{name} is a {type(tensor).__name__}; give a torch tensor.")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{name} is {tensor.dtype}; give float32, float16 or bfloat16 tensors."
            )
        end = offset + tensor.nbytes
        about[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return MemoryAdapter.of(
        _config_bytes(config),
        [len(header).to_bytes(8, "little"), header, _in_one(list(tensors.values()), offset).data],
    )


def _in_one(tensors: Sequence[Tensor], num_bytes: int) -> FlatBytes:
    """Their bytes, one after the other. Several threads copy what is in host memory. In one piece
    it is read without another copy, and threads that read it wait less for each other's Python."""
    whole = np.empty(num_bytes, np.uint8)
    moves: list[tuple[FlatBytes, FlatBytes]] = []
    offset = 0
    for tensor in tensors:
        # On this thread: another one would not wait for the stream that computes the tensor.
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        moves.append((whole[offset : offset + flat.nbytes], flat))
        offset += flat.nbytes
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, 1 + num_bytes // _BYTES_PER_THREAD)

    def copy(first: int) -> None:
        for to, flat in moves[first::num_threads]:
            np.copyto(to, flat)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-copy") as threads:
        list(threads.map(copy, range(num_threads)))
    return whole


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
