"""A chat's choices as events: what the routes that speak of messages have in common.

Takes a `Job` of a chat; gives, for each choice, what was thought, said and called, as it comes or
whole, and why it ended. How that is written is each route's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from manyroots.api.generation import Collected, collect, generate
from manyroots.api.preprocess import Job
from manyroots.api.responses import Usage
from manyroots.messages import FinishReason
from manyroots.text.assembler import TextDelta
from manyroots.text.chat_output import Answer, ChatEvent, ChatOutput

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools; the others are the engine's."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What was added to one choice."""

    index: int
    events: list[ChatEvent]
    delta: TextDelta
    """The same before its format was read: its tokens and logprobs, and why it stopped."""
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """One choice, finished."""

    answer: Answer
    made: Collected
    finish_reason: str | None


async def answer_deltas(job: Job) -> AsyncGenerator[list[AnswerDelta], None]:
    """Everything the choices say, as it comes."""
    outputs = [job.new_output() for _ in job.submits]
    generated = generate(job.service, job.submits, job.watch, job.shown_ids)
    async with aclosing(generated) as batches:
        async for batch in batches:
            yield [_answer_delta(index, outputs[index], delta) for index, delta in batch]


def _answer_delta(index: int, output: ChatOutput, delta: TextDelta) -> AnswerDelta:
    events = output.push(delta.text)
    if delta.finish_reason is None:
        return AnswerDelta(index, events, delta, None)
    events += output.finish()
    return AnswerDelta(index, events, delta, _reason(delta.finish_reason.value, output))


async def whole_answers(job: Job) -> tuple[list[WholeAnswer], Usage]:
    """Every choice once it is finished."""
    generated = generate(job.service, job.submits, job.watch, job.shown_ids)
    collected, usage = await collect(generated, job.submits, job.n)
    return [_whole(job, made) for made in collected], usage


def _whole(job: Job, made: Collected) -> WholeAnswer:
    output = job.new_output()
    output.push(made.text)
    output.finish()
    return WholeAnswer(output.answer, made, _reason(made.finish_reason, output))


def _reason(reason: str | None, output: ChatOutput) -> str | None:
    called = output.has_calls and reason == FinishReason.STOP.value
    return TOOL_CALLS if called else reason
