"""The sets of kernels; each is one object with the same operations.

A layer receives its set instead of importing one. A GPU uses Triton's set and a CPU uses torch's
operators. The references run anywhere. The other two sets are tested against them, and fall back to
them for operations that a set lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from manyroots.kernels import operations


@dataclass(frozen=True, slots=True)
class Kernels:
    """One module per operation; see each one's `reference.py` for what it computes."""

    norm: operations.NormOps
    qk_rope_kv_write: operations.QkRopeKvWriteOps
    attention: operations.AttentionOps
    latent: operations.LatentOps
    compressed: operations.CompressedOps
    hyper: operations.HyperOps
    activation: operations.GatedActivationOps
    gemm: operations.GemmOps
    scaled_gemm: operations.ScaledGemmOps
    lora_ops: operations.LoraOps
    fused_moe: operations.FusedMoeOps
    sampling: operations.SamplingOps
    decode_rows: operations.DecodeRowsOps
    recurrent: operations.RecurrentOps
    causal_conv: operations.CausalConvOps
    delta_rule: operations.DeltaRuleOps
    mamba: operations.MambaOps
    gated_norm: operations.GatedNormOps

    @property
    def ask_nothing(self) -> bool:
        """Whether the operations never wait for the device, so that steps can be captured. Triton's
        never do."""
        return self.attention.__name__.endswith(".triton")


def kernels_for(device: torch.device) -> Kernels:
    """The set for a device."""
    return kernel_set_of("triton" if device.type == "cuda" else "torch_ops")


def reference_kernels() -> Kernels:
    """The references: simple and slow, on any device."""
    return kernel_set_of("reference")


def kernel_set_of(kind: str) -> Kernels:
    """Imported on demand: a machine without a GPU may have no Triton."""
    modules: list[Any] = [
        import_module(f"manyroots.kernels.{name}.{kind}") for name in Kernels.__slots__
    ]
    return Kernels(*modules)
