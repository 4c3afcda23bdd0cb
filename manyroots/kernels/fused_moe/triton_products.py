"""The experts' two products: their tiles, and both products in one launch.

The second product's programs come after the first's, and each waits only for its own expert. Except
for the last few experts, that was finished long before, so memory stays busy throughout. Programs
of adapters come before each product, one for a pair. A program waits only for earlier programs, and
programs start in order. The first program that is not done therefore waits for none, so there is no
deadlock.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.activation.triton_kinds import activated
from manyroots.kernels.fused_moe.triton_adapters import deltas, down_pair, up_pair
from manyroots.kernels.fused_moe.triton_fp4 import (
    FOUR_BITS,
    fp4_numbers,
    fp4_words,
    whole_sums,
)
from manyroots.kernels.gemm.triton_words import times_words
from manyroots.kernels.launch import let_next_begin, wait_for_count, wait_for_inputs


@triton.jit
def group_at(groups, group):
    """A group's expert, and the start and end of its pairs."""
    at = groups + 3 * group
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def add_product(
    acc, weight, rows, scales, at,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Add a tile of a weight times rows to `acc`. With SCALED the weight is in FP8, in words of
    four. `scales` then points to each row's scales, one per SCALED columns; with 1, one scale for
    the row is applied at the end. With FOUR_BITS the weight is in MXFP4, and `scales` are
    exponents."""
    if SCALED == FOUR_BITS:
        exponents = tl.load(scales + at // BLOCK_K)
        numbers = fp4_numbers(weight, exponents, rows.dtype, BLOCK_N, FAST)
        acc = tl.dot(numbers, tl.trans(rows), acc, input_precision="ieee")
    elif SCALED > 1:
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        part = times_words(weight, rows, part, BLOCK_M, BLOCK_K, FAST)
        acc += part * tl.load(scales + at // SCALED)[:, None]
    elif SCALED == 1:
        acc = times_words(weight, rows, acc, BLOCK_M, BLOCK_K, FAST)
    else:
        acc = tl.dot(weight, tl.trans(rows), acc, input_precision="ieee")
    return acc


@triton.jit
def _words_at(weight, row, k_size, BLOCK_K: tl.constexpr, SCALED: tl.constexpr):
    """Address of the first tile of a weight's rows."""
    if SCALED == FOUR_BITS:
        at = fp4_words(weight, row, k_size)
    else:
        word: tl.constexpr = 4 if SCALED else 1
        k = tl.arange(0, BLOCK_K // word)
        at = weight + row[:, None] * (k_size // word) + k[None, :]
    return at


@triton.jit
def _tile_at(
    words, at, k_size, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """The tile from column `at` on; columns past the end of a row are zero."""
    if SCALED == FOUR_BITS:  # it has zeros there
        tile = tl.load(words + at // 8, eviction_policy="evict_first")
    else:
        word: tl.constexpr = 4 if SCALED else 1
        if EVEN_K:
            tile = tl.load(words + at // word, eviction_policy="evict_first")
        else:
            k = at + word * tl.arange(0, BLOCK_K // word)
            inside = (k < k_size)[None, :]
            tile = tl.load(
                words + at // word, mask=inside, other=0, eviction_policy="evict_first"
            )  # fmt: skip
    return tile


@triton.jit
def gate_and_up(
    x, gate_up, scales, num_groups, bias, expert, row, is_pair, n, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gates and ups at `n` of an expert's pairs, whose rows of x are `row`: [n, pairs] each."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * k_size + k[None, :]
    first = expert * 2 * n_size + tl.minimum(n, n_size - 1)
    gate_at = _words_at(gate_up, first, k_size, BLOCK_K, SCALED)
    up_at = _words_at(gate_up, first + n_size, k_size, BLOCK_K, SCALED)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(0, k_size, BLOCK_K):
        gates = _tile_at(gate_at, at, k_size, BLOCK_K, EVEN_K, SCALED)
        ups = _tile_at(up_at, at, k_size, BLOCK_K, EVEN_K, SCALED)
        if EVEN_K:
            xs = tl.load(x_at + at, mask=is_pair[:, None], other=0.0)
        else:
            inside = (at + k < k_size)[None, :]
            xs = tl.load(x_at + at, mask=is_pair[:, None] & inside, other=0.0)
        gate = add_product(
            gate, gates, xs, scales + first * num_groups, at, BLOCK_M, BLOCK_N, BLOCK_K, SCALED,
            FAST,
        )  # fmt: skip
        up = add_product(
            up, ups, xs, scales + (first + n_size) * num_groups, at, BLOCK_M, BLOCK_N, BLOCK_K,
            SCALED, FAST,
        )  # fmt: skip
    if SCALED == FOUR_BITS:
        gate = whole_sums(gate, x.dtype.element_ty, FAST)
        up = whole_sums(up, x.dtype.element_ty, FAST)
    if SCALED == 1:
        gate *= tl.load(scales + first)[:, None]
        up *= tl.load(scales + first + n_size)[:, None]
    if HAS_BIAS:
        gate += tl.load(bias + first).to(tl.float32)[:, None]
        up += tl.load(bias + first + n_size).to(tl.float32)[:, None]
    return gate, up


@triton.jit
def down_product(
    hidden, down, scales, num_groups, bias, expert, pair, is_pair, n, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows `n` of an expert's down times its pairs' activations: [n, pairs]."""
    k = tl.arange(0, BLOCK_K)
    row = expert * n_size + tl.minimum(n, n_size - 1)
    w_at = _words_at(down, row, k_size, BLOCK_K, SCALED)
    h_at = hidden + pair[:, None] * k_size + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(0, k_size, BLOCK_K):
        weight = _tile_at(w_at, at, k_size, BLOCK_K, EVEN_K, SCALED)
        # Load activations past the first-level cache, which does not see other programs' writes.
        if EVEN_K:
            hs = tl.load(h_at + at, mask=is_pair[:, None], other=0.0, cache_modifier=".cg")
        else:
            inside = (at + k < k_size)[None, :]
            hs = tl.load(h_at + at, mask=is_pair[:, None] & inside, other=0.0, cache_modifier=".cg")
        acc = add_product(
            acc, weight, hs, scales + row * num_groups, at, BLOCK_M, BLOCK_N, BLOCK_K, SCALED, FAST
        )  # fmt: skip
    if SCALED == FOUR_BITS:
        acc = whole_sums(acc, hidden.dtype.element_ty, FAST)
    if SCALED == 1:
        acc *= tl.load(scales + row)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    return acc


@triton.jit
def _pair_at(groups, index, num_groups, GROUPS_POW: tl.constexpr):
    """The group of the pair that is `index`-th in the order of groups, and its place in the lists.
    The group is too large if there are fewer pairs."""
    g = tl.arange(0, GROUPS_POW)
    begin = tl.load(groups + 3 * g + 1, mask=g < num_groups, other=0)
    end = tl.load(groups + 3 * g + 2, mask=g < num_groups, other=0)
    before = tl.cumsum(end - begin, axis=0)
    group = tl.sum((before <= index).to(tl.int32), axis=0)
    return group, index + tl.sum(tl.where(g == group, end - before, 0), axis=0)


@triton.jit
def _count_passed(added, passed, count):
    """Count a program that waits for adapters no more; the last one clears the counters."""
    if tl.atomic_add(passed, 1, sem="relaxed") == count - 1:
        tl.store(added, 0)
        tl.store(passed, 0)


@triton.jit(do_not_specialize=["num_first", "num_tokens"])
def both_products(
    x, gate_up, up_scales, up_groups, down, down_scales, down_groups, up_bias, down_bias, pairs,
    groups, weights, inner, out, done, shared_up, shared_down, shared_inner, slots, experts, pool,
    up_delta, down_delta, up_table, up_scalings, down_table, down_scalings, shared_up_table,
    shared_up_scalings, shared_down_table, shared_down_scalings, num_tokens, num_first, n_size,
    hidden_size, shared_size,
    UP_SCALED: tl.constexpr, DOWN_SCALED: tl.constexpr, KIND: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr,
    EVEN_UP: tl.constexpr, EVEN_DOWN: tl.constexpr, TOP_K: tl.constexpr, UP_TILES: tl.constexpr,
    DOWN_TILES: tl.constexpr, BLOCK_M: tl.constexpr, UP_N: tl.constexpr, UP_K: tl.constexpr,
    DOWN_N: tl.constexpr, DOWN_K: tl.constexpr, SHARED_TILES: tl.constexpr,
    EVEN_SHARED: tl.constexpr, HAS_ADAPTERS: tl.constexpr, GROUPS_POW: tl.constexpr,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(activation(gate, up)) of each pair, stored by pair. The first `num_first`
    programs compute the first product. `done` counts each group's finished tiles and is zero again
    at the end. With SHARED_TILES, as many programs come before either product, for a block that
    every token goes through; its output is the last term of a token.

    With HAS_ADAPTERS, further programs come before each product, and store what adapters add."""
    let_next_begin(DEPENDENT)
    tile = tl.program_id(0)
    terms: tl.constexpr = TOP_K + 1 if SHARED_TILES else TOP_K
    of_shared = done + num_first // UP_TILES
    if HAS_ADAPTERS:
        added, passed = of_shared + 1, of_shared + 2
        num_pairs = num_tokens * TOP_K
        num_rows = num_pairs + num_tokens if SHARED_TILES else num_pairs
        # The rows of a shared block come after the pairs.
        of_up = up_delta + num_pairs.to(tl.int64) * 2 * n_size
        of_down = down_delta + num_pairs.to(tl.int64) * hidden_size
        if tile < 2 * num_rows:
            if tile < 2 * num_pairs:
                up_pair(
                    x, up_delta, slots, experts, pool, up_table, up_scalings, tile % 2,
                    tile // 2, TOP_K, n_size, hidden_size, False, COLUMNS, DEPENDENT,
                )  # fmt: skip
            elif SHARED_TILES:
                up_pair(
                    x, of_up, slots, experts, pool, shared_up_table, shared_up_scalings, tile % 2,
                    tile // 2 - num_pairs, 1, shared_size, hidden_size, True, COLUMNS, DEPENDENT,
                )  # fmt: skip
            tl.debug_barrier()
            tl.atomic_add(added, 1, sem="release")
            return
        tile -= 2 * num_rows
    if SHARED_TILES:
        if tile < SHARED_TILES:
            n = tile * UP_N + tl.arange(0, UP_N)
            wait_for_inputs(DEPENDENT)
            for first in range(0, num_tokens, BLOCK_M):
                m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
                gate, up = gate_and_up(
                    x, shared_up, up_scales, 0, up_bias, 0, m, m < num_tokens, n, shared_size,
                    hidden_size, BLOCK_M, UP_N, UP_K, EVEN_UP, False, 0, DEPENDENT,
                )  # fmt: skip
                if HAS_ADAPTERS:
                    wait_for_count(added, 2 * num_rows)
                    gate += deltas(of_up, 2 * shared_size, m, m < num_tokens, n, shared_size)
                    up += deltas(
                        of_up + shared_size, 2 * shared_size, m, m < num_tokens, n, shared_size
                    )  # fmt: skip
                ok = (m < num_tokens)[:, None] & (n < shared_size)[None, :]
                value = tl.trans(activated(gate, up, KIND))
                tl.store(shared_inner + m[:, None] * shared_size + n[None, :], value, mask=ok)
            tl.debug_barrier()
            tl.atomic_add(of_shared, 1, sem="release")
            if HAS_ADAPTERS:
                _count_passed(added, passed, num_first + SHARED_TILES)
            return
        tile -= SHARED_TILES
    if tile < num_first:
        group = tile // UP_TILES
        n = tile % UP_TILES * UP_N + tl.arange(0, UP_N)
        wait_for_inputs(DEPENDENT)
        expert, begin, end = group_at(groups, group)
        for first in range(begin, end, BLOCK_M):
            m = first + tl.arange(0, BLOCK_M)
            pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
            gate, up = gate_and_up(
                x, gate_up, up_scales, up_groups, up_bias, expert, pair // TOP_K, m < end, n,
                n_size, hidden_size, BLOCK_M, UP_N, UP_K, EVEN_UP, HAS_UP_BIAS, UP_SCALED,
                DEPENDENT,
            )  # fmt: skip
            if HAS_ADAPTERS:
                wait_for_count(added, 2 * num_rows)
                gate += deltas(up_delta, 2 * n_size, pair, m < end, n, n_size)
                up += deltas(up_delta + n_size, 2 * n_size, pair, m < end, n, n_size)
            ok = (m < end)[:, None] & (n < n_size)[None, :]
            value = tl.trans(activated(gate, up, KIND))
            tl.store(inner + pair[:, None] * n_size + n[None, :], value, mask=ok)
        if end > begin:
            # Store all results of this program, then count.
            tl.debug_barrier()
            tl.atomic_add(done + group, 1, sem="release")
        if HAS_ADAPTERS:
            _count_passed(added, passed, num_first + SHARED_TILES)
        return
    tile -= num_first
    if HAS_ADAPTERS:
        if tile < num_rows:
            wait_for_inputs(DEPENDENT)
            if tile < num_pairs:
                group, at = _pair_at(groups, tile, num_first // UP_TILES, GROUPS_POW)
                if group < num_first // UP_TILES:
                    pair = tl.load(pairs + at).to(tl.int64)
                    down_pair(
                        inner, down_delta, done + group, UP_TILES, slots, pool, down_table,
                        down_scalings, tl.load(groups + 3 * group), pair, TOP_K, hidden_size,
                        n_size, False, COLUMNS,
                    )  # fmt: skip
                    tl.debug_barrier()
                    tl.atomic_add(done + group, 1, sem="release")
            elif SHARED_TILES:
                down_pair(
                    shared_inner, of_down, of_shared, SHARED_TILES, slots, pool, shared_down_table,
                    shared_down_scalings, 0, (tile - num_pairs).to(tl.int64), 1, hidden_size,
                    shared_size, True, COLUMNS,
                )  # fmt: skip
                tl.debug_barrier()
                tl.atomic_add(of_shared, 1, sem="release")
            return
        tile -= num_rows
    if SHARED_TILES:
        if tile < DOWN_TILES:
            n = tile * DOWN_N + tl.arange(0, DOWN_N)
            ready = SHARED_TILES
            if HAS_ADAPTERS:
                ready += num_tokens
            wait_for_inputs(DEPENDENT)
            wait_for_count(of_shared, ready)
            for first in range(0, num_tokens, BLOCK_M):
                m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
                if HAS_ADAPTERS:
                    delta = deltas(of_down, hidden_size, m, m < num_tokens, n, hidden_size)
                acc = down_product(
                    shared_inner, shared_down, down_scales, 0, down_bias, 0, m, m < num_tokens, n,
                    hidden_size, shared_size, BLOCK_M, DOWN_N, DOWN_K, EVEN_SHARED, False, 0,
                    DEPENDENT,
                )  # fmt: skip
                if HAS_ADAPTERS:
                    acc += delta
                ok = (m < num_tokens)[:, None] & (n < hidden_size)[None, :]
                to = out + (m * terms + TOP_K)[:, None] * hidden_size + n[None, :]
                tl.store(to, tl.trans(acc), mask=ok)
            if tl.atomic_add(of_shared, 1, sem="relaxed") == ready + DOWN_TILES - 1:
                tl.store(of_shared, 0)
            return
        tile -= DOWN_TILES
    group = tile // DOWN_TILES
    n = tile % DOWN_TILES * DOWN_N + tl.arange(0, DOWN_N)
    wait_for_inputs(DEPENDENT)
    expert, begin, end = group_at(groups, group)
    if begin == end:
        return
    ready = end - begin + UP_TILES if HAS_ADAPTERS else UP_TILES
    wait_for_count(done + group, ready)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        if HAS_ADAPTERS:
            delta = deltas(down_delta, hidden_size, pair, m < end, n, hidden_size)
        acc = down_product(
            inner, down, down_scales, down_groups, down_bias, expert, pair, m < end, n,
            hidden_size, n_size, BLOCK_M, DOWN_N, DOWN_K, EVEN_DOWN, HAS_DOWN_BIAS, DOWN_SCALED,
            DEPENDENT,
        )  # fmt: skip
        if HAS_ADAPTERS:
            acc += delta
        value = tl.trans(acc) * tl.load(weights + pair)[:, None]
        ok = (m < end)[:, None] & (n < hidden_size)[None, :]
        place = pair // TOP_K * terms + pair % TOP_K
        tl.store(out + place[:, None] * hidden_size + n[None, :], value, mask=ok)
    if tl.atomic_add(done + group, 1, sem="relaxed") == ready + DOWN_TILES - 1:
        tl.store(done + group, 0)
