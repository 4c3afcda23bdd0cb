"""Kept prefixes in Python (T13), through the real engine with real bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots import LLM, SamplingParams
from manyroots.errors import RequestError
from manyroots.messages import KeepRange
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt(number: int) -> list[int]:
    return [3 + (number * 37 + place) % 290 for place in range(41)]


def test_t13_a_prefix_that_llm_keeps_survives_a_flood(tmp_path: Path) -> None:
    """T13: without the mark it is evicted, with it it is found; bad ranges are refused."""
    save_tiny(tmp_path, "llama", vocab_size=300)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    with LLM(
        str(tmp_path), dtype="float32", block_size=4, max_model_len=64, max_num_seqs=2,
        num_gpu_blocks_override=28, progress_bars=False,
    ) as llm:  # fmt: skip
        found = []
        for ranges in ((), (KeepRange(until_token=40),)):
            llm.generate([prompt(0)], ONE, retention=ranges)
            for number in range(1, 6):
                llm.generate([prompt(number)], ONE)
            before = llm.stats().total_hit_tokens
            llm.generate([prompt(0)], ONE)
            found.append(llm.stats().total_hit_tokens - before)
        assert found == [0, 40]
        with pytest.raises(RequestError, match=r"retention\[0\].priority is 101"):
            llm.generate([prompt(0)], ONE, retention=[KeepRange(4, priority=101)])
