"""What is compared of hits that are computed again."""

from __future__ import annotations

import pytest

from manyroots.engine.self_check import SelfCheck
from manyroots.ids import RequestId
from manyroots.messages import FinishReason, Output, StepOutputs, Submit
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs


@pytest.mark.parametrize("changes", [False, True])
def test_r09_answers_of_different_weights_are_not_compared(changes: bool) -> None:
    """R09, G06: weights may change while a check waits in the queue."""
    asked: list[Submit] = []
    check = SelfCheck(1.0, 0.1, asked.append, lambda submit: "pages")
    submit = Submit(RequestId(1), [5] * 9, None, SamplingParams(), 0, (), None)
    check.note(submit)
    check.take(StepOutputs([Output(RequestId(1), [7], None, 8)]))
    assert len(asked) == 2
    for number, one in enumerate(asked):
        if number == 1 and changes:
            assert check.give_up() == [one.request_id]
        scores = [TokenLogprobs(7, -0.5 - number, 1, (), ())]
        answer = Output(one.request_id, [7], FinishReason.LENGTH, 8, logprobs=scores)
        check.take(StepOutputs([answer]))
    assert (check.total_checks, check.total_differences) == ((0, 0) if changes else (1, 1))
