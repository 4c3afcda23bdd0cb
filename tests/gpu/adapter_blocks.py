"""Adapters in blocks of a GPU's memory answer as in slots: `python -m tests.gpu.adapter_blocks`.

Two layers of Qwen3-8B's size with random weights, and 24 adapters of two ranks. The same requests
go to an engine with a slot for each adapter, to one with `--max-loras auto`, and to one whose
blocks hold a third of the adapters, which replaces them all the time. Exits 1 if tokens of the
first two differ, or if more than 2% of the third's do: its steps have other rows beside each, which
rounds sums in another order.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.traffic_cases import TrafficCase, adapter_name
from manyroots.config import engine_settings
from manyroots.engine import worker
from manyroots.engine.build import build_engine
from manyroots.models.source import resolve_source
from tests.gpu.engines import run, tokens_of

RANKS = (8, 16)
CASE = TrafficCase(
    name="ranks", num_requests=96, prompt_len=(16, 96), output_len=(8, 32), num_adapters=24
)
FEW_BLOCKS = 24


def answers(settings: dict[str, Any], name: str) -> list[list[int]]:
    """Tokens of the second of two rounds, by request."""
    began, ids = time.monotonic(), itertools.count()
    engine = build_engine(engine_settings(settings))
    started = time.monotonic() - began
    try:
        for salt in ("first", "second"):
            submits = CASE.submits(engine.info.vocab_size, salt, ids, with_adapters=True)
            found = tokens_of(run(engine.loop, submits))
        stats = engine.loop.stats().adapters
    finally:
        engine.loop.close()
    print(f"{name}: started in {started:.1f} s, {stats}", flush=True)
    return [found[int(submit.request_id)] for submit in submits]


def main(options: list[str]) -> int:
    device = options[0] if options else "cuda"
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        model = write_config("qwen3-8b" if device == "cuda" else "tiny-qwen3", folder, 2)
        targets = targets_of(resolve_source(engine_settings({"model": str(model)}).model))
        modules = []
        for number in range(CASE.num_adapters):
            rank = RANKS[number % len(RANKS)]
            [path] = write_adapters(targets, folder / str(number), 1, rank, first=number)
            modules.append(f"{adapter_name(number)}={path}")
        settings = {
            "model": str(model), "load_format": "dummy", "device": device, "max_num_seqs": 64,
            "max_num_batched_tokens": 1024, "max_model_len": 256, "enable_lora": True,
            "lora_modules": tuple(modules), "max_lora_rank": max(RANKS),
            "num_gpu_blocks_override": 2048,
        }  # fmt: skip
        slots = answers({**settings, "max_loras": CASE.num_adapters}, "slots")
        blocks = answers({**settings, "max_loras": 0}, "blocks")
        with mock.patch.object(worker, "count_adapter_room", return_value=FEW_BLOCKS):
            few = answers({**settings, "max_loras": 0}, "few blocks")
    wrong = sum(one != other for one, other in zip(slots, blocks, strict=True))
    pairs = list(zip(itertools.chain(*slots), itertools.chain(*few), strict=True))
    share = sum(one != other for one, other in pairs) / len(pairs)
    print(f"{wrong} of {len(slots)} requests differ in blocks, {share:.2%} of tokens in few blocks")
    return int(wrong > 0 or share > 0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
