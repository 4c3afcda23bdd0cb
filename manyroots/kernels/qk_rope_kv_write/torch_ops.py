"""Normalise and rotate queries and keys, and write keys and values, with torch's operators.

Same signatures as `reference.py`. Attention on a CPU reads whole pages and masks their tails, which
is exact only if the tails are finite. A page is therefore cleared when its first token is written.
A sequence with NaNs can spoil its own output, but not that of the next owner of its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.norm.torch_ops import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm, RopeTable, SlotMapping, as_kept


@dataclass(frozen=True, slots=True)
class RopeRows:
    """The rotation of a step's tokens, in the model's dtype and in the layout of heads."""

    cos: Tensor
    """[num_tokens, 1, 2 * pairs]; both halves are the same."""
    sin: Tensor
    """[num_tokens, 1, pairs]"""


def look_up(table: RopeTable, positions: Tensor, dtype: torch.dtype) -> RopeRows:
    """The rotation of tokens at `positions`, once per step for all layers with the same
    rotation."""
    cos = table.cos[positions].to(dtype)[:, None]
    return RopeRows(torch.cat((cos, cos), dim=-1), table.sin[positions].to(dtype)[:, None])


def qk_rope_kv_write(
    qkv: Tensor,
    angles: RopeRows,
    norm: QkNorm | None,
    layer_kv: Tensor,
    slot_mapping: SlotMapping,
    lora: LoraTerm | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns q [tokens, heads, head_dim] of qkv [tokens, (heads + 2 kv_heads) head_dim], in its
    dtype. Writes k and v into layer_kv [pages, 2, page_size, kv_heads, head_dim]."""
    if lora is not None:
        raise TypeError("a CPU's products come with their adapters in them")
    kv_heads, head_dim = layer_kv.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    counts = [heads.shape[1] - 2 * kv_heads, kv_heads]
    v = heads[:, -kv_heads:]
    if norm is None:
        # Together: on a CPU the cost of small steps is their number of operators.
        q, k = torch.split(_rotated(heads[:, :-kv_heads], angles), counts, dim=1)
    else:
        q, k = torch.split(heads[:, :-kv_heads], counts, dim=1)
        q = _rotated(rms_norm(q, norm.q_weight, norm.eps), angles)
        k = _rotated(rms_norm(k, norm.k_weight, norm.eps), angles)
    if layer_kv.dtype is not q.dtype:  # FP8, which few operators support: written as bytes
        k, v = (as_kept(x, layer_kv.dtype).view(torch.uint8) for x in (k, v))
        layer_kv = layer_kv.view(torch.uint8)
    if slot_mapping.new_pages is not None and slot_mapping.new_pages.numel():
        layer_kv.index_fill_(0, slot_mapping.new_pages, 0)
    if slot_mapping.tokens is not None:
        k, v = k[slot_mapping.tokens], v[slot_mapping.tokens]
    at = (slot_mapping.pages, slot_mapping.offsets)
    layer_kv[:, 0].index_put_(at, k)
    layer_kv[:, 1].index_put_(at, v)
    return q


def _rotated(x: Tensor, rope: RopeRows) -> Tensor:
    """x [num_tokens, heads, head_dim]; the two halves of the rotated part hold the coordinates of
    pairs."""
    pairs = rope.sin.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    if 2 * pairs == x.shape[-1]:
        rotated = x * rope.cos
    else:
        rotated = x.clone()
        rotated[..., : 2 * pairs] *= rope.cos
    rotated[..., :pairs].addcmul_(second, rope.sin, value=-1)
    rotated[..., pairs : 2 * pairs].addcmul_(first, rope.sin)
    return rotated
