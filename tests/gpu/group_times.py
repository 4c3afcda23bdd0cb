"""Kernels of compressed groups on a GPU: right, and how fast: `python -m tests.gpu.group_times`.

One layer of DeepSeek V4 in full size and a prompt's 8,192 tokens after some 12,000: attention to a
window, with chosen entries of 4 tokens, with all entries of 128; the index; hyper-connections.
Prints a line for each kernel, with its distance from the reference on the same numbers. Exits 1
where one is too far off, or chooses other entries. Pages lie in random order; what follows the last
token is not a number.

`python -m tests.gpu.group_times PART ...` takes lines whose names begin so. Every kernel is first
compiled and checked in a process of its own, because it may fail or never end.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.compressed import (
    reference,
    triton_attend,
    triton_hopper,
    triton_index,
    triton_rows,
)
from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm
from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.hyper import torch_ops as hyper_ops
from manyroots.kernels.hyper import triton as hyper
from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights
from manyroots.kernels.latent.step import PromptLens
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping
from tests.gpu.latent_times import GPU, Without, microseconds, off, randn

HEADS, DIM, INDEX_DIM, WINDOW, NUM_CHOSEN, PAGE = 64, 512, 128, 128, 512, 128
PAIRS = 32
"""Of a head's numbers, that are rotated."""
STREAMS, HIDDEN = 4, 4096
QUERIES, CONTEXT = 8192, 20_443
RAGGED = ([300, 1, 129, 0], [5, 130, 700, 1], [5, 500, 700, 257])
"""Tokens of sequences that decode; queries of prompts, and tokens of theirs."""
ALLOWED = 1e-2
"""Of the norm of the right numbers."""
MOST_S = 120
"""Of one case's compilation and check."""
SAMPLED = 200


def rand(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, device=GPU, generator=torch.Generator(GPU).manual_seed(seed))


