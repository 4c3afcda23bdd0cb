"""A trace in Mooncake's format, simulated and served: hit rates by tier agree (B05).

    python -m tests.soaks.served_trace TRACE.jsonl [--every 40] [--num-requests 300]

The trace is thinned: one conversation of `--every`, whole, so that what is shared still is; blocks
of 512 tokens become 16, replies 4, prompts at most 100 blocks; requests come one after the other.
The simulation runs on modelled time, the server is a real engine around a tiny model with real
copies to the host. Both have the same pages on each tier. Prints JSON; ends with 1 if a tier's
share of the prompt tokens differs by more than 0.02.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyroots import LLM, SamplingParams
from manyroots.simulate.mooncake import BLOCK_TOKENS
from manyroots.simulate.presets import preset
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace, TraceSegment
from manyroots.simulate.trace_file import read_trace
from tests.helpers.quick_tiers import quick_tiers
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

BLOCK, PAGE, REPLY, MAX_BLOCKS, VOCAB = 16, 8, 4, 100, 300
MAX_LEN = (MAX_BLOCKS + 1) * BLOCK
AGREE = 0.02


def talks(trace: Trace, every: int) -> Trace:
    """The lines of one conversation of `every`. Lines of one conversation begin with the same two
    blocks: the first alone may be common to all conversations."""
    numbers: dict[tuple[str, ...], int] = {}
    kept = []
    for line in trace:
        names = [part.name for part in line.prompt[:2] if isinstance(part, TraceSegment)]
        number = numbers.setdefault(tuple(names), len(numbers))
        if number % every == 0:
            kept.append(line)
    return tuple(kept)


def thinned(trace: Trace, num_requests: int) -> Trace:
    """The same sharing in a 32nd of the tokens, and far apart in time."""
    lines = []
    for line in trace:
        segments = [part for part in line.prompt if isinstance(part, TraceSegment)]
        if len(segments) <= MAX_BLOCKS and len(lines) < num_requests:
            prompt = tuple(TraceSegment(s.name, _scaled(s.length)) for s in segments)
            lines.append(
                replace(line, arrival_s=100.0 * len(lines), prompt=prompt, output_tokens=REPLY)
            )
    return tuple(lines)


def _scaled(length: int) -> int:
    return max(1, length * BLOCK // BLOCK_TOKENS)


def served(trace: Trace, num_pages: int, num_host_pages: int, folder: Path) -> dict[str, float]:
    """Shares of all prompt tokens, by tier."""
    save_tiny(folder, "llama", vocab_size=VOCAB, max_position_embeddings=MAX_LEN)
    tiny_backend().save(str(folder / "tokenizer.json"))
    greedy = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True)
    with quick_tiers(), LLM(
        str(folder), dtype="float32", block_size=PAGE, num_gpu_blocks_override=num_pages,
        num_host_pages=num_host_pages, max_model_len=MAX_LEN, progress_bars=False,
    ) as llm:  # fmt: skip
        num_tokens = 0
        for line in trace:
            prompt = [3 + token % (VOCAB - 3) for token in line.prompt_tokens().tolist()]
            num_tokens += len(prompt)
            llm.generate([prompt], greedy)
        stats = llm.stats()
    host = stats.total_host_hit_tokens
    return {"device": (stats.total_hit_tokens - host) / num_tokens, "host": host / num_tokens}


def compare(trace: Trace, folder: Path) -> dict[str, Any]:
    num_pages = 2 * MAX_LEN // PAGE
    num_host_pages = 4 * num_pages
    settings = SimulationSettings(
        block_size=PAGE, num_pages=num_pages, num_host_pages=num_host_pages
    )
    run = simulate(trace, settings, preset("round-numbers").costs, seed=0)
    simulated = summarize(run).hit_rate_by_tier
    real = served(trace, num_pages, num_host_pages, folder)
    return {
        "requests": len(trace), "pages": num_pages, "host_pages": num_host_pages,
        "simulated": {tier: round(share, 4) for tier, share in simulated.items()},
        "served": {tier: round(share, 4) for tier, share in real.items()},
        "largest_difference": round(max(abs(simulated[t] - real[t]) for t in real), 4),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--num-requests", type=int, default=300)
    arguments = parser.parse_args()
    lines = talks(read_trace(Path(arguments.trace)), arguments.every)
    with tempfile.TemporaryDirectory() as folder:
        told = compare(thinned(lines, arguments.num_requests), Path(folder))
    print(json.dumps(told))
    return int(told["largest_difference"] > AGREE)


if __name__ == "__main__":
    sys.exit(main())
