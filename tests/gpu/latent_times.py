"""Kernels of latent attention on a GPU: right, and how fast: `python -m tests.gpu.latent_times`.

Prints a line for each kernel and shape, with its distance from a float32 reference on the same
numbers. Exits 1 where one is too far off. Pages lie in random order; what follows a row's last
token is not a number.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from manyroots.kernels.latent import (
    torch_ops,
    triton_decode,
    triton_hopper,
    triton_hopper_prompt,
    triton_prompt,
)
from manyroots.kernels.latent.inputs import KeyPiece, SplitKeys
from manyroots.kernels.latent.triton_hopper import DecodeWay

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
SCALE = 192**-0.5
GPU = torch.device("cuda")
NUM_LAYERS = 3
ALLOWED = 1e-2
"""Of the norm of the right numbers."""
MOST_S = 120
"""Of one case's compilation and check."""


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(shape, dtype=torch.bfloat16, device=GPU, generator=generator)


class Pages:
    """Some layers' latents of rows of these lengths, one page's layers next to each other."""

    def __init__(self, lens: list[int], page_size: int, num_layers: int = NUM_LAYERS) -> None:
        counts = [-(-length // page_size) for length in lens]
        total = sum(counts) + 1
        self.arena = randn(total, num_layers, page_size, WIDTH, seed=1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(2)).to(torch.int32)
        self.table = torch.full((len(lens), max(1, *counts)), 10**8, dtype=torch.int32)
        at = 0
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            self.table[row, :count] = order[at : at + count]
            at += count
            if length % page_size:
                self.arena[int(order[at - 1]), :, length % page_size :] = torch.nan
        self.table = self.table.to(GPU)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=GPU)
        self.layers = [self.arena[:, i] for i in range(num_layers)]


def right(q: Tensor, pages: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """In float32, row by row."""
    out = torch.zeros(*q.shape[:2], LATENT, device=GPU)
    page_size = pages.shape[1]
    for row, length in enumerate(lens.tolist()):
        if length:
            own = table[row, : -(-length // page_size)].long()
            keys = pages[own].reshape(-1, WIDTH)[:length].float()
            weights = (q[row].float() @ keys.t() * SCALE).softmax(-1)
            out[row] = weights @ keys[:, :LATENT]
    return out


def off(actual: Tensor, expected: Tensor) -> float:
    """As a share of the norm."""
    return float((actual.float() - expected).norm() / expected.norm())


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def microseconds(
    calls: Sequence[Callable[[], Any]], rounds: int = 12
) -> tuple[float, float, float]:
    """Of one call in a graph: median, least and most."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(rounds):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(calls) / 2)
    return statistics.median(samples), min(samples), max(samples)


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel on rows of these lengths."""

    name: str
    way: Callable[..., Any]
    """Makes the kernel."""
    rows: str
    heads: int
    page_size: int = 16
    timed: bool = True

    @property
    def label(self) -> str:
        return f"{self.name:18} {self.heads:4} heads {self.rows:>9} page {self.page_size:3}"

    def _make(self, num_layers: int) -> tuple[Pages, Tensor, Callable[..., Tensor]]:
        lens = ROWS[self.rows]
        data = Pages(lens, self.page_size, num_layers)
        q = randn(len(lens), self.heads, WIDTH, seed=3) * 2
        return data, q, self.way()

    def check(self) -> str:
        data, q, decode = self._make(1)
        pages, rest = data.layers[0], (data.table, data.lens, SCALE, LATENT)
        # Memory that nothing has written yet is not a number.
        torch.use_deterministic_algorithms(True, warn_only=True)
        out = decode(q, pages, *rest)
        torch.use_deterministic_algorithms(False)
        error = off(out, right(q, pages, data.table, data.lens))
        moves = not torch.equal(out, decode(q, pages, *rest))
        assert error < ALLOWED, f"off {error:.1e}"
        assert not moves, f"another result for the same numbers, off {error:.1e}"
        return f"off {error:.1e}"

    def time(self) -> str:
        data, q, decode = self._make(NUM_LAYERS)
        calls = [
            partial(decode, q, layer, data.table, data.lens, SCALE, LATENT) for layer in data.layers
        ]
        us, least, most = microseconds(calls)
        num_tokens = int(data.lens.sum())
        num_bytes, flops = num_tokens * WIDTH * 2, 2 * num_tokens * self.heads * (WIDTH + LATENT)
        return (
            f"{us:8.1f} us ({least:.1f} to {most:.1f})  {num_bytes / us / 1e6:6.3f} TB/s  "
            f"{flops / us / 1e6:7.1f} TFLOP/s"
        )


@dataclass(frozen=True, slots=True)
class PromptCase:
    """Prompts with nothing before them."""

    name: str
    way: Callable[..., Any]
    rows: str
    heads: int
    dims: tuple[int, int] = (192, 128)
    """Of a head's keys and values."""
    timed: bool = True

    @property
    def label(self) -> str:
        return f"{self.name:18} {self.heads:4} heads {self.rows:>9} of {self.dims}"

    def _make(self) -> tuple[tuple[Any, ...], int]:
        lens = ROWS[self.rows]
        total = sum(lens)
        nope = self.dims[0] - ROPE
        q = randn(total, self.heads, self.dims[0], seed=4)
        both = randn(total, self.heads, nope + self.dims[1], seed=6)
        k, v = SplitKeys(both[..., :nope], randn(total, ROPE, seed=5)), both[..., nope:]
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=GPU)
        seen = torch.zeros(len(lens), dtype=torch.int32, device=GPU)
        piece = KeyPiece(starts, starts, seen, max(lens))
        return (q, k, v, piece, SCALE), sum(n * (n + 1) // 2 for n in lens)

    def check(self) -> str:
        arguments, _ = self._make()
        q, k, v, piece, _ = arguments
        attend = self.way()
        torch.use_deterministic_algorithms(True, warn_only=True)
        out, sums = attend(*arguments)
        torch.use_deterministic_algorithms(False)
        right_out, right_sums = torch_ops.attend_piece(
            q.float(), SplitKeys(k.own.float(), k.shared.float()), v.float(), piece, SCALE
        )
        errors = off(out, right_out), off(sums, right_sums)
        assert max(errors) < ALLOWED, f"off {errors}"
        assert torch.equal(out, attend(*arguments)[0]), "another result for the same numbers"
        return f"off {errors[0]:.1e} {errors[1]:.1e}"

    def time(self) -> str:
        arguments, num_pairs = self._make()
        us, least, most = microseconds([partial(self.way(), *arguments)] * 3)
        flops = 2 * num_pairs * self.heads * sum(self.dims)
        return f"{us:8.1f} us ({least:.1f} to {most:.1f})  {flops / us / 1e6:24.1f} TFLOP/s"


class Without:
    """A kernel that is left out."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def _drawn(count: int, low: int, high: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (count,), generator=generator).tolist()


ROWS = {
    "ragged": [0, 1, 63, 64, 65, 127, 128, 129, 4000, 8191, 16, 15, 700, 0, 5000, 33],
    "1x5": [5],
    "1x100000": [100_000],
    "64x4096": [4096] * 64,
    "64x100+": _drawn(64, 100, 8000),
    "8x2048": [2048] * 8,
    "some": [300, 1, 700, 128, 129, 64],
    "1x4096": [4096],
    "1x8192": [8192],
    "8x1024": [1024] * 8,
    "8x1036": [1036] * 8,
    "256x500": [500] * 256,
}


def _hopper() -> Callable[..., Tensor]:
    return triton_hopper.latent_decode


def _by_way(way: DecodeWay) -> Callable[..., Tensor]:
    return partial(triton_hopper.latent_decode, way=way)


def _alone() -> Callable[..., Tensor]:
    """Without the second launch."""
    triton_hopper._merge = Without()
    return _hopper()


def _plain() -> Callable[..., Tensor]:
    triton_hopper.is_for = lambda *_: False
    return triton_decode.latent_decode


def _hopper_prompt() -> Callable[..., Any]:
    return triton_hopper_prompt.attend_piece


def _plain_prompt() -> Callable[..., Any]:
    triton_hopper_prompt.is_for = lambda *_: False
    return triton_prompt.attend_piece


def cases() -> list[Case | PromptCase]:
    found: list[Case | PromptCase] = [
        Case("hopper", _hopper, "ragged", heads, page, timed=False)
        for heads in (16, 20, 128, 40)
        for page in ((16, 64, 128) if heads in (16, 128) else (16,))
    ]
    found += [Case("hopper", _hopper, rows, 16, timed=False) for rows in ("1x5", "1x100000")]
    found += [Case("hopper", _hopper, "64x4096", heads) for heads in (16, 20, 32, 64, 128)]
    found += [Case("hopper", _hopper, "64x4096", heads, 64) for heads in (16, 128)]
    found += [
        Case("hopper", _hopper, rows, heads)
        for rows in ("64x100+", "8x2048", "8x1036", "256x500")
        for heads in (16, 128)
    ]
    found += [Case("plain", _plain, rows, 16) for rows in ("64x4096", "8x2048")]
    many = DecodeWay(64, in_pairs=True, merged_heads=4, merged_parts=2)
    for rows in ("64x4096", "8x2048"):
        for name, way in (("pairs", many), ("one by one", replace(many, in_pairs=False))):
            found.append(Case(name, partial(_by_way, way), rows, 128))
    found += [
        Case("pairs", partial(_by_way, many), "ragged", heads, page, timed=False)
        for heads, page in ((40, 32), (128, 16), (128, 64), (128, 128))
    ]
    for dims, heads in (((192, 128), 16), ((256, 256), 20)):
        found.append(PromptCase("hopper", _hopper_prompt, "some", 3, dims, timed=False))
        for rows in ("1x4096", "8x1024"):
            found.append(PromptCase("hopper", _hopper_prompt, rows, heads, dims))
            found.append(PromptCase("plain", _plain_prompt, rows, heads, dims))
    return found


def one(index: int) -> int:
    """Compile and check in a process of its own: it may fail or never end."""
    case = cases()[index]
    try:
        print(f"{case.label}  {case.check()}", flush=True)
    except Exception:
        print(f"{case.label}  WRONG\n{traceback.format_exc(limit=-3)}", flush=True)
        return 1
    return 0


def _start(index: int) -> bool:
    command = [sys.executable, "-m", "tests.gpu.latent_times", "--one", str(index)]
    try:
        return subprocess.run(command, timeout=MOST_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{cases()[index].label}  DID NOT END", flush=True)
        return False


def main() -> int:
    every = cases()
    with ThreadPoolExecutor(max_workers=14) as pool:
        is_right = list(pool.map(_start, range(len(every))))
    print("checked", flush=True)
    for case, good in zip(every, is_right, strict=True):
        if case.timed and good:
            is_for = triton_hopper.is_for, triton_hopper_prompt.is_for
            print(f"{case.label}  {case.time()}", flush=True)
            triton_hopper.is_for, triton_hopper_prompt.is_for = is_for
    merge = triton_hopper._merge
    for heads, rows in ((16, "64x4096"), (128, "64x4096"), (16, "8x2048")):
        case = Case("  not merged", _alone, rows, heads)
        print(f"{case.label}  {case.time()}", flush=True)
        triton_hopper._merge = merge
    print("all agree" if all(is_right) else f"{is_right.count(False)} of {len(every)} are wrong")
    return 0 if all(is_right) else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(one(int(arguments[1])) if arguments[:1] == ["--one"] else main())
