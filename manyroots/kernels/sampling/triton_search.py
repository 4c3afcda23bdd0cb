"""The choice for a row that keeps more tokens than a list holds: searches the whole vocabulary.

One program reads the whole row several times, so this is for the few rows that need it. It finds
the last kept key two bits at a time. Of the tokens with that key, the first few by id are kept;
their weights are equal, so the number follows from counts and sums. Device code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.sampling.triton_rows import (
    NO_KEY,
    NOBODY,
    edited_logits,
    key_of,
    limit_of,
    logit_of,
    own_logits,
    place_of,
    target_of,
    weight_of,
)


@triton.jit
def search(
    logits, edits, cuts, total, number, vocab, step, SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's token. `total`: the weight of all tokens, used if all are among the top k. `step`:
    keys differ by multiples of this, which is 1 or 65536."""
    last = tl.full((), NO_KEY, tl.int32)
    quota = tl.full((), NOBODY, tl.int64)
    if cuts.top_k < vocab:
        last, above = _last_kept(
            logits, edits, cuts, cuts.top_k.to(tl.int64), vocab, step, False, SCALE_BITS, BLOCK
        )
        quota = cuts.top_k - above
        floor = tl.full((), 0, tl.int64)
        total = _weight_above(logits, edits, cuts, last + step, floor, vocab, SCALE_BITS, BLOCK)
        total += quota * _weight_at(last, cuts, step, SCALE_BITS)
    if cuts.top_p < 1.0:
        limit = limit_of(total, cuts.top_p)
        last, above = _last_kept(logits, edits, cuts, limit, vocab, step, True, SCALE_BITS, BLOCK)
        each = _weight_at(last, cuts, step, SCALE_BITS)
        quota = (limit - above + each - 1) // each
    kept = _weight_above(logits, edits, cuts, last + step, cuts.floor, vocab, SCALE_BITS, BLOCK)
    each = _weight_at(last, cuts, step, SCALE_BITS)
    kept += tl.where(each >= cuts.floor, quota * each, 0)
    target = target_of(number, kept)
    token = tl.full((), NOBODY, tl.int32)
    running = tl.full((), 0, tl.int64)
    equals = tl.full((), 0, tl.int64)
    first = tl.full((), 0, tl.int32)
    while (token == NOBODY) & (first < vocab):
        i = first + tl.arange(0, BLOCK)
        x = edited_logits(logits, edits, i, vocab)
        keys = tl.where(i < vocab, key_of(x), NO_KEY)
        is_last = (keys >= last) & (keys < last + step)
        order = equals + tl.cumsum(is_last.to(tl.int64), axis=0)
        weights = weight_of(x, cuts, SCALE_BITS)
        is_kept = (keys >= last + step) | (is_last & (order <= quota))
        weights = tl.where(is_kept & (weights >= cuts.floor), weights, 0)
        sums = running + tl.cumsum(weights, axis=0)
        token = tl.min(tl.where(sums > target, i, NOBODY))
        running += tl.sum(weights)
        equals += tl.sum(is_last.to(tl.int64))
        first += BLOCK
    return token


@triton.jit
def _weight_at(key, cuts, step, SCALE_BITS: tl.constexpr):
    """The weight of the one logit with a key in [key, key + step)."""
    return weight_of(logit_of(tl.where(key < 0, key + step - 1, key)), cuts, SCALE_BITS)


@triton.jit
def _weight_above(
    logits, edits, cuts, key, floor, vocab, SCALE_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of all weights of at least `floor` of tokens with keys of at least `key`."""
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = edited_logits(logits, edits, i, vocab)
        weights = weight_of(x, cuts, SCALE_BITS)
        sums += tl.where((i < vocab) & (key_of(x) >= key) & (weights >= floor), weights, 0)
    return tl.sum(sums)


@triton.jit
def _last_kept(
    logits, edits, cuts, need, vocab, step, BY_WEIGHT: tl.constexpr, SCALE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens from it upwards, or their weights, are at least `need`;
    and the number or weight of those above it."""
    last = tl.full((), NO_KEY, tl.int32)
    above = tl.full((), 0, tl.int64)
    unit = tl.full((), 1 << 30, tl.int32)
    while unit >= step:
        one, two, three = last + unit, last + unit * 2, last + unit * 3
        from_one = tl.zeros([BLOCK], tl.int64)
        from_two = tl.zeros([BLOCK], tl.int64)
        from_three = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = edited_logits(logits, edits, i, vocab)
            keys = tl.where(i < vocab, key_of(x), NO_KEY)
            each = tl.full([BLOCK], 1, tl.int64)
            if BY_WEIGHT:
                each = weight_of(x, cuts, SCALE_BITS)
            from_one += tl.where(keys >= one, each, 0)
            from_two += tl.where(keys >= two, each, 0)
            from_three += tl.where(keys >= three, each, 0)
        last, above = narrow(
            last, above, unit, tl.sum(from_one), tl.sum(from_two), tl.sum(from_three), need
        )
        unit = unit // 4
    return last, above


@triton.jit
def narrow(last, above, unit, from_one, from_two, from_three, need):
    """Two more bits of the last key, given the amounts from it upwards plus one, two and three
    units."""
    above = tl.where(from_three >= need, above, from_three)
    above = tl.where(from_two >= need, above, from_two)
    above = tl.where(from_one >= need, above, from_one)
    units = (from_one >= need).to(tl.int32) + (from_two >= need) + (from_three >= need)
    return last + units * unit, above


@triton.jit
def next_place(logits, before, vocab, BLOCK: tl.constexpr):
    """Of the model's own logits, the first token after `before` in the order."""
    found = tl.full((), -(2**63), tl.int64)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        places = place_of(key_of(own_logits(logits, i, vocab)), i)
        is_next = (i < vocab) & (places < before)
        found = tl.maximum(found, tl.max(tl.where(is_next, places, -(2**63))))
    return found
