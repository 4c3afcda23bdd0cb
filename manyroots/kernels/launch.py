"""Shared by all Triton kernels of this package: how to launch them, and how they wait.

A decode step is some 300 kernels of a few microseconds. Normally each waits until the one before it
has drained. With programmatic dependent launch (Hopper and later) it starts while that one still
runs, reads data that no kernel of the step writes, and only then waits. There are therefore two
kinds of inputs:

    the step's constants   weights, tables, lengths, page tables, each row's adapter: may be read
                           before `wait_for_inputs`. They must be written before the step's first
                           `rms_norm`, the only kernel with a plain launch.
    activations            everything a kernel of the step writes, keys and values included: only
                           after `wait_for_inputs`. (Prefetching them early is harmless.)

A product computed in several slices of its inner dimension is a tensor [num_splits, rows, n] of
partial sums. The next kernel that reads it adds them up; no kernel does only that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manyroots.kernels.limits import NUM_COUNTERS


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Allow the next kernel to start; call it first."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait until all earlier kernels are done and their writes are visible."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def prefetch(ptrs, DEPENDENT: tl.constexpr):
    """Prefetch the cache lines at `ptrs` (a block of pointers) into L2."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_for_count(counter, count):
    """Wait until other programs of this launch have counted to `count`; their writes are then
    visible. They must come before this program: earlier programs start earlier, so the wait
    ends."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@lru_cache(maxsize=8)
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before their inputs are ready."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether the device has the matrix and copy instructions that kernels in Gluon use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def has_shared_memory(device: torch.device) -> bool:
    """Whether a program may use more than 160 KiB of shared memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


LAUNCH_EARLY = True
"""Tests clear it: each kernel then starts when the one before it is done, and results must be
bitwise equal. It is read at every launch, and when a graph is captured."""


def launch_options(device: torch.device, *, plainly: bool = False) -> dict[str, Any]:
    """Keyword arguments of every launch: the constant DEPENDENT and Triton's option for it."""
    if not is_dependent(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": LAUNCH_EARLY and not plainly}


@lru_cache(maxsize=8)
def counters(device: torch.device) -> Tensor:
    """Zeroed counters by which programs of one launch find the last one; that one clears them
    again."""
    with torch.inference_mode(False):
        return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def as_splits(x: Tensor) -> Tensor:
    """[num_splits, rows, n] of a product with or without partial sums."""
    return x if x.dim() == 3 else x.unsqueeze(0)
