"""The fused kernels of a device, as one object.

A layer is told which to use instead of importing them, because the two sets have the same
signatures: Triton's where there is a GPU, and the references, which run anywhere and are what the
bookkeeping around the kernels is tested with.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True)
class Kernels:
    """One module per operation; see each one's `reference.py` for what it computes."""

    norm: ModuleType
    rope_write: ModuleType
    attention: ModuleType
    activation: ModuleType
    gemm: ModuleType
    lora_sites: ModuleType
    moe_pairs: ModuleType
    sampling: ModuleType
    decode_rows: ModuleType


def kernels_for(device: torch.device) -> Kernels:
    """Triton's on a GPU, else the references."""
    return _triton() if device.type == "cuda" else _references()


def _references() -> Kernels:
    from manyroots.kernels.activation import reference as activation
    from manyroots.kernels.attention import reference as attention
    from manyroots.kernels.decode_rows import reference as decode_rows
    from manyroots.kernels.gemm import reference as gemm
    from manyroots.kernels.lora_sites import reference as lora_sites
    from manyroots.kernels.moe_pairs import reference as moe_pairs
    from manyroots.kernels.norm import reference as norm
    from manyroots.kernels.rope_write import reference as rope_write
    from manyroots.kernels.sampling import reference as sampling

    return Kernels(
        norm, rope_write, attention, activation, gemm, lora_sites, moe_pairs, sampling, decode_rows
    )


def _triton() -> Kernels:
    from manyroots.kernels.activation import triton as activation
    from manyroots.kernels.attention import triton as attention
    from manyroots.kernels.decode_rows import triton as decode_rows
    from manyroots.kernels.gemm import triton as gemm
    from manyroots.kernels.lora_sites import triton as lora_sites
    from manyroots.kernels.moe_pairs import triton as moe_pairs
    from manyroots.kernels.norm import triton as norm
    from manyroots.kernels.rope_write import triton as rope_write
    from manyroots.kernels.sampling import triton as sampling

    return Kernels(
        norm, rope_write, attention, activation, gemm, lora_sites, moe_pairs, sampling, decode_rows
    )
