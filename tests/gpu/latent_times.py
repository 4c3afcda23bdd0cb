"""Kernels of latent attention on a GPU: right, and how fast: `python -m tests.gpu.latent_times`.

Prints a line for each kernel and shape, with its distance from a float32 reference on the same
numbers. Exits 1 where one is too far off. Pages lie in random order; what follows a row's last
token is not a number.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyroots.kernels.latent import triton_decode, triton_hopper

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
SCALE = 192**-0.5
GPU = torch.device("cuda")
NUM_LAYERS = 3
ALLOWED = 1e-2
"""Of the norm of the right numbers."""
failed: list[str] = []


class Pages:
    """Some layers' latents of rows of these lengths, one page's layers next to each other."""

    def __init__(self, lens: list[int], page_size: int, num_layers: int = NUM_LAYERS) -> None:
        counts = [-(-length // page_size) for length in lens]
        total = sum(counts) + 1
        self.arena = torch.randn(
            total, num_layers, page_size, WIDTH, dtype=torch.bfloat16, device=GPU
        )
        order = torch.randperm(total).to(torch.int32)
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


def microseconds(calls: list[Callable[[], Any]], rounds: int = 12) -> tuple[float, float, float]:
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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(calls) / 2)
    return statistics.median(samples), min(samples), max(samples)


def decode_case(
    name: str, decode: Callable[..., Tensor], lens: list[int], heads: int, page_size: int,
    *, timed: bool = True,
) -> None:  # fmt: skip
    label = f"{name:24} {heads:4} heads {len(lens):4} rows of {max(lens):6} page {page_size:3}"
    try:
        torch.manual_seed(len(lens) + heads)
        data = Pages(lens, page_size, NUM_LAYERS if timed else 1)
        q = torch.randn(len(lens), heads, WIDTH, dtype=torch.bfloat16, device=GPU) * 2
        # Memory that nothing has written yet is not a number.
        torch.use_deterministic_algorithms(True, warn_only=True)
        out = decode(q, data.layers[0], data.table, data.lens, SCALE, LATENT)
        torch.use_deterministic_algorithms(False)
        error = off(out, right(q, data.layers[0], data.table, data.lens))
        again = decode(q, data.layers[0], data.table, data.lens, SCALE, LATENT)
        note = "" if torch.equal(out, again) else "  MOVES"
        if not error < ALLOWED:
            failed.append(label)
            note += "  WRONG"
        line = f"{label}  off {error:.1e}{note}"
        if timed:
            calls = [
                partial(decode, q, layer, data.table, data.lens, SCALE, LATENT)
                for layer in data.layers
            ]
            us, least, most = microseconds(calls)
            num_bytes, flops = sum(lens) * WIDTH * 2, 2 * sum(lens) * heads * (WIDTH + LATENT)
            line += f"  {us:8.1f} us ({least:.1f} to {most:.1f})"
            line += f"  {num_bytes / us / 1e6:6.3f} TB/s  {flops / us / 1e6:7.1f} TFLOP/s"
        print(line, flush=True)
    except Exception:
        failed.append(label)
        print(f"{label}  FAILED\n{traceback.format_exc(limit=-3)}", flush=True)


class Without:
    """A kernel that is left out."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def main() -> int:
    ragged = [0, 1, 63, 64, 65, 127, 128, 129, 4000, 8191, 16, 15, 700, 0, 5000, 33]
    several = [int(x) for x in torch.randint(100, 8000, (64,), generator=torch.manual_seed(0))]
    fast, plain = triton_hopper.latent_decode, triton_decode.latent_decode
    for heads in (16, 20, 128, 40):
        for page_size in (16, 64, 128):
            decode_case("hopper", fast, ragged, heads, page_size, timed=False)
    decode_case("hopper", fast, [5], 16, 16, timed=False)
    decode_case("hopper", fast, [100_000], 128, 16, timed=False)
    uniform = [4096] * 64
    for page_size in (16, 64):
        for heads in (16, 32, 64, 128):
            decode_case("hopper", fast, uniform, heads, page_size)
    merge = triton_hopper._merge
    triton_hopper._merge = Without()  # type: ignore[assignment]
    for heads in (16, 128):
        decode_case("hopper, not merged", fast, uniform, heads, 16)
    triton_hopper._merge = merge
    triton_hopper.FEW_WARPS = 4
    decode_case("hopper, 4 warps", fast, uniform, 16, 16)
    triton_hopper.FEW_WARPS = 8
    for heads in (16, 128):
        decode_case("hopper", fast, several, heads, 16)
        decode_case("hopper", fast, [2048] * 8, heads, 16)
        decode_case("hopper", fast, [500] * 256, heads, 16)
    is_for = triton_hopper.is_for
    triton_hopper.is_for = lambda *_: False
    for heads in (16, 128):
        decode_case("plain", plain, ragged, heads, 16, timed=False)
        decode_case("plain", plain, uniform, heads, 16)
        decode_case("plain", plain, [2048] * 8, heads, 16)
    triton_hopper.is_for = is_for
    print(f"{len(failed)} failed: {failed}" if failed else "all agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
