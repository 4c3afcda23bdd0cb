"""Shared device code of the sampling kernels: reading and editing a row's logits, the order of
tokens, their weights, and a row's random number."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from manyroots.kernels.sampling.exact import LEAST, LOG2_E, POWERS, ROUNDER
from manyroots.kernels.sampling.rows import IN_PROMPT, MAX_BIASES, MAX_STOPS

_LEAST, _ROUNDER = tl.constexpr(LEAST), tl.constexpr(ROUNDER)
_LOG2_E = tl.constexpr(LOG2_E)
_P0, _P1, _P2 = (tl.constexpr(power) for power in POWERS[:3])
_P3, _P4, _P5 = (tl.constexpr(power) for power in POWERS[3:])
_SAID = tl.constexpr(IN_PROMPT - 1)
_MAX_BIASES, _MAX_STOPS = tl.constexpr(MAX_BIASES), tl.constexpr(MAX_STOPS)
_LARGEST = tl.constexpr(3.4028234663852886e38)
NOBODY = tl.constexpr(2**31 - 1)
"""Above all token ids."""
NO_KEY = tl.constexpr(-(2**31))
"""Below the keys of all logits."""
LEAST_KEY = tl.constexpr(-(2**31) + 0x7FFFFF)
"""Of a logit of minus infinity."""


class Asked(NamedTuple):
    """The tensors of a `SamplingRows` and of its tables, in this order."""

    table_rows: Any
    request_rows: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seeds: Any
    indices: Any
    repetition: Any
    frequency: Any
    presence: Any
    num_biases: Any
    num_stops: Any
    has_mask: Any
    num_top: Any
    counts: Any
    bias_ids: Any
    biases: Any
    stop_ids: Any
    masks: Any


class RowEdits(NamedTuple):
    """One row's edits of its logits, and its rows of the tables."""

    has_any: Any
    has_penalties: Any
    repetition: Any
    frequency: Any
    presence: Any
    num_biases: Any
    num_stops: Any
    has_mask: Any
    counts: Any
    bias_ids: Any
    biases: Any
    stop_ids: Any
    masks: Any


class RowCuts(NamedTuple):
    """The part of the vocabulary that one row keeps, and how its weights are computed."""

    top_k: Any
    """At least the vocabulary's size if all tokens are kept."""
    top_p: Any
    floor: Any
    best: Any
    per_logit: Any


@triton.jit
def edits_of(asked, row, vocab):
    at = tl.load(asked.table_rows + row)
    own = tl.load(asked.request_rows + row)
    repetition = tl.load(asked.repetition + row)
    frequency = tl.load(asked.frequency + row)
    presence = tl.load(asked.presence + row)
    num_biases = tl.load(asked.num_biases + row)
    num_stops = tl.load(asked.num_stops + row)
    has_mask = tl.load(asked.has_mask + row) != 0
    has_penalties = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    return RowEdits(
        has_penalties | (num_biases > 0) | (num_stops > 0) | has_mask, has_penalties,
        repetition, frequency, presence, num_biases, num_stops, has_mask,
        asked.counts + at * vocab, asked.bias_ids + own * _MAX_BIASES,
        asked.biases + own * _MAX_BIASES, asked.stop_ids + own * _MAX_STOPS,
        asked.masks + at * ((vocab + 31) // 32),
    )  # fmt: skip


@triton.jit
def own_logits(logits, i, vocab):
    """The model's logits of a row's tokens `i`; minus infinity past the last token."""
    return tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def edited_logits(logits, edits, i, vocab):
    """The same, edited."""
    x = own_logits(logits, i, vocab)
    if edits.has_any:
        x = edit(x, edits, i, vocab)
    return x


@triton.jit
def edit(x, edits, i, vocab):
    """Logits of the consecutive tokens `i` after the row's edits."""
    first, last = tl.min(i), tl.max(i)
    if edits.num_biases > 0:
        b = tl.arange(0, _MAX_BIASES)
        ids = tl.load(edits.bias_ids + b, mask=b < edits.num_biases, other=NOBODY)
        begin, end = tl.sum((ids < first).to(tl.int32)), tl.sum((ids <= last).to(tl.int32))
        for j in range(begin, end):
            bias = tl.load(edits.biases + j)
            x = tl.where(i == tl.load(edits.bias_ids + j), x + bias, x)
    if edits.num_stops > 0:
        s = tl.arange(0, _MAX_STOPS)
        ids = tl.load(edits.stop_ids + s, mask=s < edits.num_stops, other=NOBODY)
        begin, end = tl.sum((ids < first).to(tl.int32)), tl.sum((ids <= last).to(tl.int32))
        for j in range(begin, end):
            x = tl.where(i == tl.load(edits.stop_ids + j), float("-inf"), x)
    if edits.has_mask:
        words = tl.load(edits.masks + i // 32, mask=i < vocab, other=0)
        x = tl.where((words >> (i % 32)) & 1 == 1, x, float("-inf"))
    if edits.has_penalties:
        counts = tl.load(edits.counts + i, mask=i < vocab, other=0)
        scaled = tl.where(x > 0, tl.div_rn(x, edits.repetition), x * edits.repetition)
        # Above the range of float32 counts as its maximum; below it, the token is as good as
        # forbidden.
        x = tl.where(counts != 0, tl.minimum(scaled, _LARGEST), x)
        times = counts & _SAID
        cost = edits.frequency * times.to(tl.float32) + edits.presence
        x = tl.where(times > 0, x - cost, x)
    return x


@triton.jit
def key_of(x):
    """int32 in the order of float32; both zeros are equal."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == NO_KEY, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key, i):
    """int64 in the order of tokens: by key; ties rank the lower id higher."""
    return (key.to(tl.int64) << 32) | (i ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def key_at(place):
    return (place >> 32).to(tl.int32)


@triton.jit
def id_at(place):
    return (place & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def heat_of(temperature):
    """The number of powers of two per logit."""
    return tl.div_rn(tl.full((), _LOG2_E, tl.float32), temperature)


@triton.jit
def weight_of(x, cuts, SCALE_BITS: tl.constexpr):
    """`exact.weights`; the kernel must be compiled without fused multiply-adds."""
    exponents = tl.maximum((x - cuts.best) * cuts.per_logit, _LEAST)
    rounded = exponents + _ROUNDER
    rest = exponents - (rounded - _ROUNDER)
    power = rest * _P5 + _P4
    power = power * rest + _P3
    power = power * rest + _P2
    power = power * rest + _P1
    power = power * rest + _P0
    shift = rounded.to(tl.int32, bitcast=True) << 23
    bits = power.to(tl.int32, bitcast=True) + shift + (SCALE_BITS << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def limit_of(total, top_p):
    """A token is kept if the weights before it are less than this."""
    limit = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    limit = tl.where(top_p >= 1.0, total, tl.maximum(limit, 1))
    return tl.minimum(limit, total)


@triton.jit
def target_of(number, total):
    """The token drawn is the first whose running sum exceeds this."""
    # The product may be rounded up to the total, or past it.
    return tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def number_of(seed, index):
    """`exact.uniform` of a pair."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64)) + (index.to(tl.uint64) + 1) * golden
    # 53 bits: the conversion is exact.
    return (_mix(state) >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
