"""From logits to tokens in two launches, without a sort or a copy of the logits.

Same signatures as `reference.py`. The vocabulary is cut into spans: one launch finds each span's
best and its sum of exponentials, the next one finds the span in which the draw falls, and reads
that span alone again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

SPAN = 4096


@triton.jit
def _spans(
    logits, temperature, best, best_at, sums, vocab, NUM_SPANS: tl.constexpr, SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    span = tl.program_id(0)
    i = span * SPAN + tl.arange(0, SPAN)
    values = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    # A NaN must win, so that it is seen: comparisons alone would pass over it.
    is_nan = tl.max((values != values).to(tl.int32))
    highest = tl.max(values)
    at = tl.min(tl.where(values == highest, i, vocab - 1))
    tl.store(best + row * NUM_SPANS + span, tl.where(is_nan > 0, float("nan"), highest))
    tl.store(best_at + row * NUM_SPANS + span, at)
    heat = tl.load(temperature + row)
    if heat > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp((values - anchor) / heat).to(tl.float64)
        tl.store(sums + row * NUM_SPANS + span, tl.sum(weights))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _draw(seed, index):
    """The reference's number in [0, 1) of (seed, index)."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64)) + (index.to(tl.uint64) + 1) * golden
    # 53 bits: the conversion is exact.
    return (_mix(state) >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _choose(
    logits, temperature, seeds, indices, best, best_at, sums, tokens, finite, vocab,
    NUM_SPANS: tl.constexpr, SPANS_PAD: tl.constexpr, SPAN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPANS_PAD)
    ok = s < NUM_SPANS
    tops = tl.load(best + row * NUM_SPANS + s, mask=ok, other=float("-inf"))
    is_nan = tl.max((tops != tops).to(tl.int32)) > 0
    highest = tl.max(tl.where(tops != tops, float("-inf"), tops))
    is_finite = (is_nan == 0) & (highest > float("-inf")) & (highest < float("inf"))
    tl.store(finite + row, is_finite)
    which = tl.min(tl.where((tops == highest) & ok, s, NUM_SPANS - 1))
    token = tl.load(best_at + row * NUM_SPANS + which)
    heat = tl.load(temperature + row)
    if (heat > 0) & is_finite:
        spans = tl.load(sums + row * NUM_SPANS + s, mask=ok, other=0.0)
        spans = spans * tl.exp((tops - highest) / heat).to(tl.float64)
        running = tl.cumsum(spans, axis=0)
        total = tl.sum(spans)
        target = _draw(tl.load(seeds + row), tl.load(indices + row)) * total
        # The first span whose running sum exceeds the target; the last with weight if none does.
        heaviest = tl.max(tl.where(spans > 0, s, 0))
        span = tl.minimum(tl.sum((running <= target).to(tl.int32)), heaviest)
        before = tl.sum(tl.where(s < span, spans, 0.0))
        top = tl.max(tl.where(s == span, tops, float("-inf")))
        i = span * SPAN + tl.arange(0, SPAN)
        values = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf"))
        weights = tl.exp((values.to(tl.float32) - top) / heat).to(tl.float64)
        share = tl.exp((top - highest) / heat).to(tl.float64)
        inside = tl.cumsum(weights, axis=0) * share + before
        last = tl.max(tl.where(weights > 0, i, 0))
        picked = span * SPAN + tl.sum((inside <= target).to(tl.int32))
        token = tl.minimum(picked, last)
    tl.store(tokens + row, token)


def sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens, int32 [rows], and whether each row's largest logit was finite.

    Rows whose `temperature` (float32) is 0 take the likeliest token, the first of equals; others
    draw with `seeds` and `indices` (int64) from all of the vocabulary.
    """
    rows, vocab = logits.shape
    device = logits.device
    num_spans = triton.cdiv(vocab, SPAN)
    best = torch.empty(rows, num_spans, dtype=torch.float32, device=device)
    best_at = torch.empty(rows, num_spans, dtype=torch.int32, device=device)
    sums = torch.empty(rows, num_spans, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    options = launch_options(device)
    _spans[(num_spans, rows)](
        logits, temperature, best, best_at, sums, vocab, NUM_SPANS=num_spans, SPAN=SPAN, **options
    )
    _choose[(rows,)](
        logits, temperature, seeds, indices, best, best_at, sums, tokens, finite, vocab,
        NUM_SPANS=num_spans, SPANS_PAD=triton.next_power_of_2(num_spans), SPAN=SPAN, num_warps=8,
        **options,
    )  # fmt: skip
    return tokens, finite
