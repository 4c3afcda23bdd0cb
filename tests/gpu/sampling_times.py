"""How long the sampler takes: `python -m tests.gpu.sampling_times [VOCABULARY]`, on a GPU.

One line for each batch size and each thing that all rows of it ask for: microseconds of one
`sample`, as it lies in a decode step's graph, and how many more than greedy rows take. Logits are
bfloat16 and where the head leaves them; calls follow each other on the stream, so what one launch
costs more than its kernel does is in it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from manyroots.ids import RequestId, Row
from manyroots.kernels.sampling import triton as fast
from manyroots.kernels.sampling.rows import SamplingRows, SamplingTables
from manyroots.runner.packet import send
from manyroots.runner.sampling_state import SamplingState
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival

VOCAB = 151_936
CALLS, REPLAYS, ROUNDS = 8, 40, 5
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "top-k, top-p, penalties, 5 logprobs": {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.1, "logprobs": 5,
    },
    "1,000 biases": {"temperature": 0.0, "logit_bias": {9 * t: 1.0 for t in range(1000)}},
    "searched: top-p 0.999, temperature 5": {"temperature": 5.0, "top_p": 0.999},
}  # fmt: skip


def logits_of(num_rows: int, vocab: int) -> torch.Tensor:
    """Like a model's: most far below, some hundred near the top, a few that stand out."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(num_rows, vocab, device="cuda", generator=generator) * 2.2
    at = torch.randint(vocab, (num_rows, 40), device="cuda", generator=generator)
    more = torch.rand(num_rows, 40, device="cuda", generator=generator) * 14
    return logits.scatter_add_(1, at, more).bfloat16()


def rows_of(asked: dict[str, Any], num_rows: int, tables: SamplingTables) -> SamplingRows:
    state = SamplingState(num_rows, tables)
    params = SamplingParams(**asked)
    known = np.random.default_rng(1).integers(0, tables.counts.shape[1], 2000).astype(np.int32)
    state.apply(
        [
            Arrival(
                row=Row(row), request_id=RequestId(row), tokens=known, num_prompt_tokens=1500,
                num_computed_tokens=0, page_tables=(), sampling=params, seed=row, stop_ids=(),
                adapter_slot=None, adapter_from=0,
            )
            for row in range(num_rows)
        ]
    )  # fmt: skip
    rows = np.arange(num_rows, dtype=np.int32)
    arrays = state.arrays(rows, np.full(num_rows, 500, np.int64))
    return SamplingRows.of(send(arrays, torch.device("cuda")), tables)


def microseconds(logits: torch.Tensor, rows: SamplingRows) -> float:
    """The best of some rounds."""
    fast.sample(logits, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            fast.sample(logits, rows)
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS / CALLS)
    return min(times)


@torch.inference_mode()
def main(vocab: int) -> None:
    for num_rows in (1, 8, 64):
        tables = SamplingTables.zeros(num_rows, vocab, torch.device("cuda"))
        logits = logits_of(num_rows, vocab)
        greedy = 0.0
        for name, asked in ASKED.items():
            took = microseconds(logits, rows_of(asked, num_rows, tables))
            greedy = greedy or took
            more = took - greedy
            print(f"{num_rows:3} rows, {name:38} {took:7.1f} us, {more:+7.1f} us", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else VOCAB)
