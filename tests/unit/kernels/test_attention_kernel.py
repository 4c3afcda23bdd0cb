"""torch_ops against the naive reference, and the promises both make."""

from __future__ import annotations

import pytest
import torch

from manyroots.kernels.attention import reference, torch_ops
from manyroots.kernels.attention.grouping import MIN_PIECE
from manyroots.kernels.attention.paged import AttentionMetadata
from manyroots.kernels.tolerances import assert_close
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.kernels.attention_cases import Shape, make_rows, random_arena, random_q

SCALE = 0.3


def steps(draw: Draw) -> list[tuple[int, int]]:
    """(num_queries, context_len): decodes first, then segments, some of the same shape."""
    sequences = [(1, context) for context in draw.list_of(lambda: draw.integer(1, 70), most=9)]
    for _ in range(draw.integer(0, 4)):
        num_queries, num_cached = draw.integer(1, 20), draw.integer(0, 40)
        sequences += [(num_queries, num_queries + num_cached)] * draw.integer(1, 3)
    return sequences or [(1, 1)]


def assert_equals_the_reference(
    rows: AttentionMetadata,
    num_pages: int,
    shape: Shape,
    dtype: torch.dtype,
    *,
    has_sinks: bool,
    cap: float = 0.0,
) -> None:
    """Over pages of random tokens; the last page belongs to no sequence and holds NaN."""
    arena = random_arena(num_pages, shape, dtype)
    arena.data[-1] = float("nan")
    num_tokens = len(rows.slot_mapping.pages)
    q = random_q(num_tokens, shape, dtype)
    sinks = None
    if has_sinks:
        sinks = torch.randn(shape.heads, generator=torch.Generator().manual_seed(3)).to(dtype)
    layer_kv, page_size = arena.layer(1), shape.page_size
    both = (torch_ops.prepare(rows, page_size, dtype), reference.prepare(rows, page_size, dtype))
    fast = torch_ops.attend(q, layer_kv, both[0], SCALE, sinks, cap)
    naive = reference.attend(q, layer_kv, both[1], SCALE, sinks, cap)
    assert_close("attention", fast, naive, dtype)


@for_seeds(30)
def test_torch_ops_equals_the_reference(draw: Draw) -> None:
    dtype = draw.choice((torch.float32, torch.bfloat16))
    shape = Shape(*draw.choice(((1, 1, 8, 1), (6, 2, 16, 4), (4, 4, 16, 16), (8, 1, 32, 8))))
    rows, num_pages = make_rows(steps(draw), shape.page_size)
    assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=False)


@for_seeds(20)
def test_capped_scores_equal_the_reference(draw: Draw) -> None:
    """A cap that most scores are far from, near and beyond; with sinks, too."""
    shape = Shape(*draw.choice(((1, 1, 8, 1), (6, 2, 16, 4), (8, 1, 32, 8))))
    rows, num_pages = make_rows(steps(draw), shape.page_size)
    cap, has_sinks = draw.choice((0.3, 2.0, 50.0)), draw.flag()
    assert_equals_the_reference(rows, num_pages, shape, torch.float32, has_sinks=has_sinks, cap=cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segment_longer_than_a_block_of_queries_is_exact(dtype: torch.dtype) -> None:
    shape = Shape(heads=3, kv_heads=1, head_dim=8, page_size=16)
    rows, num_pages = make_rows([(1, 900), (300, 517), (600, 1100)], 16)
    assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contexts", [[40, 41, 44, 48, 37], [25] * 4, [33, 70, 64, 68, 65, 66]])
def test_a_common_prefix_is_attended_to_once_and_exactly(
    contexts: list[int], dtype: torch.dtype
) -> None:
    """Rows that begin with the same pages: the parts are merged into the whole's result."""
    shape = Shape()
    rows, num_pages = make_rows(
        [(1, context) for context in contexts], shape.page_size, num_shared=6
    )
    groups = torch_ops.prepare(rows, shape.page_size, dtype).decode_groups
    assert max(len(group.shared_pages) for group in groups) == 6
    assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=False)


