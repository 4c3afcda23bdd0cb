"""Hyper-connections in Triton. Same signatures as `reference.py`.

A first kernel multiplies a token's streams by the weights, in slices of the streams, and adds up
their squares. A second one adds up the slices, makes the mixing matrix, which stays in registers,
and reads the streams. Both compute in float32: tf32x3 is three products of tensor cores, whose sum
has float32's precision.

Of many tokens, streams are numbers of 16 bits. Then weights are divided into three such numbers,
whose products have float32's precision, too, and streams need no conversion. The second kernel
takes a block of tokens and makes only the matrix and the shares; a third one reads the streams and
normalises what it read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights, ReadNorm
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import as_splits, launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.norm.triton import rms_norm

LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""
INNER, INNER_OF_MANY = 128, 64
"""Numbers of a stream in one iteration of a product; fewer of many tokens."""
PROGRAMS = 528
"""Of a product: four for each multiprocessor."""
WIDTH = 1024
"""Numbers of each stream that a program reads or writes."""
MANY = 512
"""Tokens from which on the weights are divided."""
TOKENS_OF_MANY, INNER_OF_PARTS, PARTS_STAGES, PARTS_PROGRAMS = 64, 64, 4, 512
"""Of a program that multiplies by divided weights; and how many of them."""
TOKENS_AT_ONCE = 16
"""Tokens whose matrices a program makes."""
WIDTH_OF_MANY, NUMBERS_OF_WARP = 1024, 256


@triton.jit
def _numbers(
    streams, product, out, num_tokens, per_slice, size,
    COUNT: tl.constexpr, COUNT_POW: tl.constexpr, BLOCK_T: tl.constexpr, INNER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A slice's part of each product, then of the sum of squares."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    part = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.arange(0, COUNT_POW)
    acc = tl.zeros((BLOCK_T, COUNT_POW), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    ok = (t < num_tokens)[:, None]
    row = streams + t.to(tl.int64) * size
    last = tl.minimum(size, (part + 1) * per_slice)
    for begin in range(part * per_slice, last, INNER):
        k = begin + tl.arange(0, INNER)
        is_number = (k < last)[None, :]
        x = tl.load(row[:, None] + k[None, :], mask=ok & is_number, other=0.0).to(tl.float32)
        at = product + n[:, None] * size + k[None, :]
        w = tl.load(at, mask=(n < COUNT)[:, None] & is_number, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")
        squares += tl.sum(x * x, axis=1)
    to = out + (part * num_tokens + t) * (COUNT + 1)
    tl.store(to[:, None] + n[None, :], acc, mask=ok & (n < COUNT)[None, :])
    tl.store(to + COUNT, squares, mask=t < num_tokens)


@triton.jit
def _numbers_by_parts(
    streams, product, out, num_tokens, per_slice, size,
    COUNT: tl.constexpr, COUNT_POW: tl.constexpr, BLOCK_T: tl.constexpr, INNER: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The same with weights that are sums of three numbers of the streams' dtype."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    part = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.arange(0, COUNT_POW)
    acc = tl.zeros((BLOCK_T, COUNT_POW), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    ok = (t < num_tokens)[:, None]
    row = streams + t.to(tl.int64) * size
    last = tl.minimum(size, (part + 1) * per_slice)
    for begin in tl.range(part * per_slice, last, INNER, num_stages=STAGES):
        k = begin + tl.arange(0, INNER)
        is_number = (k < last)[None, :]
        x = tl.load(row[:, None] + k[None, :], mask=ok & is_number, other=0.0)
        at = product + n[:, None] * size + k[None, :]
        w = tl.load(at, mask=(n < COUNT)[:, None] & is_number, other=0.0)
        for _ in tl.static_range(3):
            own = w.to(x.dtype)
            acc = tl.dot(x, tl.trans(own), acc, input_precision="ieee")
            w -= own.to(tl.float32)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    to = out + (part * num_tokens + t) * (COUNT + 1)
    tl.store(to[:, None] + n[None, :], acc, mask=ok & (n < COUNT)[None, :])
    tl.store(to + COUNT, squares, mask=t < num_tokens)


@triton.jit
def _shares(
    numbers, scale, base, shares, post, mix, num_tokens, num_slices, norm_eps, eps,
    STREAMS: tl.constexpr, POW: tl.constexpr, HIDDEN: tl.constexpr, COUNT: tl.constexpr,
    ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What tokens read of each stream, and how they write and mix them."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = t < num_tokens
    i = tl.arange(0, POW)
    is_stream = i < STREAMS
    n = 2 * STREAMS + i[:, None] * STREAMS + i[None, :]
    is_there = is_stream[:, None] & is_stream[None, :]
    of_token = is_token[:, None] & is_stream[None, :]
    of_matrix = is_token[:, None, None] & is_there[None, :, :]
    squares = tl.zeros((BLOCK_T,), tl.float32)
    pre = tl.zeros((BLOCK_T, POW), tl.float32)
    given = tl.zeros((BLOCK_T, POW), tl.float32)
    matrix = tl.zeros((BLOCK_T, POW, POW), tl.float32)
    for part in range(num_slices):
        own = numbers + (part * num_tokens + t) * (COUNT + 1)
        squares += tl.load(own + COUNT, mask=is_token, other=0.0)
        pre += tl.load(own[:, None] + i[None, :], mask=of_token, other=0.0)
        given += tl.load(own[:, None] + (STREAMS + i)[None, :], mask=of_token, other=0.0)
        matrix += tl.load(own[:, None, None] + n[None, :, :], mask=of_matrix, other=0.0)
    factor = tl.rsqrt(squares / (STREAMS * HIDDEN) + norm_eps)
    pre = pre * (factor * tl.load(scale))[:, None]
    pre += tl.load(base + i, mask=is_stream, other=0.0)[None, :]
    at = t[:, None].to(tl.int64) * STREAMS + i[None, :]
    tl.store(shares + at, 1.0 / (1.0 + tl.exp(-pre)) + eps, mask=of_token)
    given = given * (factor * tl.load(scale + 1))[:, None]
    given += tl.load(base + STREAMS + i, mask=is_stream, other=0.0)[None, :]
    tl.store(post + at, 2.0 / (1.0 + tl.exp(-given)), mask=of_token)
    matrix = matrix * (factor * tl.load(scale + 2))[:, None, None]
    matrix += tl.load(base + n, mask=is_there, other=0.0)[None, :, :]
    matrix = tl.where(is_there[None, :, :], matrix, float("-inf"))
    # Of rows that are only padding the largest is no number to subtract.
    largest = tl.where(is_stream[None, :], tl.max(matrix, axis=2), 0.0)
    matrix = tl.exp(matrix - largest[:, :, None])
    whole = tl.where(is_stream[None, :], tl.sum(matrix, axis=2), 1.0)
    matrix = tl.where(is_there[None, :, :], matrix / whole[:, :, None] + eps, 0.0)
    by_column = tl.where(is_stream[None, :], tl.sum(matrix, axis=1), 1.0) + eps
    matrix = matrix / by_column[:, None, :]
    for _ in range(ITERATIONS - 1):
        by_row = tl.where(is_stream[None, :], tl.sum(matrix, axis=2), 1.0) + eps
        matrix = matrix / by_row[:, :, None]
        by_column = tl.where(is_stream[None, :], tl.sum(matrix, axis=1), 1.0) + eps
        matrix = matrix / by_column[:, None, :]
    to = t[:, None, None].to(tl.int64) * (STREAMS * STREAMS)
    to += i[None, :, None] * STREAMS + i[None, None, :]
    tl.store(mix + to, matrix, mask=of_matrix)


@triton.jit
def _join(
    streams, shares, weight, rows, eps,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A piece of a row; the whole row where it is normalised."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.zeros((WIDTH,), tl.float32)
    for stream in tl.static_range(STREAMS):
        share = tl.load(shares + token * STREAMS + stream)
        at = streams + (token * STREAMS + stream) * HIDDEN + d
        row += share * tl.load(at, mask=d < HIDDEN, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.load(weight + d, mask=d < HIDDEN, other=0.0).to(tl.float32)
        row = row * tl.rsqrt(tl.sum(row * row) / HIDDEN + eps) * scale
    tl.store(rows + token * HIDDEN + d, row.to(rows.dtype.element_ty), mask=d < HIDDEN)


@triton.jit
def _read(
    streams, numbers, scale, base, rows, post, mix, num_tokens, num_slices, norm_eps, eps,
    STREAMS: tl.constexpr, POW: tl.constexpr, HIDDEN: tl.constexpr, COUNT: tl.constexpr,
    SLICES_POW: tl.constexpr, ITERATIONS: tl.constexpr, WIDTH: tl.constexpr,
    IS_END: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES_POW)
    is_slice = part < num_slices
    # All slices at once: one after the other, each would wait for memory.
    own = numbers + (part * num_tokens + token) * (COUNT + 1)
    squares = tl.sum(tl.load(own + COUNT, mask=is_slice, other=0.0), axis=0)
    factor = tl.rsqrt(squares / (STREAMS * HIDDEN) + norm_eps)
    i = tl.arange(0, POW)
    is_stream = i < STREAMS
    seen = is_slice[:, None] & is_stream[None, :]
    pre = tl.sum(tl.load(own[:, None] + i[None, :], mask=seen, other=0.0), axis=0)
    pre = pre * factor * tl.load(scale) + tl.load(base + i, mask=is_stream, other=0.0)
    shares = 1.0 / (1.0 + tl.exp(-pre)) + eps
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.zeros((WIDTH,), tl.float32)
    for stream in tl.static_range(STREAMS):
        share = tl.sum(tl.where(i == stream, shares, 0.0), axis=0)
        at = streams + (token * STREAMS + stream) * HIDDEN + d
        row += share * tl.load(at, mask=d < HIDDEN, other=0.0).to(tl.float32)
    tl.store(rows + token * HIDDEN + d, row.to(rows.dtype.element_ty), mask=d < HIDDEN)
    if not IS_END:
        if tl.program_id(1) == 0:
            given = tl.load(own[:, None] + (STREAMS + i)[None, :], mask=seen, other=0.0)
            given = tl.sum(given, axis=0) * factor * tl.load(scale + 1)
            given += tl.load(base + STREAMS + i, mask=is_stream, other=0.0)
            tl.store(post + token * STREAMS + i, 2.0 / (1.0 + tl.exp(-given)), mask=is_stream)
            n = 2 * STREAMS + i[:, None] * STREAMS + i[None, :]
            is_there = is_stream[:, None] & is_stream[None, :]
            in_slices = is_slice[:, None, None] & is_there[None, :, :]
            parts = tl.load(own[:, None, None] + n[None, :, :], mask=in_slices, other=0.0)
            matrix = tl.sum(parts, axis=0) * factor * tl.load(scale + 2)
            matrix += tl.load(base + n, mask=is_there, other=0.0)
            matrix = tl.where(is_there, matrix, float("-inf"))
            # Of rows that are only padding the largest is no number to subtract.
            largest = tl.where(is_stream, tl.max(matrix, axis=1), 0.0)
            matrix = tl.exp(matrix - largest[:, None])
            whole = tl.where(is_stream, tl.sum(matrix, axis=1), 1.0)
            matrix = tl.where(is_there, matrix / whole[:, None] + eps, 0.0)
            for turn in range(2 * ITERATIONS - 1):
                if turn % 2 == 0:
                    by_column = tl.where(is_stream, tl.sum(matrix, axis=0), 1.0) + eps
                    matrix = matrix / by_column[None, :]
                else:
                    by_row = tl.where(is_stream, tl.sum(matrix, axis=1), 1.0) + eps
                    matrix = matrix / by_row[:, None]
            to = mix + (token * STREAMS + i[:, None]) * STREAMS + i[None, :]
            tl.store(to, matrix, mask=is_there)


@triton.jit
def _write(
    streams, output, also, post, mix, out, output_split, output_row, also_split, also_row,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, NUM_SPLITS: tl.constexpr, ALSO: tl.constexpr,
    WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ok = d < HIDDEN
    own = tl.zeros((WIDTH,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        at = output + split * output_split + token * output_row + d
        own += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(ALSO):
        at = also + split * also_split + token * also_row + d
        own += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    for to in tl.static_range(STREAMS):
        row = own * tl.load(post + token * STREAMS + to)
        for stream in tl.static_range(STREAMS):
            at = streams + (token * STREAMS + stream) * HIDDEN + d
            share = tl.load(mix + (token * STREAMS + stream) * STREAMS + to)
            row += share * tl.load(at, mask=ok, other=0.0).to(tl.float32)
        at = out + (token * STREAMS + to) * HIDDEN + d
        tl.store(at, row.to(out.dtype.element_ty), mask=ok)


def read_streams(streams: Tensor, weights: HyperWeights, norm: ReadNorm | None = None) -> HyperRead:
    """What a half of a layer reads of streams [tokens, n, hidden], normalised if it has a norm."""
    tokens, count, _ = streams.shape
    device = streams.device
    if tokens >= MANY and streams.element_size() == 2:
        return _read_many(streams, weights, norm)
    post = torch.empty(tokens, count, dtype=torch.float32, device=device)
    mix = torch.empty(tokens, count, count, dtype=torch.float32, device=device)
    rows = _read_of(streams, weights, post, mix)
    if norm is not None:
        rows = rms_norm(rows, norm.weight, norm.eps)
    return HyperRead(rows, post, mix)


def join_streams(streams: Tensor, weights: HyperWeights) -> Tensor:
    """[tokens, hidden]: what the model's last norm reads."""
    return _read_of(streams, weights, None, None)


