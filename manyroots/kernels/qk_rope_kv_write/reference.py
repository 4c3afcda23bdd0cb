"""Reference: normalise and rotate queries and keys, and write keys and values into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.lora_ops.reference import expanded
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.norm.reference import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm, RopeTable, SlotMapping, as_kept


def qk_rope_kv_write(
    qkv: Tensor,
    angles: RopeTable,
    norm: QkNorm | None,
    layer_kv: Tensor,
    slot_mapping: SlotMapping,
    lora: LoraTerm | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns q [tokens, heads, head_dim] of qkv [tokens, (heads + 2 kv_heads) head_dim] (or
    partial sums of it) in `dtype`. Writes k and v into layer_kv [pages, 2, page_size, kv_heads,
    head_dim]. Without `dtype`, queries have the dtype of layer_kv."""
    kv_heads, head_dim = layer_kv.shape[-2:]
    total = qkv.float() if qkv.dim() == 2 else qkv.float().sum(0)
    if lora is not None:
        total = total + expanded(lora)
    by_head = total.view(total.shape[0], -1, head_dim)
    num_heads = by_head.shape[1] - 2 * kv_heads
    q, k, v = torch.split(by_head, [num_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    q, k = _rotate(q, angles), _rotate(k, angles)
    for token, (page, offset) in enumerate(
        zip(slot_mapping.pages.tolist(), slot_mapping.offsets.tolist(), strict=True)
    ):
        if page >= 0:
            layer_kv[page, 0, offset] = as_kept(k[token], layer_kv.dtype)
            layer_kv[page, 1, offset] = as_kept(v[token], layer_kv.dtype)
    return q.to(dtype or layer_kv.dtype)


def _rotate(x: Tensor, angles: RopeTable) -> Tensor:
    pairs = angles.cos.shape[1]
    first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest), dim=-1)


def look_up(table: RopeTable, positions: Tensor, dtype: torch.dtype) -> RopeTable:
    """The rotation of tokens at `positions`, once per step for all layers with the same
    rotation."""
    return table.rows(positions)
