"""Windows and compressed groups of tokens in Triton, and hyper-connections, against the naive
references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.compressed import reference as naive  # isort: skip
from manyroots.kernels.compressed import triton as fast  # isort: skip
from manyroots.kernels.compressed import triton_attend  # isort: skip
from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm  # isort: skip
from manyroots.kernels.compressed.step import RowsStep  # isort: skip
from manyroots.kernels.hyper import reference as naive_hyper  # isort: skip
from manyroots.kernels.hyper import triton as fast_hyper  # isort: skip
from manyroots.kernels.hyper.inputs import HyperWeights, ReadNorm  # isort: skip
from manyroots.kernels.latent.step import PromptLens  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

SIZES = [(3, 22, 6, torch.float32), (17, 32, 8, torch.float16)]
"""Heads, numbers of a head, how many of them are rotated, and the dtype."""
PAGE = 8
if DEVICE.type == "cuda":
    SIZES = [(3, 22, 6, torch.float32), (64, 512, 64, torch.bfloat16)]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def rope(num_tokens: int, rotated: int, seed: int = 3) -> RopeTable:
    frequencies = randn(rotated // 2, seed=seed).abs() + 0.1
    return RopeTable.at(torch.arange(7, 7 + num_tokens, device=DEVICE), frequencies, 1.2)


def steps(*groups: int, decodes: list[int], prompts: PromptLens | None) -> list[RowsStep]:
    """Of several families: each with a page table of its own, and a slot for each token; the first
    token is padding."""
    lens = [*decodes, *([] if prompts is None else prompts.context_lens.tolist())]
    counts = [1] * len(decodes) + ([] if prompts is None else prompts.num_queries.tolist())
    made = []
    for seed, group in enumerate(groups):
        generator = torch.Generator().manual_seed(5 + seed)
        table = torch.randperm(16 * len(lens), generator=generator).view(len(lens), 16)
        at = [
            (int(table[seq, position // PAGE]), position % PAGE)
            for seq, (length, count) in enumerate(zip(lens, counts, strict=True))
            for position in range(length - count, length)
        ]
        pages = int32(-1, *(page for page, _ in at[1:]))
        made.append(
            RowsStep(
                page_table=table.int().to(DEVICE),
                context_lens=int32(*lens),
                num_decodes=len(decodes),
                page_size=PAGE,
                group=group,
                prompts=prompts,
                slot_mapping=SlotMapping(pages, int32(*(offset for _, offset in at))),
            )
        )
    return made


MIXED = ([24, 3], PromptLens(np.array([7, 3, 9]), np.array([40, 3, 96])))
DECODES = ([64, 1, 127], None)
STEPS = [MIXED, DECODES]
IDS = ["mixed", "decodes"]


def num_tokens(case: tuple[list[int], PromptLens | None]) -> int:
    decodes, prompts = case
    return len(decodes) + (0 if prompts is None else int(prompts.num_queries.sum()))


@pytest.mark.parametrize(("heads", "dim", "rotated", "dtype"), SIZES)
def test_f10_rows_are_normalised_rotated_and_written_as_by_the_reference(
    heads: int, dim: int, rotated: int, dtype: torch.dtype
) -> None:
    """F10: from inputs with strides; a token without a page writes nothing."""
    tokens = 5
    q = randn(tokens, heads, dim + 2, dtype=dtype)[..., :dim]
    kv = randn(tokens, 5 + dim, dtype=dtype, seed=1)[:, 5:]
    table = rope(tokens, rotated)
    norm = RowNorm(randn(dim, dtype=dtype, seed=2), 1e-5)
    slots = SlotMapping(int32(2, 0, -1, 0, 1), int32(3, 0, 1, 1, 2))
    arenas = [torch.full((3, 2, PAGE, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    ours, right = (
        kind.normed_write(q, kv, table, norm, arena[:, 1], slots)
        for kind, arena in zip((fast, naive), arenas, strict=True)
    )
    assert_close("attention", ours, right, dtype)
    assert_close("attention", arenas[0], arenas[1], dtype)
    assert arenas[0][:, 0].eq(7.0).all()
    for back in (False, True):
        own = torch.full((tokens, heads, dim + 2), 7.0, dtype=dtype, device=DEVICE)
        own[..., :dim] = q
        ours = fast.rotate_last(own[..., :dim], table, back=back)
        assert_close("attention", ours, naive.rotate_last(q, table, back=back), dtype)
        assert own[..., dim:].eq(7.0).all()
    for kind, arena in zip((fast, naive), arenas, strict=True):
        kind.write_rows(kv, arena[:, 0], slots)
    assert torch.equal(arenas[0][:, 0], arenas[1][:, 0])


@pytest.mark.parametrize("dtype", [one[-1] for one in SIZES], ids=str)
@pytest.mark.parametrize("case", STEPS, ids=IDS)
@pytest.mark.parametrize(("size", "series"), [(8, 1), (4, 2)])
def test_f10_groups_that_end_are_compressed_as_by_the_reference(
    size: int, series: int, case: tuple[list[int], PromptLens | None], dtype: torch.dtype
) -> None:
    """F10: in decodes and in prompts; with the first groups of sequences, which overlap nothing.
    Other entries stay, and what other rows hold does not matter."""
    of_tokens, of_entries = steps(1, size, decodes=case[0], prompts=case[1])
    dims, rotated = (22, 10), 6
    parts = tuple(
        GroupPart(
            first,
            dim,
            randn(size, series * dim, seed=first),
            randn(dim, dtype=dtype, seed=dim),
            1e-5,
        )
        for first, dim in zip((0, 2 * series * dims[0]), dims, strict=True)
    )
    width = 2 * series * sum(dims)
    pages = randn(16 * 6, PAGE, width + 3, dtype=dtype)[..., :width]
    arenas = [randn(16 * 6, PAGE // size, sum(dims), dtype=dtype, seed=9) for _ in range(2)]
    before = arenas[0].clone()
    angles = rope(num_tokens(case), rotated)
    for kind, arena in zip((fast, naive), arenas, strict=True):
        kind.compress(pages, arena, parts, of_tokens, of_entries, angles)
    assert_close("attention", arenas[0], arenas[1], dtype)
    lens = of_tokens.token_lens
    ends = int(((lens % size == 0) & (of_entries.slot_mapping.pages >= 0)).sum())
    assert (arenas[0] != before).any(2).sum() == ends


@pytest.mark.parametrize("case", STEPS, ids=IDS)
@pytest.mark.parametrize(
    ("window", "group", "num_chosen"), [(5, None, None), (20, 8, None), (9, 2, 6), (9, 1, 100)]
)
@pytest.mark.parametrize("multiprocessors", [132, 1])
@pytest.mark.parametrize(("heads", "dim", "rotated", "dtype"), SIZES)
def test_f10_windows_and_entries_are_attended_to_as_by_the_reference(
    heads: int, dim: int, rotated: int, multiprocessors: int, window: int, group: int | None,
    num_chosen: int | None, case: tuple[list[int], PromptLens | None], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """F10: a window alone, with all entries, and with those chosen; rows that see one token, and
    sinks that take weight; queries that are divided, and as many as fill the chip. NaN in rows that
    no query sees changes nothing."""
    monkeypatch.setattr(triton_attend, "MULTIPROCESSORS", multiprocessors)
    of_keys, of_entries = steps(1, group or 1, decodes=case[0], prompts=case[1])
    count, extra = num_tokens(case), 16
    keys = KeyRows(randn(16 * 6, PAGE, dim, dtype=dtype), of_keys, window)
    entries, chosen = None, None
    if group is not None:
        pages = randn(16 * 6, PAGE // group, dim + extra, dtype=dtype, seed=4)
        pages[..., dim:] = torch.nan  # the index's keys
        entries = KeyRows(pages, of_entries, None)
    if num_chosen is not None:
        ready = (of_keys.token_lens // of_entries.group).tolist()
        chosen = torch.full((count, num_chosen), -1, device=DEVICE)
        generator = torch.Generator().manual_seed(8)
        for token, number in enumerate(ready):
            own = torch.randperm(number, generator=generator)[:num_chosen]
            chosen[token, : len(own)] = own
    q, sinks = randn(count, heads, dim, dtype=dtype, seed=2), randn(heads, seed=6)
    angles = rope(count, rotated)
    ours = fast.attend_rows(q, keys, entries, chosen, sinks, dim**-0.5, angles)
    right = naive.attend_rows(q, keys, entries, chosen, sinks, dim**-0.5, angles)
    assert_close("attention", ours, right, dtype)


@pytest.mark.parametrize("dtype", [one[-1] for one in SIZES], ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "many"), [(1, 4, 40, 99), (18, 3, 72, 99), (18, 3, 72, 4)]
)
def test_f10_streams_are_read_and_written_as_by_the_reference(
    tokens: int, count: int, hidden: int, many: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """F10: with as many streams as tiles hold, and fewer; of few tokens and of many; at the model's
    end, too. Outputs may be partial sums, and there may be a second one."""
    monkeypatch.setattr(fast_hyper, "MANY", many)
    monkeypatch.setattr(fast_hyper, "PARTS_PROGRAMS", 2)

    def weights(numbers: int, scales: int) -> HyperWeights:
        product = randn(numbers, count * hidden, seed=1) * (count * hidden) ** -0.5
        base, scale = randn(numbers, seed=2), randn(scales, seed=3)
        return HyperWeights(product, base, scale, 1e-5, 1e-6, 5)

    streams = randn(tokens, count, hidden, dtype=dtype)
    half = weights((2 + count) * count, 3)
    ours, right = (kind.read_streams(streams, half) for kind in (fast_hyper, naive_hyper))
    assert_close("attention", ours.rows, right.rows, dtype)
    assert_close("attention", ours.post, right.post, torch.float32)
    assert_close("attention", ours.mix, right.mix, torch.float32)
    norm = ReadNorm(randn(hidden, dtype=dtype, seed=6), 1e-5)
    ours = fast_hyper.read_streams(streams, half, norm).rows
    assert_close("attention", ours, naive_hyper.read_streams(streams, half, norm).rows, dtype)
    output, also = randn(2, tokens, hidden, dtype=dtype, seed=4)
    sums = randn(tokens, 3, hidden, seed=5).transpose(0, 1)
    for given in ((output, right), (sums, right), (sums, right, also), (output, right, sums)):
        written, wanted = (
            kind.write_streams(streams, *given) for kind in (fast_hyper, naive_hyper)
        )
        assert_close("attention", written, wanted, dtype)
    end = weights(count, 1)
    ours, right = (kind.join_streams(streams, end) for kind in (fast_hyper, naive_hyper))
    assert_close("attention", ours, right, dtype)
