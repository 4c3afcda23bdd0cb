"""`manyroots bench tiers` and the served trace: they run, and say what they claim to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from manyroots.bench.tiers import TierWorkload, run_tiers
from manyroots.errors import ConfigError
from manyroots.simulate.trace import Trace, TraceRequest, TraceSegment
from tests.helpers.quick_tiers import quick_tiers
from tests.soaks.served_trace import AGREE, BLOCK_TOKENS, compare, thinned
from tests.unit.models.tiny import save_tiny


def test_b03_hits_come_from_the_tier_that_is_measured(tmp_path: Path) -> None:
    """B03: a run in small, whose own checks fail where a prompt came another way."""
    save_tiny(tmp_path, "llama", vocab_size=300)
    workload = TierWorkload(
        prompt_len=200, repeats=1, miss_requests=2, miss_prompt_len=20, miss_output_len=2
    )
    with quick_tiers():
        report = run_tiers(workload, {"model": str(tmp_path), "block_size": 4}, None)
    assert list(report["hits"]) == ["computed", "device", "host", "storage"]
    assert all(tier["seconds"]["median"] > 0 for tier in report["hits"].values())
    assert set(report["misses"]) == {"without", "host", "storage"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a bus to measure")
def test_b03_copies_are_not_measured_without_a_gpu() -> None:
    """B03: refused, and nothing made up."""
    workload = TierWorkload(200, 1, 2, 20, 2, parts=("copies",))
    with pytest.raises(ConfigError, match="no GPU"):
        run_tiers(workload, {}, None)


def test_b05_a_trace_simulated_and_served_agrees_by_tier(tmp_path: Path) -> None:
    """B05: a slice, made up; `python -m tests.soaks.served_trace` takes Mooncake's."""
    told = compare(thinned(made_trace(), 40), tmp_path)
    assert told["largest_difference"] <= AGREE
    assert told["served"]["host"] > 0.1
    assert told["served"]["device"] > 0.1


def made_trace() -> Trace:
    """Talks over many blocks, in turns, more than the device holds."""
    rng = random.Random(2)
    talks = [[f"{talk}.{i}" for i in range(60)] for talk in range(8)]
    lines = []
    for _ in range(40):
        talk = talks[min(rng.randrange(8), rng.randrange(8))]
        blocks = talk[: rng.randint(20, 60)]
        prompt = tuple(TraceSegment(name, BLOCK_TOKENS) for name in blocks)
        lines.append(
            TraceRequest(arrival_s=0.0, prompt=prompt, adapter=None, salt=None, output_tokens=4)
        )
    return tuple(lines)
