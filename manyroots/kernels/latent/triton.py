"""Latent attention on a GPU, with torch's own operators.

Same signatures as `reference.py`. Only the rotation is read differently here: a GPU has angles as
one table of cosines and one of sines.
"""

from __future__ import annotations

from torch import Tensor

from manyroots.kernels.latent import reference
from manyroots.kernels.latent.inputs import LatentNorm
from manyroots.kernels.latent.reference import absorb_queries, expand_values
from manyroots.kernels.latent.torch_ops import attend_piece, latent_decode, latent_read, merge
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping

__all__ = [
    "absorb_queries",
    "attend_piece",
    "expand_values",
    "latent_decode",
    "latent_read",
    "merge",
    "rope_write",
]


def rope_write(
    q: Tensor,
    kv: Tensor,
    angles: RopeTable,
    norm: LatentNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
    *,
    is_interleaved: bool,
) -> Tensor:
    """Normalise, rotate and write latents; give queries rotated."""
    return reference.rope_write(
        q, kv, angles, norm, pages, slot_mapping, is_interleaved=is_interleaved
    )
