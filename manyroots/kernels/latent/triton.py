"""Latent attention on a GPU, in Triton. Same signatures as `reference.py`."""

from __future__ import annotations

from manyroots.kernels.latent.triton_decode import attend_chosen, latent_decode
from manyroots.kernels.latent.triton_index import index_write
from manyroots.kernels.latent.triton_products import absorb_queries, expand_values
from manyroots.kernels.latent.triton_prompt import attend_piece, merge
from manyroots.kernels.latent.triton_rows import latent_read, latent_write

__all__ = [
    "absorb_queries",
    "attend_chosen",
    "attend_piece",
    "expand_values",
    "index_write",
    "latent_decode",
    "latent_read",
    "latent_write",
    "merge",
]
