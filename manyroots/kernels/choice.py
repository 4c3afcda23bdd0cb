"""The sets of kernels, each as one object with the same operations.

A layer is told which to use instead of importing one: Triton's where there is a GPU, torch's own
operators on a CPU, and the references, which run anywhere, are what the other two are tested
against, and take over where a device's set lacks something.
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
        """Whether they compute without asking the device anything, so that steps can be captured:
        Triton's do."""
        return self.attention.__name__.endswith(".triton")


def kernels_for(device: torch.device) -> Kernels:
    """A device's own."""
    return kernel_set_of("triton" if device.type == "cuda" else "torch_ops")


def reference_kernels() -> Kernels:
    """Plain and slow, on any device."""
    return kernel_set_of("reference")


def kernel_set_of(kind: str) -> Kernels:
    """Imported when it is asked for: a machine without a GPU may have no Triton."""
    modules: list[Any] = [
        import_module(f"manyroots.kernels.{name}.{kind}") for name in Kernels.__slots__
    ]
    return Kernels(*modules)
