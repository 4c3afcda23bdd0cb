"""What a connector adds to a step: processor time of the loop's thread, with and without (T14).

    python -m tests.measures.connector_cost [--rounds 5] [--steps 100]

A tiny model decodes 16 rows on a CPU. Three engines take turns: without a connector, with one that
does nothing, and with one that sleeps 10 ms at each call. Prints the median over rounds, in us a
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

from manyroots import LLM, SamplingParams
from manyroots.engine import connectors
from manyroots.engine.connectors import ConnectorEvent, ConnectorInfo
from manyroots.ids import RequestId
from manyroots.messages import Abort, Submit
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

NUM_ROWS, PROMPT = 16, 64


class Idle:
    def __init__(self, info: ConnectorInfo) -> None:
        """Nothing."""

    def hear(self, events: Sequence[ConnectorEvent], num_missed: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Slow(Idle):
    def hear(self, events: Sequence[ConnectorEvent], num_missed: int) -> None:
        time.sleep(0.01)


def us_per_step(llm: LLM, num_steps: int, first_id: int) -> float:
    """Of decoding steps; prompts are computed before."""
    loop: Any = llm._loop
    params = SamplingParams(temperature=0, max_tokens=num_steps + 20, ignore_eos=True)
    ids = [RequestId(first_id + row) for row in range(NUM_ROWS)]
    for number in ids:
        prompt = [3 + (number * 31 + place) % 290 for place in range(PROMPT)]
        loop.handle(Submit(number, prompt, None, params, 0, (), None))
    for _ in range(10):
        loop.step()
    begin = time.thread_time()
    for _ in range(num_steps):
        loop.step()
    took = time.thread_time() - begin
    loop.handle(Abort(ids))
    while loop.has_work:
        loop.step()
    return took / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    entries = []
    for name, kind in {"idle": Idle, "slow": Slow}.items():
        entries.append(mock.Mock(spec=EntryPoint, value="here"))
        entries[-1].name = name
        entries[-1].load.return_value = kind
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(connectors, "entry_points", return_value=entries),
    ):
        save_tiny(Path(folder), "llama", vocab_size=300)
        tiny_backend().save(f"{folder}/tokenizer.json")
        engines = {
            name or "none": LLM(
                folder, dtype="float32", max_model_len=256, max_num_seqs=NUM_ROWS,
                num_gpu_blocks_override=2000, progress_bars=False,
                kv_connectors=(name,) if name else (),
            )
            for name in ("", "idle", "slow")
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(given.rounds + 1):
            for name, llm in engines.items():
                took = us_per_step(llm, given.steps, 10**6 + turn * 100)
                if turn:  # the first warms up
                    times[name].append(took)
        drops = engines["slow"].stats().connector_drops
        for llm in engines.values():
            llm.close()
    told = {name: round(statistics.median(each), 1) for name, each in times.items()}
    print(json.dumps({"us_per_step": told, "drops_of_slow": drops["slow"]}))


if __name__ == "__main__":
    main()
