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
    about: dict[str, Any] = {}
    flats: list[FlatBytes] = []
    shared: list[int] = []
    offset = 0
    if not isinstance(tensors, Mapping):
        raise AdapterError(
            f"tensors is a {type(tensors).__name__}; give a mapping from names to tensors."
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AdapterError(f"{name} is a {type(tensor).__name__}; give a torch tensor.")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{name} is {tensor.dtype}; give float32, float16 or bfloat16 tensors."
            )
        # On this thread: another one would not wait for the stream that computes the tensor.
        on_host = tensor.detach().to("cpu").contiguous()
        if on_host.data_ptr() == tensor.data_ptr():
            shared.append(len(flats))
        flats.append(on_host.view(-1).view(torch.uint8).numpy())
        end = offset + on_host.nbytes
        about[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    for at, copy in zip(shared, _copied([flats[at] for at in shared]), strict=True):
        flats[at] = copy
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return MemoryAdapter.of(
        _config_bytes(config),
        [len(header).to_bytes(8, "little"), header, *(flat.data for flat in flats)],
    )


def _copied(flats: Sequence[FlatBytes]) -> list[FlatBytes]:
    """Copies of these, made by several threads."""
    copies = [np.empty_like(flat) for flat in flats]
    num_bytes = sum(flat.nbytes for flat in flats)
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, 1 + num_bytes // _BYTES_PER_THREAD)

    def copy(first: int) -> None:
        for to, flat in zip(copies[first::num_threads], flats[first::num_threads], strict=True):
            np.copyto(to, flat)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-copy") as threads:
        list(threads.map(copy, range(num_threads)))
    return copies


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
