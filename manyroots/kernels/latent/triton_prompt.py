"""Prompt attention of latent models in Triton: queries over a piece of expanded keys and values.

Same signatures as `reference.py`. A program takes a block of queries of one head and loops over
their visible tokens tile by tile. It masks only tiles that some query sees in part. Keys whose
dimension is no power of two, as 192, are read in two pieces.
`triton_hopper_prompt.py` takes the inputs that it supports.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.latent import triton_hopper_prompt
from manyroots.kernels.latent.inputs import KeyPiece, SplitKeys
from manyroots.kernels.latent.triton_rows import join_keys, padded
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

LOG2_E = math.log2(math.e)
LEAST = 16
"""Inner dimension of a matrix instruction."""
MANY_VALUES = 128
"""Dimensions of values; a program of four warps holds the sums of more for 64 queries only."""
MERGED = 16
"""Rows of heads of a merging program."""


@triton.jit
def _over_tiles(
    wide, narrow, best, total, acc, k, v, position, begin, end, num_keys, scale, k_row, v_row,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    VALUE_POW: tl.constexpr, BLOCK_T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the keys [begin, end) into the best score, the sum of weights and the sum of
    values. MASKED: some query does not see all of them."""
    d = tl.arange(0, WIDE)
    f = tl.arange(0, VALUE_POW)
    for at in range(begin, end, BLOCK_T):
        t = at + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64)
        ok = (t < num_keys)[:, None]
        keys_at = k + row[:, None] * k_row
        wide_keys = tl.load(keys_at + d[None, :], mask=ok & (d < KEY_DIM)[None, :], other=0.0)
        values = tl.load(
            v + row[:, None] * v_row + f[None, :], mask=ok & (f < VALUE_DIM)[None, :], other=0.0
        )
        scores = tl.dot(wide, tl.trans(wide_keys), input_precision="ieee")
        if NARROW:
            e = WIDE + tl.arange(0, NARROW)
            narrow_keys = tl.load(keys_at + e[None, :], mask=ok & (e < KEY_DIM)[None, :], other=0.0)
            scores = tl.dot(narrow, tl.trans(narrow_keys), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(t[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1) * scale)
        # A query that has seen no key yet would compute -inf - -inf here.
        anchor = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shrink = tl.exp2(best - anchor)
        weights = tl.exp2(scores * scale - anchor[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        best = higher
    return best, total, acc


@triton.jit
def _prompt(
    q, k, v, query_starts, key_starts, first_seen, out, sums, scale, q_row, q_head, k_row, k_head,
    v_row, v_head,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr, VALUE_POW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    head, seq = tl.program_id(0), tl.program_id(2)
    # The last queries see the most, so they come first.
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - start
    if first_query >= num_queries:
        return
    first_key = tl.load(key_starts + seq)
    num_keys = tl.load(key_starts + seq + 1) - first_key
    lowest = tl.load(first_seen + seq) + first_query
    i = first_query + tl.arange(0, BLOCK_Q)
    position = lowest + tl.arange(0, BLOCK_Q)
    row = (start + i).to(tl.int64)
    is_query = (i < num_queries)[:, None]
    query_at = q + row[:, None] * q_row + head * q_head
    d = tl.arange(0, WIDE)
    f = tl.arange(0, VALUE_POW)
    wide = tl.load(query_at + d[None, :], mask=is_query & (d < KEY_DIM)[None, :], other=0.0)
    narrow = wide
    if NARROW:
        e = WIDE + tl.arange(0, NARROW)
        narrow = tl.load(query_at + e[None, :], mask=is_query & (e < KEY_DIM)[None, :], other=0.0)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, VALUE_POW), tl.float32)
    k += first_key.to(tl.int64) * k_row + head * k_head
    v += first_key.to(tl.int64) * v_row + head * v_head
    end = tl.minimum(num_keys, lowest + BLOCK_Q)
    whole = tl.maximum(tl.minimum(num_keys, lowest + 1), 0) // BLOCK_T * BLOCK_T
    best, total, acc = _over_tiles(
        wide, narrow, best, total, acc, k, v, position, 0, whole, num_keys, scale, k_row, v_row,
        KEY_DIM, VALUE_DIM, WIDE, NARROW, VALUE_POW, BLOCK_T, False,
    )  # fmt: skip
    position = tl.minimum(position, num_keys - 1)
    best, total, acc = _over_tiles(
        wide, narrow, best, total, acc, k, v, position, whole, end, num_keys, scale, k_row, v_row,
        KEY_DIM, VALUE_DIM, WIDE, NARROW, VALUE_POW, BLOCK_T, True,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    row_head = row * NUM_HEADS + head
    tl.store(
        out + row_head[:, None] * VALUE_DIM + f[None, :], acc,
        mask=is_query & (f < VALUE_DIM)[None, :],
    )  # fmt: skip
    ln_2: tl.constexpr = 0.6931471805599453
    tl.store(sums + row_head, (best + tl.log2(total)) * ln_2, mask=i < num_queries)


def attend_piece(
    q: Tensor, keys: SplitKeys, v: Tensor, piece: KeyPiece, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with queries [tokens, heads, key dim] to a piece of keys and values [keys, heads,
    value dim]. Returns [tokens, heads, value dim], in `out` if given, and logarithms of the sums of
    exponentials, float32 [tokens, heads]. A query that sees no key gives 0 and -inf."""
    num_tokens, heads, key_dim = q.shape
    value_dim = v.shape[2]
    if out is None:
        out = q.new_empty(num_tokens, heads, value_dim)
    assert out.is_contiguous()
    if triton_hopper_prompt.is_for(q, keys, v, piece):
        return triton_hopper_prompt.attend_piece(q, keys, v, piece, scale, out)
    k = join_keys(keys)
    sums = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
    wide = 1 << (key_dim.bit_length() - 1)
    is_small = q.dtype != torch.float32
    block_q, num_warps = (64, 4) if is_small else (32, 4)
    # Not by the queries' number: a form that only few queries take would be compiled in traffic.
    if is_small and value_dim > MANY_VALUES:
        block_q, num_warps = 128, 8  # so large tiles are read half as often
    _prompt[(heads, -(-piece.max_queries // block_q), piece.first_seen.shape[0])](
        q, k, v, piece.query_starts, piece.key_starts, piece.first_seen, out, sums,
        scale * LOG2_E, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], NUM_HEADS=heads,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, WIDE=max(LEAST, wide),
        NARROW=0 if key_dim == wide else padded(key_dim - wide, LEAST),
        VALUE_POW=padded(value_dim, LEAST), BLOCK_Q=block_q, BLOCK_T=64 if is_small else 16,
        num_warps=num_warps, num_stages=2, **launch_options(q.device),
    )  # fmt: skip
    return out, sums


@triton.jit(do_not_specialize=["num_rows"])
def _merge(
    out, sums, other, other_sums, merged, merged_sums, num_rows,
    SIZE: tl.constexpr, SIZE_POW: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE_POW)
    ok = row < num_rows
    at = row[:, None] * SIZE + d[None, :]
    is_number = ok[:, None] & (d < SIZE)[None, :]
    a = tl.load(sums + row, mask=ok, other=float("-inf"))
    b = tl.load(other_sums + row, mask=ok, other=float("-inf"))
    best = tl.maximum(a, b)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    a_weight, b_weight = tl.exp(a - anchor), tl.exp(b - anchor)
    total = a_weight + b_weight
    factor = 1.0 / tl.where(total > 0, total, 1.0)
    own = tl.load(out + at, mask=is_number, other=0.0).to(tl.float32)
    added = tl.load(other + at, mask=is_number, other=0.0).to(tl.float32)
    mixed = own * (a_weight * factor)[:, None] + added * (b_weight * factor)[:, None]
    tl.store(merged + at, mixed, mask=is_number)
    tl.store(merged_sums + row, anchor + tl.log(total), mask=ok)


def merge(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both pieces' keys."""
    merged, merged_sums = torch.empty_like(out), torch.empty_like(sums)
    size, num_rows = out.shape[2], sums.numel()
    _merge[(-(-num_rows // MERGED),)](
        out, sums, other, other_sums, merged, merged_sums, num_rows, SIZE=size,
        SIZE_POW=padded(size), ROWS=MERGED, **launch_options(out.device),
    )  # fmt: skip
    return merged, merged_sums
