"""Attention of steps that check guesses, on a GPU: `python -m tests.gpu.run_times [--tilings]`.

Compares `triton_runs.py` with the reference, then times it beside the kernel that reads a history
once for each token. `--tilings` also times other tile sizes. Prints microseconds a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.attention import reference, triton
from manyroots.kernels.attention.paged import DecodeRows, TokenRuns, token_runs
from manyroots.kernels.attention.triton_runs import RunTiling, decode_runs
from manyroots.kernels.tolerances import assert_close

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
"""Of Qwen3-8B."""
NUM_LAYERS, ROUNDS = 36, 5
SCALE = DIM**-0.5
CASES = [(8, 5, 512), (1, 5, 512), (8, 5, 4096), (1, 5, 4096), (8, 2, 512), (16, 3, 512)]
"""Sequences, tokens of each in a step, and tokens that the last one sees."""
GPU = torch.device("cuda")


def rows_of(num_seqs: int, num_tokens: int, length: int) -> tuple[int, DecodeRows]:
    """The number of pages, and rows that read them."""
    torch.manual_seed(num_seqs)
    each = -(-length // PAGE)
    table = torch.randperm(num_seqs * each).to(torch.int32).view(num_seqs, each)
    seqs = np.repeat(np.arange(num_seqs), num_tokens)
    lens = (length - num_tokens + 1 + np.tile(np.arange(num_tokens), num_seqs)).astype(np.int32)
    starts, count = token_runs(seqs, lens)
    runs = TokenRuns(torch.from_numpy(starts).to(GPU), torch.tensor([count], device=GPU).int())
    tables = table[torch.from_numpy(seqs)].to(GPU)
    return num_seqs * each, DecodeRows(tables, torch.from_numpy(lens).to(GPU), runs=runs)


def check() -> None:
    """With windows, sinks, caps and FP8 pages, too."""
    torch.manual_seed(0)
    bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    for dtype, pages, window, has_sinks, cap in (
        (bf16, bf16, 0, False, 0.0),
        (bf16, bf16, 128, True, 0.0),
        (bf16, fp8, 0, False, 30.0),
        (fp32, fp32, 0, False, 0.0),
        (fp32, fp8, 128, True, 30.0),
    ):
        for num_seqs, num_tokens, length in ((3, 5, 700), (2, 8, 40), (5, 1, 300)):
            num_pages, rows = rows_of(num_seqs, num_tokens, length)
            kv = torch.randn(num_pages, 2, PAGE, KV_HEADS, DIM, device=GPU).to(pages)
            q = torch.randn(num_seqs * num_tokens, HEADS, DIM, device=GPU).to(dtype)
            sinks = torch.randn(HEADS, device=GPU) if has_sinks else None
            given: dict[str, Any] = {"window": window, "sinks": sinks, "cap": cap}
            expected = reference.decode_attention(q, kv, rows, SCALE, **given)
            for _ in range(2):  # the counters must be as they were
                out = decode_runs(q, kv, rows, SCALE, **given)
                assert_close("attention", out, expected, dtype)
    print("runs agree with the reference", flush=True)


def microseconds(attend: Callable[[Tensor], object], layers: Tensor) -> float:
    """Of one layer, in a graph of all of them."""
    attend(layers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            attend(layer)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(layers))
    return sorted(taken)[len(taken) // 2]


TILINGS = (
    RunTiling(64, 4, 3, 132),
    RunTiling(64, 4, 3, 528),
    RunTiling(64, 8, 3, 264),
    RunTiling(32, 4, 3, 264),
    RunTiling(32, 4, 3, 528),
    RunTiling(128, 8, 2, 132),
)


def times(case: tuple[int, int, int], *, with_tilings: bool) -> None:
    torch.manual_seed(0)
    num_seqs, num_tokens, length = case
    num_pages, rows = rows_of(*case)
    shape = (NUM_LAYERS, num_pages, 2, PAGE, KV_HEADS, DIM)
    layers = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
    q = torch.randn(num_seqs * num_tokens, HEADS, DIM, device=GPU, dtype=torch.bfloat16)
    alone = DecodeRows(rows.page_table, rows.context_lens)
    own = DecodeRows(rows.page_table[::num_tokens], rows.context_lens[::num_tokens])
    found = {
        "plain": microseconds(
            lambda kv: triton.decode_attention(q[:num_seqs], kv, own, SCALE), layers
        ),
        "each token": microseconds(lambda kv: triton.decode_attention(q, kv, alone, SCALE), layers),
        "runs": microseconds(lambda kv: decode_runs(q, kv, rows, SCALE), layers),
    }
    print(f"{num_seqs} x {num_tokens}, {length} tokens, us:", _line(found), flush=True)
    if with_tilings:
        others = {}
        for cut in TILINGS:
            name = f"{cut.tokens}/{cut.num_warps}/{cut.num_stages}/{cut.num_programs}"
            try:
                others[name] = microseconds(
                    lambda kv, cut=cut: decode_runs(q, kv, rows, SCALE, tiling=cut), layers
                )
            except Exception as error:  # a tiling that does not fit
                print(f"  {name}: {type(error).__name__}: {str(error)[:80]}", flush=True)
        print("  ", _line(dict(sorted(others.items(), key=lambda item: item[1]))), flush=True)


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {us:.1f}" for name, us in found.items())


def main(options: list[str]) -> None:
    torch.manual_seed(0)
    failed = None
    try:
        check()
    except AssertionError as error:  # the times may say more
        failed = error
        print(f"runs differ from the reference: {str(error)[:400]}", flush=True)
    for place, case in enumerate(CASES):
        times(case, with_tilings="--tilings" in options and place < 4)
    if failed is not None:
        raise failed


if __name__ == "__main__":
    main(sys.argv[1:])