def step_of(group: int, decodes: list[int], queries: list[int], lens: list[int]) -> RowsStep:
    every = [*decodes, *lens]
    pages = -(-max(every) // PAGE)
    order = torch.randperm(len(every) * pages, generator=torch.Generator().manual_seed(group)).view(
        len(every), pages
    )
    none = torch.empty(0, dtype=torch.int32, device=GPU)
    prompts = PromptLens(np.array(queries), np.array(lens)) if lens else None
    return RowsStep(
        page_table=order.int().to(GPU),
        context_lens=torch.tensor(every, dtype=torch.int32, device=GPU),
        num_decodes=len(decodes), slot_mapping=SlotMapping(none, none), page_size=PAGE,
        group=group, prompts=prompts,
    )  # fmt: skip


def rows_of(step: RowsStep, width: int, seed: int, window: int | None = None) -> KeyRows:
    """Random rows, and no numbers where no token is."""
    num_pages = int(step.page_table.max()) + 1
    pages = randn(num_pages, 2, PAGE // step.group, width, seed=seed)[:, 1]
    lens = step.context_lens.tolist()
    for seq, length in enumerate(lens):
        row = step.page_table[seq]
        last, count = length // PAGE, length % PAGE // step.group
        if last < len(row):
            pages[int(row[last]), count:] = torch.nan
    return KeyRows(pages, step, window)


def sampled(step: RowsStep, tokens: Tensor) -> RowsStep:
    """The same tokens as sequences of their own, that decode."""
    return RowsStep(
        page_table=step.page_table[step.token_seqs[tokens]], context_lens=step.token_lens[tokens],
        num_decodes=len(tokens), slot_mapping=step.slot_mapping, page_size=step.page_size,
        group=step.group, prompts=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel, and settings of its module."""

    name: str
    settings: dict[tuple[Any, str], Any] = field(default_factory=dict)

    def set_up(self) -> None:
        for (module, name), value in self.settings.items():
            setattr(module, name, value)

    def check(self) -> str:
        raise NotImplementedError

    def time(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(Case):
    group: int = 0
    """Tokens of an entry; 0 without entries."""

    def _make(self, ragged: bool) -> tuple[Any, ...]:
        lens = RAGGED if ragged else ([], [QUERIES], [CONTEXT])
        step = step_of(1, *lens)
        keys = rows_of(step, DIM, 1, WINDOW)
        q = randn(len(step.token_lens), HEADS, DIM, seed=3)
        entries, chosen = None, None
        if self.group:
            width = DIM + (INDEX_DIM if self.group == 4 else 0)
            entries = rows_of(step_of(self.group, *lens), width, 2)
        if self.group == 4:
            ready = step.token_lens // self.group
            most = min(NUM_CHOSEN, int(ready.max()))
            chosen = rand(len(q), int(ready.max()), seed=7)
            n = torch.arange(chosen.shape[1], device=GPU)
            chosen = chosen.masked_fill(n >= ready[:, None], 2.0).argsort(1)[:, :most]
            chosen = chosen.masked_fill(n[:most] >= ready[:, None], -1)
        sinks = randn(HEADS, seed=6).float()
        angles = RopeTable.at(step.token_lens.long() - 1, rand(PAIRS, seed=12), 1.0)
        return q, keys, entries, chosen, sinks, DIM**-0.5, angles

    def check(self) -> str:
        found = []
        for ragged in (True, False):
            arguments = self._make(ragged)
            q, keys, entries, chosen, sinks, scale, angles = arguments
            ours = triton_attend.attend_rows(*arguments)
            at = torch.randperm(len(q), generator=torch.Generator().manual_seed(1))[:SAMPLED]
            at = at.to(GPU)
            right = reference.attend_rows(
                q[at].float(), KeyRows(keys.pages, sampled(keys.step, at), keys.window),
                None if entries is None
                else KeyRows(entries.pages, sampled(entries.step, at), None),
                None if chosen is None else chosen[at], sinks, scale, angles.rows(at),
            )  # fmt: skip
            found.append(off(ours[at], right))
            assert found[-1] < ALLOWED, f"off {found}"
            assert ours.isfinite().all(), "not finite"
            assert torch.equal(ours, triton_attend.attend_rows(*arguments)), "another result"
        return "off " + " ".join(f"{one:.1e}" for one in found)

    def time(self) -> str:
        q, keys, entries, *rest = self._make(False)
        call = partial(triton_attend.attend_rows, q, keys, entries, *rest)
        us, least, most = microseconds([call], rounds=7)
        seen = keys.step.token_lens.clamp(max=WINDOW).sum()
        if entries is not None:
            ready = keys.step.token_lens // self.group
            seen += ready.clamp(max=NUM_CHOSEN if self.group == 4 else 1 << 30).sum()
        flops = int(seen) * HEADS * DIM * 4
        return f"{us:8.1f} us ({least:.1f} to {most:.1f})  {flops / us / 1e6:7.1f} TFLOP/s"


@dataclass(frozen=True)
class Index(Case):
    by_counts: bool = True

    def _make(self, ragged: bool, *, whole: bool) -> tuple[Any, ...]:
        """`whole`: small whole numbers, of which every sum is exact, and many are equal."""
        lens = RAGGED if ragged else ([], [QUERIES], [CONTEXT])
        step = step_of(4, *lens)
        rows = rows_of(step, DIM + INDEX_DIM, 2)
        q = randn(len(step.token_lens), HEADS, INDEX_DIM, seed=4)
        weights = randn(len(q), HEADS, seed=5).float() / 100
        if whole:
            q, weights = (q * 0.6).round(), (weights * 100).round()
            rows.pages.copy_((rows.pages * 0.6).round())
        return q, weights, rows.pages, step

    def _run(self, q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep) -> Tensor:
        most = min(NUM_CHOSEN, step.most_rows)
        chosen = torch.full((len(q), most), -1, device=GPU)
        choose = triton_index._by_counts if self.by_counts else triton_index._by_ranks
        choose(q, weights, pages, step, chosen)
        return chosen

    def check(self) -> str:
        different = 0
        for ragged in (True, False):
            for whole in (True, False):
                q, weights, pages, step = self._make(ragged, whole=whole)
                ours = self._run(q, weights, pages, step)
                at = torch.randperm(len(q), generator=torch.Generator().manual_seed(1))[:SAMPLED]
                at = at.to(GPU)
                given = q[at], weights[at], pages, sampled(step, at)
                right = reference.choose_entries(*given, NUM_CHOSEN)
                own = ours[at][:, : right.shape[1]]
                is_other = (own.sort(1).values != right.sort(1).values).any(1)
                if whole:
                    assert not is_other.any(), f"{int(is_other.sum())} choose other entries"
                for row in is_other.nonzero()[:, 0].tolist():
                    mine, theirs = set(own[row].tolist()), set(right[row].tolist())
                    # Rounding may change the order of neighbours at the end of the choice.
                    assert len(mine ^ theirs) <= 4, f"{len(mine ^ theirs)} entries differ"
                different += int(is_other.sum())
                assert torch.equal(ours, self._run(q, weights, pages, step)), "another result"
        return f"{different} of {2 * SAMPLED} choices differ by rounding"

    def time(self) -> str:
        given = self._make(False, whole=False)
        us, least, most = microseconds([partial(self._run, *given)], rounds=7)
        flops = int((given[3].token_lens // 4).sum()) * HEADS * INDEX_DIM * 2
        line = f"{us:8.1f} us ({least:.1f} to {most:.1f})  {flops / us / 1e6:7.1f} TFLOP/s"
        if not self.by_counts:
            return line
        choose, triton_index._choose = triton_index._choose, Without()
        scores, _, _ = microseconds([partial(self._run, *given)], rounds=7)
        triton_index._choose = choose
        return f"{line}; scores {scores:.1f} us, {flops / scores / 1e6:.1f} TFLOP/s"


@dataclass(frozen=True)
class Streams(Case):
    def _make(self, tokens: int) -> tuple[Tensor, HyperWeights]:
        numbers = (2 + STREAMS) * STREAMS
        size = STREAMS * HIDDEN
        product = randn(numbers, size, seed=1).float() * size**-0.5
        base, scale = randn(numbers, seed=2).float(), randn(3, seed=3).float()
        weights = HyperWeights(product, base, scale, 1e-6, 1e-6, 20)
        return randn(tokens, STREAMS, HIDDEN, seed=4), weights

    def check(self) -> str:
        worst = 0.0
        for tokens in (QUERIES, 1000, 130, 64):
            streams, weights = self._make(tokens)
            ours = hyper.read_streams(streams, weights)
            right = hyper_ops.read_streams(streams.float(), weights)
            assert off(ours.rows, right.rows) < ALLOWED, f"rows off {off(ours.rows, right.rows)}"
            for mine, theirs in ((ours.post, right.post), (ours.mix, right.mix)):
                worst = max(worst, float((mine - theirs).abs().max()))
                assert worst < 1e-4, f"off {worst:.1e} with {tokens} tokens"
        return f"off {worst:.1e}"

    def time(self) -> str:
        streams, weights = self._make(QUERIES)
        us, least, most = microseconds([partial(hyper.read_streams, streams, weights)], rounds=7)
        num_bytes = (STREAMS + 1) * QUERIES * HIDDEN * 2
        parts = []
        for names in (("_join", "_read"), ("_join", "_read", "_shares")):
            kernels = {name: getattr(hyper, name) for name in names}
            for name in names:
                setattr(hyper, name, Without())
            took, _, _ = microseconds([partial(hyper.read_streams, streams, weights)], rounds=7)
            parts.append(took)
            for name, kernel in kernels.items():
                setattr(hyper, name, kernel)
        return (
            f"{us:8.1f} us ({least:.1f} to {most:.1f})  {num_bytes / us / 1e6:7.2f} TB/s; "
            f"product {parts[1]:.1f}, shares {parts[0] - parts[1]:.1f}, "
            f"join {us - parts[0]:.1f} us"
        )


@dataclass(frozen=True)
class Rest(Case):
    """What else a layer does with a prompt's numbers; shares are of the bytes that it must move."""

    def check(self) -> str:
        for _, call, _ in self._calls():
            call()
        torch.cuda.synchronize()
        return "compiled"

    def _calls(self) -> list[tuple[str, Callable[[], Any], int]]:
        """Names, calls and bytes."""
        step, queries = step_of(1, [], [QUERIES], [CONTEXT]), randn(QUERIES, HEADS, DIM, seed=1)
        positions = step.token_lens.long() - 1
        table = RopeTable.at(positions, rand(PAIRS, seed=12), 1.0)
        keys, kv = rows_of(step, DIM, 1), randn(QUERIES, DIM, seed=2)
        norm = RowNorm(randn(DIM, seed=3), 1e-6)
        slots = slots_of(step, positions)
        streams, output = randn(QUERIES, STREAMS, HIDDEN, seed=4), randn(QUERIES, HIDDEN, seed=5)
        post, mix = rand(QUERIES, 4, seed=13), rand(QUERIES, 4, 4, seed=14)
        read = HyperRead(output, post, mix)
        small = randn(QUERIES, HEADS, INDEX_DIM, seed=6)
        terms = randn(QUERIES, 6, HIDDEN, seed=7).float().transpose(0, 1)
        found: list[tuple[str, Callable[[], Any], int]] = [
            ("rotate the index's", partial(triton_rows.rotate_last, small, table, back=False),
             4 * QUERIES * HEADS * 2 * PAIRS),
            ("norm, rotate, write",
             partial(triton_rows.normed_write, queries, kv, table, norm, keys.pages, slots),
             2 * (queries.nbytes + kv.nbytes)),
            ("write streams", partial(hyper.write_streams, streams, output, read),
             2 * streams.nbytes + output.nbytes),
            ("write of 6 experts", partial(hyper.write_streams, streams, terms, read, output),
             2 * streams.nbytes + output.nbytes + terms.nbytes),
        ]  # fmt: skip
        for group, dims in ((4, (DIM, INDEX_DIM)), (128, (DIM,))):
            series = 2 if group == 4 else 1
            width, first, parts = 2 * series * sum(dims), 0, []
            for dim in dims:
                bias = randn(group, series * dim, seed=7).float()
                parts.append(GroupPart(first, dim, bias, randn(dim, seed=8), 1e-6))
                first += 2 * series * dim
            tokens, of_entries = rows_of(step, width, 9), step_of(group, [], [QUERIES], [CONTEXT])
            entries = rows_of(of_entries, sum(dims), 10)
            slotted = replace(of_entries, slot_mapping=slots_of(of_entries, positions))
            rows = randn(QUERIES, width, seed=11)
            found += [
                (f"write rows of {group}",
                 partial(triton_rows.write_rows, rows, tokens.pages, slots), 2 * rows.nbytes),
                (f"compress {group}",
                 partial(triton_rows.compress, tokens.pages, entries.pages, tuple(parts), step,
                         slotted, table), rows.nbytes * series),
            ]  # fmt: skip
        return found

    def time(self) -> str:
        lines = []
        for name, call, num_bytes in self._calls():
            us, least, most = microseconds([call], rounds=5)
            lines.append(
                f"\n  {name:22} {us:8.1f} us ({least:.1f} to {most:.1f})  "
                f"{num_bytes / us / 1e6:6.2f} TB/s"
            )
        return "".join(lines)


def slots_of(step: RowsStep, positions: Tensor) -> SlotMapping:
    """Of one sequence's tokens."""
    pages = step.page_table[0][positions // PAGE]
    return SlotMapping(pages.int(), (positions % PAGE).int())


def _never(*_: object) -> bool:
    return False


def cases() -> list[Case]:
    plain = {(triton_hopper, "is_for"): _never}
    found: list[Case] = []
    for kind, group in (("window", 0), ("chosen of 4", 4), ("all of 128", 128)):
        found += [
            Attention(f"attend {kind}, gluon", {}, group),
            Attention(f"attend {kind}, 64 rows", plain, group),
            Attention(
                f"attend {kind}, 32 rows", {**plain, (triton_attend, "TOKENS_OF_MANY"): 32}, group
            ),
        ]
    found.append(Index("index by ranks", {}, by_counts=False))
    for counted, warps, bits in (
        (1024, 4, 8), (1024, 4, 7), (1024, 4, 6), (1024, 4, 5), (512, 2, 6), (2048, 8, 6),
    ):  # fmt: skip
        settings = {
            (triton_index, "COUNTED"): counted,
            (triton_index, "COUNT_WARPS"): warps,
            (triton_index, "BITS"): bits,
        }
        name = f"index, {counted} by {warps}, {bits} bits"
        found.append(Index(name, settings))
    found += [Rest("rest"), Rest("rest, 8 heads", {(triton_rows, "HEADS"): 8})]
    found.append(Streams("streams, tf32x3", {(hyper, "MANY"): 1 << 30}))
    for tokens, inner, stages, programs, width in (
        (64, 64, 4, 512, 1024), (128, 64, 4, 256, 1024), (128, 64, 3, 512, 1024),
        (128, 128, 3, 256, 2048), (64, 64, 6, 512, 1024),
    ):  # fmt: skip
        settings = {
            (hyper, "TOKENS_OF_MANY"): tokens,
            (hyper, "INNER_OF_PARTS"): inner,
            (hyper, "PARTS_STAGES"): stages,
            (hyper, "PARTS_PROGRAMS"): programs,
            (hyper, "WIDTH_OF_MANY"): width,
        }
        name = f"streams {tokens} x {inner}, {stages} stages, {programs} programs, {width}"
        found.append(Streams(name, settings))
    return found


def one(index: int) -> int:
    case = cases()[index]
    case.set_up()
    try:
        print(f"{case.name}: {case.check()}", flush=True)
    except Exception:
        print(f"{case.name}: WRONG\n{traceback.format_exc(limit=-2)}", flush=True)
        return 1
    return 0


def _start(index: int) -> bool:
    command = [sys.executable, "-m", "tests.gpu.group_times", "--one", str(index)]
    try:
        return subprocess.run(command, timeout=MOST_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{cases()[index].name}: DID NOT END", flush=True)
        return False


def main(names: list[str]) -> int:
    every = cases()
    wanted = [i for i, case in enumerate(every) if not names or case.name.startswith(tuple(names))]
    with ThreadPoolExecutor(max_workers=15) as pool:
        is_right = list(pool.map(_start, wanted))
    print("checked", flush=True)
    defaults = {key: getattr(*key) for case in every for key in case.settings}
    for index, good in zip(wanted, is_right, strict=True):
        case = every[index]
        if good:
            case.set_up()
            try:
                print(f"{case.name:45} {case.time()}", flush=True)
            except Exception as error:
                print(f"{case.name:45} {type(error).__name__}: {error}", flush=True)
            for (module, name), value in defaults.items():
                setattr(module, name, value)
    print("all agree" if all(is_right) else f"{is_right.count(False)} of {len(wanted)} are wrong")
    return 0 if all(is_right) else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--one"]:
        sys.exit(one(int(arguments[1])))
    sys.exit(main(arguments))
