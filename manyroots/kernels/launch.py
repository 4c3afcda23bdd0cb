"""What all Triton kernels of this package share: how they are launched, and how they wait.

A decode step is some 300 kernels of a few microseconds. Each would wait for the one before it to
drain; with programmatic dependent launch (Hopper and later) it starts while that one still runs,
reads what no kernel of the step writes, and waits only then. Two kinds of inputs, therefore:

    the step's constants   weights, tables, lengths, page tables, which adapter a row wants: may be
                           read before `wait_for_inputs`. They must be written before the step's
                           first `rms_norm`, which is the one kernel that is launched plainly.
    activations            everything a kernel of the step writes, keys and values included: only
                           after `wait_for_inputs`. (Asking the cache for them early is harmless.)

A product computed in several slices of its inner dimension is a tensor [num_splits, rows, n] of
partial sums. Whoever reads it next adds them up; there is no kernel that does only that.
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
    """Wait until all earlier kernels are done and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def prefetch(ptrs, DEPENDENT: tl.constexpr):
    """Ask for the cache lines at `ptrs` (a block of pointers) to be brought into L2."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_for_count(counter, count):
    """Wait until other programs of this launch have counted to `count`, and see what they wrote.
    They must be programs before this one: those begin earlier, so they are sure to get there."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@lru_cache(maxsize=8)
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before their inputs are there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether it has the matrix and copy instructions that kernels in Gluon are written for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


LAUNCH_EARLY = True
"""Tests clear it: each kernel then begins when the one before it is done, and results must be the
same bit by bit. It is read at every launch, and when a graph is captured."""


def launch_options(device: torch.device, *, plainly: bool = False) -> dict[str, Any]:
    """Keyword arguments of every launch: the constant DEPENDENT and Triton's option for it."""
    if not is_dependent(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": LAUNCH_EARLY and not plainly}


@lru_cache(maxsize=8)
def counters(device: torch.device) -> Tensor:
    """Zeros, by which programs of one launch find out who is last; that one clears them again."""
    with torch.inference_mode(False):
        return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def as_splits(x: Tensor) -> Tensor:
    """[num_splits, rows, n] of a product that may or may not be in partial sums."""
    return x if x.dim() == 3 else x.unsqueeze(0)
