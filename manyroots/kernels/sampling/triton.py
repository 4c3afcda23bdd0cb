"""Sampling in five launches, without a sort or a copy of the vocabulary.

Same signature as `reference.py`, and the same tokens. The vocabulary is cut into spans. In three
launches each span has a program; the other two have one program per row. Rows exit each launch as
soon as they have nothing to do in it. Logits are edited whenever they are read.

    tops      each span's best, and the best of each of its parts
    sum_up    a row's best: the token of greedy rows. For rows that keep the first k, or a top-p: a
              key that at least k tokens reach, since as many parts have one that does
    collect   tokens that reach that key, in a list; sums of weights by span
    finish    the draw, from the list or from the spans; the likeliest tokens, from a list
    rank      how many tokens are before the chosen one

If a list is too short for what a row keeps, or too long to hold, `triton_search` searches the whole
vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.sampling.exact import scale_bits
from manyroots.kernels.sampling.rows import (
    ALL_FORBIDDEN,
    MAX_TOP,
    NO_FAULT,
    NO_LOGPROBS,
    NOT_FINITE,
    ROW_FIELDS,
    TABLE_FIELDS,
    Sampled,
    SamplingRows,
)
from manyroots.kernels.sampling.triton_rows import (
    LEAST_KEY,
    NO_KEY,
    NOBODY,
    Asked,
    RowCuts,
    edit,
    edited_logits,
    edits_of,
    heat_of,
    id_at,
    key_at,
    key_of,
    limit_of,
    logit_of,
    number_of,
    own_logits,
    place_of,
    target_of,
    weight_of,
)
from manyroots.kernels.sampling.triton_search import narrow, next_place, search

SPAN = 2048
PROGRAMS = 512
"""For launches in which rows may have nothing to do: about as many programs as run at once, so that
early exits cost one wave. Each program has some spans of one row."""
SHORT_LIST, LONG_LIST = 256, 2048
"""Tokens that are read together: nearly always the first is enough for a top-k."""
MAX_PARTS = 2048
OPEN_SHARE = 0.4
"""If only top-p cuts, its list has the tokens that reach the best of this share of the parts."""
SEARCH_BLOCK = 2048

_ALL_FORBIDDEN, _NOT_FINITE = tl.constexpr(ALL_FORBIDDEN), tl.constexpr(NOT_FINITE)
_NO_FAULT, _NO_LOGPROBS = tl.constexpr(NO_FAULT), tl.constexpr(NO_LOGPROBS)
_TOP_IDS, _TOP_LOGPROBS = tl.constexpr(4), tl.constexpr(4 + MAX_TOP)
_LAST_PLACE, _FIRST_PLACE = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)


@triton.jit
def _is_cut(asked, row, vocab):
    top_k = tl.load(asked.top_k + row)
    is_cut = ((top_k > 0) & (top_k < vocab)) | (tl.load(asked.top_p + row) < 1.0)
    return is_cut & (tl.load(asked.temperature + row) > 0)


@triton.jit
def _cuts_of(asked, best, row, vocab, SCALE_BITS: tl.constexpr):
    """Parameters of a row that draws."""
    top_k = tl.load(asked.top_k + row)
    scale = tl.full((), 1 << SCALE_BITS, tl.int64).to(tl.float64)
    return RowCuts(
        tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab), tl.load(asked.top_p + row),
        tl.ceil(tl.load(asked.min_p + row) * scale).to(tl.int64),
        tl.load(best + row), heat_of(tl.load(asked.temperature + row)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _tops(
    logits, asked, span_best, span_best_at, span_own, span_exps, parts, stride, vocab, num_rows,
    NUM_SPANS: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = span * SPAN + tl.arange(0, SPAN)
    x = own_logits(logits + row * stride, i, vocab)
    at = row * NUM_SPANS + span
    place = at * (SPAN // PART) + tl.arange(0, SPAN // PART)
    highest = tl.max(x)
    # A NaN must win, so that it is detected: plain comparisons would skip it.
    is_nan = tl.max((x != x).to(tl.int32)) > 0
    tl.store(span_own + at, tl.where(is_nan, float("nan"), highest))
    num_top = tl.load(asked.num_top + row)
    if num_top != _NO_LOGPROBS:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        tl.store(span_exps + at, tl.sum(tl.exp(x - anchor)))
        if num_top > 0:
            own_parts = parts + num_rows * NUM_SPANS * (SPAN // PART)
            tl.store(own_parts + place, tl.max(tl.reshape(key_of(x), [SPAN // PART, PART]), axis=1))
    edits = edits_of(asked, row, vocab)
    if edits.has_any:
        x = edit(x, edits, i, vocab)
        highest = tl.max(x)
    tl.store(span_best + at, highest)
    tl.store(span_best_at + at, tl.min(tl.where(x == highest, i, vocab - 1)))
    if _is_cut(asked, row, vocab):
        tl.store(parts + place, tl.max(tl.reshape(key_of(x), [SPAN // PART, PART]), axis=1))


@triton.jit
def _reached_by(parts, count, NUM_PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """The largest key that `count` parts reach."""
    p = tl.arange(0, PARTS_PAD)
    tops = tl.load(parts + p, mask=p < NUM_PARTS, other=NO_KEY)
    key = tl.full((), NO_KEY, tl.int64)
    unit = tl.full((), 1 << 31, tl.int64)
    while unit > 0:
        higher = key + unit
        is_reached = tl.sum((tops.to(tl.int64) >= higher).to(tl.int32)) >= count
        key = tl.where(is_reached, higher, key)
        unit = unit // 2
    return key.to(tl.int32)


@triton.jit
def _begin_list(
    parts, threshold, length, count, least, vocab, NUM_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, PART: tl.constexpr, LONG_LIST: tl.constexpr,
):  # fmt: skip
    """The threshold of a list of at least `count` tokens; the lowest key if all fit."""
    key = tl.full((), least, tl.int32)
    begin = tl.full((), 0, tl.int32)
    if vocab > LONG_LIST:
        if count * PART > vocab:
            begin = tl.full((), LONG_LIST + 1, tl.int32)
            key = tl.full((), NOBODY, tl.int32)
        else:
            key = tl.maximum(_reached_by(parts, count, NUM_PARTS, PARTS_PAD), least)
    tl.store(threshold, key)
    tl.store(length, begin)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_up(
    asked, span_best, span_best_at, span_own, span_exps, parts, best, log_sum, thresholds, lengths,
    packed, vocab, num_rows, open_count,
    NUM_SPANS: tl.constexpr, SPANS_PAD: tl.constexpr, NUM_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, PART: tl.constexpr, LONG_LIST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.arange(0, SPANS_PAD)
    ok = s < NUM_SPANS
    owns = tl.load(span_own + row * NUM_SPANS + s, mask=ok, other=float("-inf"))
    is_nan = tl.max((owns != owns).to(tl.int32)) > 0
    own_highest = tl.max(tl.where(owns != owns, float("-inf"), owns))
    is_finite = (is_nan == 0) & (own_highest > float("-inf")) & (own_highest < float("inf"))
    if side == 0:
        tops = tl.load(span_best + row * NUM_SPANS + s, mask=ok, other=float("-inf"))
        highest = tl.max(tops)
        is_left = (highest > float("-inf")) & (highest < float("inf"))
        fault = tl.where(is_finite, tl.where(is_left, _NO_FAULT, _ALL_FORBIDDEN), _NOT_FINITE)
        which = tl.min(tl.where((tops == highest) & ok, s, NUM_SPANS - 1))
        tl.store(packed + row, tl.load(span_best_at + row * NUM_SPANS + which))
        tl.store(packed + num_rows + row, fault)
        tl.store(best + row, highest)
        if (fault == _NO_FAULT) & _is_cut(asked, row, vocab):
            top_k = tl.load(asked.top_k + row)
            count = tl.where((top_k > 0) & (top_k < vocab), top_k, open_count)
            # Tokens with weight zero can be left out.
            _begin_list(
                parts + row * NUM_PARTS, thresholds + row, lengths + row, count, LEAST_KEY + 1,
                vocab, NUM_PARTS, PARTS_PAD, PART, LONG_LIST,
            )  # fmt: skip
    else:
        num_top = tl.load(asked.num_top + row)
        if is_finite & (num_top != _NO_LOGPROBS):
            exps = tl.load(span_exps + row * NUM_SPANS + s, mask=ok, other=0.0)
            exps = tl.where(ok, exps * tl.exp(owns - own_highest), 0.0)
            tl.store(log_sum + row, own_highest + tl.log(tl.sum(exps)))
            if num_top > 0:
                at = num_rows + row
                _begin_list(
                    parts + at * NUM_PARTS, thresholds + at, lengths + at, num_top, LEAST_KEY,
                    vocab, NUM_PARTS, PARTS_PAD, PART, LONG_LIST,
                )  # fmt: skip


@triton.jit
def _add_to_list(x, i, threshold, length, places, vocab, LONG_LIST: tl.constexpr):
    """The tokens of a span that reach the threshold, in the order of ids: their start in the list,
    and their number."""
    keys = key_of(x)
    reaches = (keys >= tl.load(threshold)) & (i < vocab)
    count = tl.sum(reaches.to(tl.int32))
    begin = tl.full((), 0, tl.int32)
    if count > 0:
        begin = tl.atomic_add(length, count, sem="relaxed")
        at = begin - 1 + tl.cumsum(reaches.to(tl.int32), axis=0)
        tl.store(places + at, place_of(keys, i), mask=reaches & (at < LONG_LIST))
    return begin, count


@triton.jit(do_not_specialize=["num_rows"])
def _collect(
    logits, asked, best, thresholds, lengths, places, span_lists, span_sums, packed, stride, vocab,
    num_rows, NUM_SPANS: tl.constexpr, SPAN: tl.constexpr, SCALE_BITS: tl.constexpr,
    LONG_LIST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    mine = logits + row * stride
    is_good = tl.load(packed + num_rows + row) == _NO_FAULT
    if is_good & (tl.load(asked.temperature + row) > 0):
        cuts = _cuts_of(asked, best, row, vocab, SCALE_BITS)
        edits = edits_of(asked, row, vocab)
        is_cut = _is_cut(asked, row, vocab)
        for span in range(tl.program_id(0), NUM_SPANS, tl.num_programs(0)):
            i = span * SPAN + tl.arange(0, SPAN)
            at = row * NUM_SPANS + span
            x = edited_logits(mine, edits, i, vocab)
            if cuts.top_k >= vocab:
                weights = weight_of(x, cuts, SCALE_BITS)
                is_heavy = is_cut | (weights >= cuts.floor)
                tl.store(span_sums + at, tl.sum(tl.where(is_heavy, weights, 0)))
            if is_cut:
                begin, count = _add_to_list(
                    x, i, thresholds + row, lengths + row, places + row * LONG_LIST, vocab,
                    LONG_LIST,
                )  # fmt: skip
                tl.store(span_lists + at * 2, begin)
                tl.store(span_lists + at * 2 + 1, count)
    if is_good & (tl.load(asked.num_top + row) > 0):
        at = num_rows + row
        for span in range(tl.program_id(0), NUM_SPANS, tl.num_programs(0)):
            i = span * SPAN + tl.arange(0, SPAN)
            x = own_logits(mine, i, vocab)
            _add_to_list(
                x, i, thresholds + at, lengths + at, places + at * LONG_LIST, vocab, LONG_LIST
            )


@triton.jit
def _by_id(places, span_lists, length, NUM_SPANS: tl.constexpr, LIST: tl.constexpr):
    """A list in the order of ids: its spans one after the other, wherever each one starts."""
    j = tl.arange(0, LIST)
    end = tl.full((), 0, tl.int32)
    at = tl.full([LIST], 0, tl.int32)
    for span in range(NUM_SPANS):
        begin, count = tl.load(span_lists + span * 2), tl.load(span_lists + span * 2 + 1)
        at = tl.where((j >= end) & (j < end + count), begin + j - end, at)
        end += count
    return tl.load(places + at, mask=j < length, other=_LAST_PLACE)


@triton.jit
def _last_key(keys, amounts, need):
    """The largest key such that the amounts from it upwards are at least `need`, and the amounts
    above it."""
    last = tl.full((), NO_KEY, tl.int32)
    above = tl.full((), 0, tl.int64)
    unit = tl.full((), 1 << 30, tl.int32)
    while unit > 0:
        from_one = tl.sum(tl.where(keys >= last + unit, amounts, 0))
        from_two = tl.sum(tl.where(keys >= last + unit * 2, amounts, 0))
        from_three = tl.sum(tl.where(keys >= last + unit * 3, amounts, 0))
        last, above = narrow(last, above, unit, from_one, from_two, from_three, need)
        unit = unit // 4
    return last, above


@triton.jit
def _from_list(
    order, length, cuts, total, number, vocab, LIST: tl.constexpr, SCALE_BITS: tl.constexpr
):
    """The token of a row whose list, `order`, is in the order of ids; -1 if the row keeps tokens
    that are not in the list."""
    j = tl.arange(0, LIST)
    keys = key_at(order)
    weights = tl.where(j < length, weight_of(logit_of(keys), cuts, SCALE_BITS), 0)
    if cuts.top_k < vocab:
        last, above = _last_key(keys, (j < length).to(tl.int64), cuts.top_k)
        equals = tl.cumsum((keys == last).to(tl.int64), axis=0)
        is_kept = (keys > last) | ((keys == last) & (equals <= cuts.top_k - above))
        weights = tl.where(is_kept, weights, 0)
        total = tl.sum(weights)
    is_whole = True
    if cuts.top_p < 1.0:
        limit = limit_of(total, cuts.top_p)
        is_whole = tl.sum(weights) >= limit
        last, above = _last_key(keys, weights, limit)
        each = tl.maximum(weight_of(logit_of(last), cuts, SCALE_BITS), 1)
        equals = tl.cumsum((keys == last).to(tl.int64), axis=0)
        is_kept = (keys > last) | ((keys == last) & (equals * each < limit - above + each))
        weights = tl.where(is_kept, weights, 0)
    weights = tl.where(weights >= cuts.floor, weights, 0)
    target = target_of(number, tl.sum(weights))
    token = tl.min(tl.where(tl.cumsum(weights, axis=0) > target, id_at(order), NOBODY))
    return tl.where(is_whole, token, -1)


@triton.jit
def _from_spans(
    logits, edits, cuts, span_sums, number, vocab, NUM_SPANS: tl.constexpr,
    SPANS_PAD: tl.constexpr, SPAN: tl.constexpr, SCALE_BITS: tl.constexpr,
):  # fmt: skip
    """The token of a row that keeps all tokens, or all that are heavy enough."""
    s = tl.arange(0, SPANS_PAD)
    sums = tl.load(span_sums + s, mask=s < NUM_SPANS, other=0)
    target = target_of(number, tl.sum(sums))
    running = tl.cumsum(sums, axis=0)
    span = tl.sum((running <= target).to(tl.int32))
    before = tl.sum(tl.where(s < span, sums, 0))
    i = span * SPAN + tl.arange(0, SPAN)
    weights = weight_of(edited_logits(logits, edits, i, vocab), cuts, SCALE_BITS)
    weights = tl.where((i < vocab) & (weights >= cuts.floor), weights, 0)
    return tl.min(tl.where(before + tl.cumsum(weights, axis=0) > target, i, NOBODY))


@triton.jit
def _store_top(place, j, packed, log_sum, row, num_rows):
    at = j * num_rows + row
    tl.store(packed + _TOP_IDS * num_rows + at, id_at(place))
    logprob = logit_of(key_at(place)) - log_sum
    tl.store(packed + _TOP_LOGPROBS * num_rows + at, logprob.to(tl.int32, bitcast=True))


@triton.jit
def _store_tops(places, length, count, packed, log_sum, row, num_rows, LIST: tl.constexpr):
    j = tl.arange(0, LIST)
    left = tl.load(places + j, mask=j < length, other=_LAST_PLACE)
    for n in range(count):
        place = tl.max(left)
        _store_top(place, n, packed, log_sum, row, num_rows)
        left = tl.where(left == place, _LAST_PLACE, left)


@triton.jit(do_not_specialize=["num_rows"])
def _finish(
    logits, asked, best, log_sum, lengths, places, span_lists, span_sums, packed, stride, vocab,
    num_rows, NUM_SPANS: tl.constexpr, SPANS_PAD: tl.constexpr, SPAN: tl.constexpr,
    SCALE_BITS: tl.constexpr, KEY_STEP: tl.constexpr, SHORT_LIST: tl.constexpr,
    LONG_LIST: tl.constexpr, SEARCH_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_good = tl.load(packed + num_rows + row) == _NO_FAULT
    num_top = tl.load(asked.num_top + row)
    mine = logits + row * stride
    if is_good & (side == 0):
        edits = edits_of(asked, row, vocab)
        token = tl.load(packed + row)
        if tl.load(asked.temperature + row) > 0:
            cuts = _cuts_of(asked, best, row, vocab, SCALE_BITS)
            number = number_of(tl.load(asked.seeds + row), tl.load(asked.indices + row))
            sums = span_sums + row * NUM_SPANS
            if _is_cut(asked, row, vocab):
                length = tl.load(lengths + row)
                listed = places + row * LONG_LIST
                s = tl.arange(0, SPANS_PAD)
                total = tl.full((), 0, tl.int64)
                if cuts.top_k >= vocab:
                    total = tl.sum(tl.load(sums + s, mask=s < NUM_SPANS, other=0))
                token = tl.full((), -1, tl.int32)
                lists = span_lists + row * NUM_SPANS * 2
                if length <= SHORT_LIST:
                    order = _by_id(listed, lists, length, NUM_SPANS, SHORT_LIST)
                    token = _from_list(
                        order, length, cuts, total, number, vocab, SHORT_LIST, SCALE_BITS
                    )
                elif length <= LONG_LIST:
                    order = _by_id(listed, lists, length, NUM_SPANS, LONG_LIST)
                    token = _from_list(
                        order, length, cuts, total, number, vocab, LONG_LIST, SCALE_BITS
                    )
                if token < 0:
                    # Half-precision logits differ in their upper halves; edited ones may not.
                    step = tl.where(edits.has_any, 1, KEY_STEP)
                    token = search(
                        mine, edits, cuts, total, number, vocab, step, SCALE_BITS, SEARCH_BLOCK
                    )
            else:
                token = _from_spans(
                    mine, edits, cuts, sums, number, vocab, NUM_SPANS, SPANS_PAD, SPAN, SCALE_BITS
                )
            tl.store(packed + row, token)
        if edits.has_penalties:
            tl.store(edits.counts + token, tl.load(edits.counts + token) + 1)
        if num_top != _NO_LOGPROBS:
            logprob = tl.load(mine + token).to(tl.float32) - tl.load(log_sum + row)
            tl.store(packed + 2 * num_rows + row, logprob.to(tl.int32, bitcast=True))
            tl.store(packed + 3 * num_rows + row, 1)
    if is_good & (side == 1) & (num_top > 0):
        at = num_rows + row
        length = tl.load(lengths + at)
        count = tl.minimum(num_top, vocab)
        total = tl.load(log_sum + row)
        if length <= SHORT_LIST:
            _store_tops(
                places + at * LONG_LIST, length, count, packed, total, row, num_rows, SHORT_LIST
            )
        elif length <= LONG_LIST:
            _store_tops(
                places + at * LONG_LIST, length, count, packed, total, row, num_rows, LONG_LIST
            )
        else:
            place = tl.full((), _FIRST_PLACE, tl.int64)
            for n in range(count):
                place = next_place(mine, place, vocab, SEARCH_BLOCK)
                _store_top(place, n, packed, total, row, num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _rank(
    logits, asked, packed, stride, vocab, num_rows,
    NUM_SPANS: tl.constexpr, SPAN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    is_good = tl.load(packed + num_rows + row) == _NO_FAULT
    if is_good & (tl.load(asked.num_top + row) != _NO_LOGPROBS):
        mine = logits + row * stride
        token = tl.load(packed + row)
        key = key_of(tl.load(mine + token).to(tl.float32))
        count = tl.full((), 0, tl.int32)
        for span in range(tl.program_id(0), NUM_SPANS, tl.num_programs(0)):
            i = span * SPAN + tl.arange(0, SPAN)
            keys = key_of(own_logits(mine, i, vocab))
            is_before = (keys > key) | ((keys == key) & (i < token))
            count += tl.sum((is_before & (i < vocab)).to(tl.int32))
        if count > 0:
            tl.atomic_add(packed + 3 * num_rows + row, count, sem="relaxed")


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """A token for each row of [rows, vocabulary], and logprobs for rows that request them. Counts
    the token of rows that have penalties."""
    num_rows, vocab = logits.shape
    device, stride = logits.device, logits.stride(0)
    asked = Asked(
        *(getattr(rows, name) for name in ROW_FIELDS),
        *(getattr(rows.tables, name) for name in TABLE_FIELDS),
    )
    part = _part_size(vocab)
    span = max(SPAN, part)
    num_spans = triton.cdiv(vocab, span)
    num_parts = num_spans * (span // part)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    span_best, span_own, span_exps = empty(3, num_rows, num_spans, dtype=torch.float32)
    span_best_at = empty(num_rows, num_spans, dtype=torch.int32)
    span_sums = empty(num_rows, num_spans, dtype=torch.int64)
    span_lists = empty(num_rows, num_spans, 2, dtype=torch.int32)
    parts = empty(2, num_rows, num_parts, dtype=torch.int32)
    best, log_sum = empty(2, num_rows, dtype=torch.float32)
    thresholds, lengths = empty(2, 2, num_rows, dtype=torch.int32)
    places = empty(2, num_rows, LONG_LIST, dtype=torch.int64)
    sampled = Sampled.empty(num_rows, device)
    packed = sampled.packed
    # Fused multiply-adds would change the last bits of weights.
    options = {**launch_options(device), "enable_fp_fusion": False}
    sizes = {"NUM_SPANS": num_spans, "SPANS_PAD": triton.next_power_of_2(num_spans)}
    bits = scale_bits(vocab)
    _tops[(num_spans, num_rows)](
        logits, asked, span_best, span_best_at, span_own, span_exps, parts, stride, vocab,
        num_rows, NUM_SPANS=num_spans, SPAN=span, PART=part, num_warps=8, **options,
    )  # fmt: skip
    _sum_up[(num_rows, 2)](
        asked, span_best, span_best_at, span_own, span_exps, parts, best, log_sum, thresholds,
        lengths, packed, vocab, num_rows, max(1, int(OPEN_SHARE * vocab / part)), **sizes,
        NUM_PARTS=num_parts, PARTS_PAD=triton.next_power_of_2(num_parts), PART=part,
        LONG_LIST=LONG_LIST, **options,
    )  # fmt: skip
    some = min(num_spans, triton.cdiv(PROGRAMS, num_rows))
    _collect[(some, num_rows)](
        logits, asked, best, thresholds, lengths, places, span_lists, span_sums, packed, stride,
        vocab, num_rows, NUM_SPANS=num_spans, SPAN=span, SCALE_BITS=bits, LONG_LIST=LONG_LIST,
        num_warps=8, **options,
    )  # fmt: skip
    _finish[(num_rows, 2)](
        logits, asked, best, log_sum, lengths, places, span_lists, span_sums, packed, stride, vocab,
        num_rows, **sizes, SPAN=span, SCALE_BITS=bits,
        KEY_STEP=65536 if logits.dtype is torch.bfloat16 else 1, SHORT_LIST=SHORT_LIST,
        LONG_LIST=LONG_LIST, SEARCH_BLOCK=SEARCH_BLOCK, num_warps=8, **options,
    )  # fmt: skip
    _rank[(some, num_rows)](
        logits, asked, packed, stride, vocab, num_rows, NUM_SPANS=num_spans, SPAN=span,
        num_warps=8, **options,
    )  # fmt: skip
    return sampled


def _part_size(vocab: int) -> int:
    """Small enough that most tokens of a long list are in separate parts."""
    size: int = triton.next_power_of_2(triton.cdiv(vocab, MAX_PARTS))
    return max(16, size)
