"""What all Triton kernels of this package share: how they are launched, and how they wait.

A decode step is some 300 kernels of a few microseconds. Each would wait for the one before it to
drain; with programmatic dependent launch (Hopper and later) it starts while that one still runs,
does what needs no input, and waits only then. So every kernel calls `wait_for_inputs` before it
reads or writes anything that another kernel touches, and is launched with `launch_options`.

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


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Let the next kernel begin, then wait until all earlier ones are done."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@lru_cache(maxsize=8)
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on this device may be launched before their inputs are there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of every launch: the constant DEPENDENT and Triton's option for it."""
    if is_dependent(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


def as_splits(x: Tensor) -> Tensor:
    """[num_splits, rows, n] of a product that may or may not be in partial sums."""
    return x if x.dim() == 3 else x.unsqueeze(0)
