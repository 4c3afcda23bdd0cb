"""Priority in Python (L08), through the real engine with real bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, SamplingParams
from manyroots.errors import RequestError
from manyroots.messages import StepOutputs
from tests.helpers.tiny_adapters import TinyAdapters

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[72, 101, 32, 7 + number, 101, 120, 55, 31, 9] for number in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyAdapters(tmp_path_factory.mktemp("tiny")).model


def start(model: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, **settings}
    return LLM(str(model), **given)


def order_of_endings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Request ids, filled as requests end."""
    ended: list[int] = []
    step = llm._loop.step

    def watched() -> StepOutputs:
        outputs = step()
        ended.extend(int(o.request_id) for o in outputs if o.finish_reason is not None)
        return outputs

    monkeypatch.setattr(llm._loop, "step", watched)
    return ended


def test_l08_the_most_important_prompt_is_completed_first(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L08: one row; each prompt still gives what it gives alone, in the order of the prompts."""
    with start(model, scheduling_policy="priority", max_num_seqs=1) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
        ended = order_of_endings(llm, monkeypatch)
        results = llm.generate(PROMPTS, GREEDY, priority=[3, 0, 2, 1])
    assert [result.outputs[0].token_ids for result in results] == alone
    first = min(ended)
    assert [number - first for number in ended] == [1, 3, 2, 0]


def test_l08_priority_is_refused_where_it_would_have_no_effect(model: Path) -> None:
    """L08: and so is a list of another length than the prompts'."""
    with start(model) as llm:
        with pytest.raises(RequestError, match=r"priority is 2.*scheduling-policy priority"):
            llm.generate(PROMPTS, GREEDY, priority=2)
        with pytest.raises(RequestError, match="4 prompts came with 2 entries of priority"):
            llm.generate(PROMPTS, GREEDY, priority=[0, 0])
        assert len(llm.generate(PROMPTS, GREEDY, priority=0)) == 4
