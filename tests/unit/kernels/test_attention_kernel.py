"""torch_ops against the naive reference, and the promises both make."""

from __future__ import annotations

import pytest
import torch

from manyroots.kernels.attention import reference, torch_ops
from manyroots.kernels.attention.batch import AttentionBatch
from manyroots.kernels.tolerances import assert_close
from manyroots.store.arena import PageArena
from tests.seeded import Draw, for_seeds
from tests.unit.kernels.attention_cases import Shape, make_batch, random_arena, random_qkv

SCALE = 0.3


def both(
    batch: AttentionBatch, arena: PageArena, shape: Shape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of torch_ops and of the reference, each over its own copy of the pages."""
    q, k, v = random_qkv(batch.query_starts[-1], shape, dtype)
    other = PageArena(
        arena.num_pages, shape.page_size, 2, shape.kv_heads, shape.head_dim, dtype, q.device
    )
    other.data.copy_(arena.data)
    torch_ops.write_kv(arena.layer(1), k, v, batch)
    reference.write_kv(other.layer(1), k, v, batch)
    return (
        torch_ops.paged_attention(q, arena.layer(1), batch, SCALE),
        reference.paged_attention(q, other.layer(1), batch, SCALE),
    )


def steps(draw: Draw) -> list[tuple[int, int]]:
    """(num_queries, context_len): decodes first, then segments, some of the same shape."""
    sequences = [(1, context) for context in draw.list_of(lambda: draw.integer(1, 70), most=9)]
    for _ in range(draw.integer(0, 4)):
        num_queries, num_cached = draw.integer(1, 20), draw.integer(0, 40)
        sequences += [(num_queries, num_queries + num_cached)] * draw.integer(1, 3)
    return sequences or [(1, 1)]


@for_seeds(60)
def test_torch_ops_equals_the_reference(draw: Draw) -> None:
    dtype = draw.choice((torch.float32, torch.bfloat16))
    shape = Shape(*draw.choice(((1, 1, 8, 1), (6, 2, 16, 4), (4, 4, 16, 16), (8, 1, 32, 8))))
    batch, num_pages = make_batch(steps(draw), shape.page_size, dtype)
    arena = random_arena(num_pages, shape, dtype)
    fast, naive = both(batch, arena, shape, dtype)
    assert_close("attention", fast, naive, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segment_longer_than_a_block_of_queries_is_exact(dtype: torch.dtype) -> None:
    shape = Shape(heads=3, kv_heads=1, head_dim=8, page_size=16)
    batch, num_pages = make_batch([(1, 900), (300, 517), (600, 1100)], 16, dtype)
    arena = random_arena(num_pages, shape, dtype)
    fast, naive = both(batch, arena, shape, dtype)
    assert_close("attention", fast, naive, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contexts", [[40, 41, 44, 48, 37], [25] * 4, [33, 70, 64, 68, 65, 66]])
def test_a_common_prefix_is_attended_to_once_and_exactly(
    contexts: list[int], dtype: torch.dtype
) -> None:
    """Rows that begin with the same pages: the parts are merged into the whole's result."""
    shape = Shape()
    batch, num_pages = make_batch(
        [(1, context) for context in contexts], shape.page_size, dtype, num_shared=6
    )
    assert max(len(group.shared_pages) for group in batch.decode_groups) == 6
    arena = random_arena(num_pages, shape, dtype)
    fast, naive = both(batch, arena, shape, dtype)
    assert_close("attention", fast, naive, dtype)


def test_one_long_row_does_not_pad_the_others() -> None:
    batch, _ = make_batch([(1, 20), (1, 4000), (1, 30), (1, 28)], 4, torch.float32)
    widths = [group.bias.shape[-1] for group in batch.decode_groups]
    assert widths == [4000, 32, 20]
    assert batch.decode_order is not None
    assert batch.decode_order.tolist() == [1, 2, 3, 0]


def test_neighbours_of_one_shape_attend_together() -> None:
    batch, _ = make_batch([(5, 9), (5, 9), (5, 9), (4, 9)], 4, torch.float32)
    assert [group.num_seqs for group in batch.prefill_groups] == [3, 1]


def test_a_nan_left_in_a_page_never_reaches_its_next_owner() -> None:
    shape = Shape()
    sequences = [(1, 1), (1, 5), (1, 13), (3, 3), (6, 6)]
    batch, num_pages = make_batch(sequences, shape.page_size, torch.float32)
    arena = random_arena(num_pages, shape, torch.float32)
    # Every slot that no live token occupies holds what a broken sequence left there. Tokens
    # computed in earlier steps are finite, and so is the rest of their pages: cleared then.
    live = torch.zeros(num_pages, dtype=torch.bool)
    for row, (num_queries, context) in enumerate(sequences):
        num_cached_pages = -(-(context - num_queries) // shape.page_size)
        live[batch.page_table[row, :num_cached_pages]] = True
    arena.data[~live] = float("nan")
    fast, naive = both(batch, arena, shape, torch.float32)
    assert fast.isfinite().all()
    assert_close("attention", fast, naive, torch.float32)


def test_a_row_reads_pages_that_another_row_fills_in_the_same_step() -> None:
    shape = Shape()
    batch, num_pages = make_batch([(8, 8), (4, 12)], shape.page_size, torch.float32)
    # The second sequence begins with the first one's two pages, written in this very step.
    batch.page_table[1, :2] = batch.page_table[0, :2]
    shared = AttentionBatch.build(
        page_table=batch.page_table.numpy(),
        slot_pages=batch.slot_pages.numpy(),
        slot_offsets=batch.slot_offsets.numpy(),
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        num_decodes=0,
        page_size=shape.page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    arena = random_arena(num_pages, shape, torch.float32)
    fast, naive = both(shared, arena, shape, torch.float32)
    assert_close("attention", fast, naive, torch.float32)


def test_writing_touches_one_layer_only() -> None:
    shape = Shape()
    batch, num_pages = make_batch([(1, 5), (3, 7)], shape.page_size, torch.float32)
    arena = random_arena(num_pages, shape, torch.float32)
    before = arena.layer(0).clone()
    _, k, v = random_qkv(4, shape, torch.float32)
    torch_ops.write_kv(arena.layer(1), k, v, batch)
    assert torch.equal(arena.layer(0), before)