@pytest.mark.parametrize("contexts", [[40, 41, 44, 48, 37, 39, 38, 46, 47], [46] * 8, [33, 70] * 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_of_two_prefixes_attend_to_each_of_them_once_and_exactly(
    contexts: list[int], has_sinks: bool
) -> None:
    """As adapters have it, each of which computes a common beginning for itself."""
    shape = Shape()
    rows, num_pages = make_rows([(1, n) for n in contexts], shape.page_size, num_shared=6)
    table = rows.page_table
    others = torch.arange(0, len(contexts), 2)
    table[others, :6] = torch.arange(num_pages, num_pages + 6, dtype=table.dtype)
    groups = torch_ops.prepare(rows, shape.page_size, torch.float32).decode_groups
    assert sum(len(group.shared_pages) for group in groups) == 12
    assert_equals_the_reference(rows, num_pages + 7, shape, torch.float32, has_sinks=has_sinks)


def test_one_long_row_does_not_pad_the_others() -> None:
    rows, _ = make_rows([(1, 20), (1, 4000), (1, 30), (1, 28)], 4)
    grouped = torch_ops.prepare(rows, 4, torch.float32)
    assert [group.bias.shape[-1] for group in grouped.decode_groups] == [4000, 32, 20]
    assert grouped.decode_order is not None
    assert grouped.decode_order.tolist() == [1, 2, 3, 0]


def test_neighbours_of_one_shape_attend_together() -> None:
    rows, _ = make_rows([(5, 9), (5, 9), (5, 9), (4, 9)], 4)
    groups = torch_ops.prepare(rows, 4, torch.float32).prefill_groups
    assert [group.num_seqs for group in groups] == [3, 1]


WINDOWS = (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 60, 64)


@for_seeds(60)
def test_windows_and_sinks_equal_the_reference(draw: Draw) -> None:
    """Windows of pages, and one more and less; what lies in front of them is another's and NaN."""
    dtype = draw.choice((torch.float32, torch.bfloat16))
    shape = Shape(*draw.choice(((4, 1, 8, 1), (6, 2, 16, 4), (4, 4, 16, 16), (8, 1, 32, 8))))
    window = draw.choice((0, *WINDOWS))
    rows, num_pages = make_rows(steps(draw), shape.page_size, window=window)
    assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=draw.flag())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [Shape(4, 1, 256, 16), Shape(16, 2, 64, 16)])
def test_heads_of_models_with_windows(shape: Shape, dtype: torch.dtype) -> None:
    """One wide key-value head; groups of eight."""
    sequences = [(1, 200), (1, 127), (1, 3), (40, 180), (12, 12)]
    for window in (0, 128):
        rows, num_pages = make_rows(sequences, 16, window=window)
        assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=True)


@pytest.mark.parametrize("window", [1, 100, 128, 300, 513])
@pytest.mark.parametrize("page_size", [16, 1024])
def test_a_long_segment_behind_a_window_is_exact(page_size: int, window: int) -> None:
    """Several blocks of queries; pages that are longer than a window, and all but hidden."""
    shape = Shape(heads=2, kv_heads=1, head_dim=8, page_size=page_size)
    sequences = [(1, 1900), (1, 1020), (300, 1517), (700, 700)]
    rows, num_pages = make_rows(sequences, page_size, window=window)
    assert_equals_the_reference(rows, num_pages, shape, torch.float32, has_sinks=window == 128)


def test_a_long_segment_behind_a_window_is_gathered_in_pieces() -> None:
    """Whatever its context: a piece and the window before it, and no more."""
    window = 128
    rows, _ = make_rows([(5 * MIN_PIECE + 3, 40_000)], 16, window=window)
    groups = torch_ops.prepare(rows, 16, torch.float32).prefill_groups
    assert [group.num_queries for group in groups] == [*[MIN_PIECE] * 5, 3]
    assert max(group.pages.numel() for group in groups) * 16 <= MIN_PIECE + window + 16
    shape = Shape(heads=1, kv_heads=1, head_dim=8, page_size=16)
    rows, num_pages = make_rows([(MIN_PIECE + 40, MIN_PIECE + 300)] * 2, 16, window=window)
    assert_equals_the_reference(rows, num_pages, shape, torch.float32, has_sinks=False)


def test_a_decoding_row_gathers_the_pages_of_its_window_alone() -> None:
    rows, _ = make_rows([(1, 40_000), (1, 129), (1, 20)], 16, window=128)
    groups = torch_ops.prepare(rows, 16, torch.float32).decode_groups
    assert [group.pages.numel() for group in groups] == [2 * 9, 2]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "num_shared"), [(0, 6), (70, 6), (40, 0), (41, 0)])
def test_a_common_prefix_is_shared_where_every_window_holds_all_of_it(
    window: int, num_shared: int, dtype: torch.dtype, has_sinks: bool
) -> None:
    shape = Shape()
    contexts = [40, 41, 44, 48, 37, 43]
    rows, num_pages = make_rows(
        [(1, context) for context in contexts], shape.page_size, window=window, num_shared=6
    )
    groups = torch_ops.prepare(rows, shape.page_size, dtype).decode_groups
    assert max(len(group.shared_pages) for group in groups) == num_shared
    assert_equals_the_reference(rows, num_pages, shape, dtype, has_sinks=has_sinks)


@pytest.mark.parametrize("window", [0, 5])
def test_rows_that_only_pad_see_nothing_and_write_nowhere(window: int) -> None:
    shape = Shape()
    sequences = [(1, 9), (1, 0), (1, 30), (1, 0), (7, 20)]
    rows, num_pages = make_rows(sequences, shape.page_size, window=window)
    assert_equals_the_reference(rows, num_pages, shape, torch.float32, has_sinks=True)
    slot_mapping = torch_ops.prepare(rows, shape.page_size, torch.float32).slot_mapping
    assert slot_mapping.tokens is not None
    assert slot_mapping.tokens.tolist() == [0, 2, *range(4, 11)]
    assert slot_mapping.pages.tolist() == rows.slot_mapping.pages[slot_mapping.tokens].tolist()