def _read_of(
    streams: Tensor, weights: HyperWeights, post: Tensor | None, mix: Tensor | None
) -> Tensor:
    tokens, count, hidden = streams.shape
    device, size = streams.device, count * hidden
    num_numbers = len(weights.base)
    block = min(64, padded(tokens, LEAST))
    blocks = -(-tokens // block)
    inner = INNER if block == LEAST else INNER_OF_MANY
    most = -(-size // inner)
    per_slice = -(-size // max(1, min(most, PROGRAMS // blocks)))
    per_slice = -(-per_slice // inner) * inner
    slices = -(-size // per_slice)
    numbers = torch.empty(slices, tokens, num_numbers + 1, dtype=torch.float32, device=device)
    _numbers[(slices, blocks)](
        streams, weights.product, numbers, tokens, per_slice, size, COUNT=num_numbers,
        COUNT_POW=padded(num_numbers, LEAST), BLOCK_T=block, INNER=inner, num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    rows = torch.empty(tokens, hidden, dtype=streams.dtype, device=device)
    width = min(WIDTH, padded(hidden))
    _read[(tokens, -(-hidden // width))](
        streams, numbers, weights.scale, weights.base, rows, rows if post is None else post,
        rows if mix is None else mix, tokens, slices, weights.norm_eps, weights.eps, STREAMS=count,
        POW=padded(count), HIDDEN=hidden, COUNT=num_numbers, SLICES_POW=padded(slices),
        ITERATIONS=weights.num_iterations, WIDTH=width, IS_END=mix is None, num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return rows


def _read_many(streams: Tensor, weights: HyperWeights, norm: ReadNorm | None) -> HyperRead:
    tokens, count, hidden = streams.shape
    device, size, options = streams.device, count * hidden, launch_options(streams.device)
    num_numbers = len(weights.base)
    blocks = -(-tokens // TOKENS_OF_MANY)
    slices = max(1, min(-(-size // INNER_OF_PARTS), PARTS_PROGRAMS // blocks))
    per_slice = -(-size // slices // INNER_OF_PARTS) * INNER_OF_PARTS
    slices = -(-size // per_slice)
    numbers = torch.empty(slices, tokens, num_numbers + 1, dtype=torch.float32, device=device)
    _numbers_by_parts[(slices, blocks)](
        streams, weights.product, numbers, tokens, per_slice, size, COUNT=num_numbers,
        COUNT_POW=padded(num_numbers, LEAST), BLOCK_T=TOKENS_OF_MANY, INNER=INNER_OF_PARTS,
        STAGES=PARTS_STAGES, num_warps=4, **options,
    )  # fmt: skip
    shares, post = torch.empty(2, tokens, count, dtype=torch.float32, device=device)
    mix = torch.empty(tokens, count, count, dtype=torch.float32, device=device)
    _shares[(-(-tokens // TOKENS_AT_ONCE),)](
        numbers, weights.scale, weights.base, shares, post, mix, tokens, slices, weights.norm_eps,
        weights.eps, STREAMS=count, POW=padded(count), HIDDEN=hidden, COUNT=num_numbers,
        ITERATIONS=weights.num_iterations, BLOCK_T=TOKENS_AT_ONCE, num_warps=2, **options,
    )  # fmt: skip
    rows = torch.empty(tokens, hidden, dtype=streams.dtype, device=device)
    width = min(WIDTH_OF_MANY, padded(hidden)) if norm is None else padded(hidden)
    _join[(tokens, -(-hidden // width))](
        streams, shares, shares if norm is None else norm.weight, rows,
        0.0 if norm is None else norm.eps, STREAMS=count, HIDDEN=hidden, WIDTH=width,
        NORMED=norm is not None, num_warps=max(1, min(16, width // NUMBERS_OF_WARP)), **options,
    )  # fmt: skip
    return HyperRead(rows, post, mix)


def write_streams(
    streams: Tensor, output: Tensor, read: HyperRead, also: Tensor | None = None
) -> Tensor:
    """The streams after a half of a layer gave `output` [tokens, hidden], or partial sums [splits,
    tokens, hidden], and `also` likewise."""
    tokens, count, hidden = streams.shape
    out = torch.empty(tokens, count, hidden, dtype=streams.dtype, device=streams.device)
    width = min(WIDTH, padded(hidden))
    parts = as_splits(output)
    others = parts if also is None else as_splits(also)
    assert parts.stride(2) == others.stride(2) == 1
    _write[(tokens, -(-hidden // width))](
        streams, parts, others, read.post, read.mix, out, *parts.stride()[:2],
        *others.stride()[:2], STREAMS=count, HIDDEN=hidden, NUM_SPLITS=len(parts),
        ALSO=0 if also is None else len(others), WIDTH=width, num_warps=4,
        **launch_options(streams.device),
    )  # fmt: skip
    return out
