"""Rotation and the writing of keys and values with torch's operators, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyroots.kernels.attention import reference as attention_reference
from manyroots.kernels.attention import torch_ops as attention
from manyroots.kernels.qk_rope_kv_write import reference, torch_ops
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm, RopeTable
from manyroots.kernels.tolerances import assert_close
from manyroots.store.arena import PageArena
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.kernels.attention_cases import Shape, make_rows, random_arena

EPS = 1e-6
SCALE = 0.3
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def copy_of(arena: PageArena) -> Tensor:
    """The second layer of another arena that holds the same."""
    return arena.data.clone()[:, 1]


def all_positions(num_pairs: int) -> RopeTable:
    return RopeTable.at(torch.arange(400), 100.0 ** -torch.linspace(0, 1, num_pairs))


def positions_of(sequences: list[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(context - count, context) for count, context in sequences])


SEQUENCES = [(1, 5), (1, 300), (1, 16), (7, 20), (3, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "of the model's dtype", "wide"])
@pytest.mark.parametrize("num_pairs", [16, 4, 0])
def test_qk_rope_kv_write_gives_q_and_fills_exactly_the_places(
    num_pairs: int, norm: str, dtype: torch.dtype
) -> None:
    """Heads are rotated whole, in part, or not at all."""
    shape = Shape(heads=6, kv_heads=2, head_dim=32, page_size=4)
    rows, num_pages = make_rows(SEQUENCES, shape.page_size)
    positions = positions_of(SEQUENCES)
    arena = random_arena(num_pages, shape, dtype)
    before, other = arena.layer(0).clone(), copy_of(arena)
    qkv = randn(len(positions), 10 * shape.head_dim, dtype=dtype)
    norms = None
    if norm != "none":
        norm_dtype = torch.float32 if norm == "wide" else dtype
        norms = QkNorm(randn(32, dtype=norm_dtype), randn(32, dtype=norm_dtype, seed=3), EPS)
    table = all_positions(num_pairs)
    slot_mapping = attention.prepare(rows, shape.page_size, dtype).slot_mapping
    q = torch_ops.qk_rope_kv_write(
        qkv, torch_ops.look_up(table, positions, dtype), norms, arena.layer(1), slot_mapping
    )
    expected = reference.qk_rope_kv_write(
        qkv, reference.look_up(table, positions, dtype), norms, other, rows.slot_mapping
    )
    assert q.dtype == dtype
    assert_close("rotary", q, expected, dtype)
    # Slots after the newest token of a new page are cleared here, and not there.
    assert slot_mapping.new_pages is not None
    is_new = torch.zeros(num_pages, dtype=torch.bool)
    is_new[slot_mapping.new_pages] = True
    assert_close("rotary", arena.layer(1)[~is_new], other[~is_new], dtype)
    at = (rows.slot_mapping.pages.long(), rows.slot_mapping.offsets.long())
    for part in range(2):
        assert_close("rotary", arena.layer(1)[:, part][at], other[:, part][at], dtype)
    assert torch.equal(arena.layer(0), before)


def test_rows_that_only_pad_write_nowhere() -> None:
    shape = Shape()
    sequences = [(1, 10), (1, 0), (3, 20)]
    rows, num_pages = make_rows(sequences, shape.page_size)
    arena = random_arena(num_pages, shape, torch.float32)
    other = copy_of(arena)
    qkv, positions = randn(5, 10 * shape.head_dim), torch.tensor([9, 0, 17, 18, 19])
    table = all_positions(shape.head_dim // 2)
    slot_mapping = attention.prepare(rows, shape.page_size, torch.float32).slot_mapping
    rope = torch_ops.look_up(table, positions, torch.float32)
    torch_ops.qk_rope_kv_write(qkv, rope, None, arena.layer(1), slot_mapping)
    slow_rope = reference.look_up(table, positions, torch.float32)
    reference.qk_rope_kv_write(qkv, slow_rope, None, other, rows.slot_mapping)
    assert slot_mapping.new_pages is not None
    assert not slot_mapping.new_pages.numel()
    assert_close("rotary", arena.layer(1), other, torch.float32)


@for_seeds(40)
def test_a_nan_left_in_a_page_never_reaches_its_next_owner(draw: Draw) -> None:
    """With windows and without: every page that no live token occupies is what a broken sequence
    left. Tokens of earlier steps are finite, and so is the rest of their pages: cleared then."""
    shape = Shape()
    sequences = [(1, context) for context in draw.list_of(lambda: draw.integer(1, 40), most=5)]
    sequences += [
        (count, count + draw.integer(0, 30))
        for count in draw.list_of(lambda: draw.integer(1, 20), least=1, most=3)
    ]
    window = draw.choice((0, 1, 4, 5, 7, 16))
    rows, num_pages = make_rows(sequences, shape.page_size, window=window)
    arena = random_arena(num_pages, shape, torch.float32)
    live = torch.zeros(num_pages, dtype=torch.bool)
    for row, (num_queries, context) in enumerate(sequences):
        num_cached_pages = -(-(context - num_queries) // shape.page_size)
        live[rows.page_table[row, :num_cached_pages].long()] = True
    live[-1] = False
    arena.data[~live] = float("nan")
    other = copy_of(arena)
    positions = positions_of(sequences)
    qkv, table = randn(len(positions), 10 * shape.head_dim), all_positions(shape.head_dim // 2)
    fast = attention.prepare(rows, shape.page_size, torch.float32)
    rope = torch_ops.look_up(table, positions, torch.float32)
    q = torch_ops.qk_rope_kv_write(qkv, rope, None, arena.layer(1), fast.slot_mapping)
    out = attention.attend(q, arena.layer(1), fast, SCALE)
    assert out.isfinite().all()
    slow_rope = reference.look_up(table, positions, torch.float32)
    slow_q = reference.qk_rope_kv_write(qkv, slow_rope, None, other, rows.slot_mapping)
    slow = attention_reference.prepare(rows, shape.page_size, torch.float32)
    expected = attention_reference.attend(slow_q, other, slow, SCALE)
    assert_close("attention", out, expected, torch.float32)


def test_a_row_reads_pages_that_another_row_fills_in_the_same_step() -> None:
    """The second sequence begins with the first one's two pages: all are written, then all read."""
    shape = Shape()
    sequences = [(8, 8), (4, 12)]
    rows, num_pages = make_rows(sequences, shape.page_size, num_shared=2, num_decodes=0)
    arena = random_arena(num_pages, shape, torch.float32)
    other, positions = copy_of(arena), positions_of(sequences)
    qkv, table = randn(12, 10 * shape.head_dim), all_positions(shape.head_dim // 2)
    fast = attention.prepare(rows, shape.page_size, torch.float32)
    rope = torch_ops.look_up(table, positions, torch.float32)
    q = torch_ops.qk_rope_kv_write(qkv, rope, None, arena.layer(1), fast.slot_mapping)
    slow_rope = reference.look_up(table, positions, torch.float32)
    slow_q = reference.qk_rope_kv_write(qkv, slow_rope, None, other, rows.slot_mapping)
    slow = attention_reference.prepare(rows, shape.page_size, torch.float32)
    assert_close(
        "attention",
        attention.attend(q, arena.layer(1), fast, SCALE),
        attention_reference.attend(slow_q, other, slow, SCALE),
        torch.float32,
    )
