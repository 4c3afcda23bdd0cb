"""The sets of kernels, each as one object with the same operations.

A layer is told which to use instead of importing one: Triton's where there is a GPU, torch's own
operators on a CPU, and the references, which run anywhere, are what the other two are tested
against, and take over where a device's set lacks something.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True)
class Kernels:
    """One module per operation; see each one's `reference.py` for what it computes."""

    norm: ModuleType
    qk_rope_kv_write: ModuleType
    attention: ModuleType
    activation: ModuleType
    gemm: ModuleType
    scaled_gemm: ModuleType
    lora_ops: ModuleType
    fused_moe: ModuleType
    sampling: ModuleType
    decode_rows: ModuleType
    recurrent: ModuleType
    causal_conv: ModuleType
    delta_rule: ModuleType
    mamba: ModuleType
    gated_norm: ModuleType

    @property
    def ask_nothing(self) -> bool:
        """Whether they compute without asking the device anything, so that steps can be captured:
        Triton's do."""
        return self.attention.__name__.endswith(".triton")


def kernels_for(device: torch.device) -> Kernels:
    """A device's own."""
    return _set("triton") if device.type == "cuda" else _set("torch_ops")


def reference_kernels() -> Kernels:
    """Plain and slow, on any device."""
    return _set("reference")


def _set(kind: str) -> Kernels:
    """Imported when it is asked for: a machine without a GPU may have no Triton."""
    return Kernels(
        *(import_module(f"manyroots.kernels.{name}.{kind}") for name in Kernels.__slots__)
    )
