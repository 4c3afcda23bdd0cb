"""POST /v1/completions

Takes OpenAI's request, gives its response, whole or streamed. Choices are numbered prompt by
prompt: with n = 2, choices 2 and 3 belong to the second prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.checks import is_only_echo, wanted_usage
from manyroots.api.events import DONE, EventStream, answer, event
from manyroots.api.generation import Collected, TextBatch, UsageCount, collect, generate
from manyroots.api.logprobs import (
    Naming,
    completion_logprobs,
    echoed_logprobs,
    joined,
    naming,
    prompt_logprobs,
)
from manyroots.api.preprocess import Job, completion_job
from manyroots.api.requests import CompletionRequest
from manyroots.api.responses import Completion, CompletionChoice, CompletionLogprobs
from manyroots.api.state import server_of
from manyroots.messages import FinishReason
from manyroots.step import TokenLogprobs
from manyroots.text.assembler import TextDelta


async def completions(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, CompletionRequest)
    job = await completion_job(server, body, request.headers)
    if body.stream:
        return EventStream(_chunks(job, body), job.permits)
    with job.permits:
        return await answer(request, _whole(job, body))


def _batches(job: Job, request: CompletionRequest) -> AsyncGenerator[TextBatch, None]:
    generated = generate(job.service, job.submits, job.watch)
    if is_only_echo(request):
        generated = _silenced(generated)
    is_scored = request.stream and request.echo and request.logprobs is not None
    return _first_choices_first(generated, job.n) if is_scored and job.n > 1 else generated


async def _first_choices_first(
    generated: AsyncGenerator[TextBatch, None], n: int
) -> AsyncGenerator[TextBatch, None]:
    """A prompt's later choices wait for its first one, which alone has the prompt's logprobs."""
    told: set[int] = set()
    waiting: dict[int, TextBatch] = {}
    async with aclosing(generated) as batches:
        async for batch in batches:
            ready: TextBatch = []
            for index, delta in batch:
                place = index // n
                if index % n == 0 and place not in told:
                    told.add(place)
                    ready += [(index, delta), *waiting.pop(place, [])]
                elif place in told:
                    ready.append((index, delta))
                else:
                    waiting.setdefault(place, []).append((index, delta))
            if ready:
                yield ready


async def _silenced(generated: AsyncGenerator[TextBatch, None]) -> AsyncGenerator[TextBatch, None]:
    """Of sequences that were to say nothing: their prompts' logprobs, and their end."""
    async with aclosing(generated) as batches:
        async for batch in batches:
            yield [(index, _silent(delta)) for index, delta in batch]


def _silent(delta: TextDelta) -> TextDelta:
    reason = delta.finish_reason and FinishReason.LENGTH
    return replace(
        delta, text="", tokens=[], logprobs=[], offsets=[], finish_reason=reason, stop_reason=None
    )


async def _whole(job: Job, request: CompletionRequest) -> Completion:
    collected, usage = await collect(_batches(job, request), job.submits, job.n)
    choices = [_choice(job, request, collected, index) for index in range(len(collected))]
    return Completion(
        id=job.id, created=job.created, model=request.model, choices=choices, usage=usage
    )


def _choice(
    job: Job, request: CompletionRequest, collected: list[Collected], index: int
) -> CompletionChoice:
    made = collected[index]
    # Only a prompt's first choice has computed what all of them share.
    scores = collected[index - index % job.n].prompt_logprobs
    choice = CompletionChoice(
        index=index,
        text=made.text,
        logprobs=_logprobs(job, request, made),
        finish_reason=made.finish_reason,
        stop_reason=made.stop_reason,
        adapter_revision=made.revision or msgspec.UNSET,
    )
    if request.echo:
        echo = _echo(job, request, index, scores)
        choice.text = echo.text + made.text
        if choice.logprobs is not None and echo.logprobs is not None:
            choice.logprobs = joined(echo.logprobs, choice.logprobs, len(echo.text))
    if request.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs(job.service.tokenizer, scores)
    if request.return_token_ids:
        choice.token_ids = made.tokens
        choice.prompt_token_ids = list(job.submits[index].prompt)
    return choice


def _echo(
    job: Job, request: CompletionRequest, index: int, scores: Sequence[TokenLogprobs]
) -> CompletionChoice:
    """A choice's prompt, as the beginning of its text."""
    choice = CompletionChoice(index=index, text=job.prompt_text(index // job.n))
    if request.logprobs is not None:
        choice.logprobs = echoed_logprobs(
            job.service.tokenizer, job.submits[index].prompt, choice.text, scores,
            request.logprobs, _naming(job, request),
        )  # fmt: skip
    return choice


def _echoes(
    job: Job, request: CompletionRequest, place: int, scores: Sequence[TokenLogprobs]
) -> list[CompletionChoice]:
    """Of a prompt's choices: each begins with it."""
    first = _echo(job, request, place * job.n, scores)
    return [msgspec.structs.replace(first, index=first.index + choice) for choice in range(job.n)]


async def _chunks(job: Job, request: CompletionRequest) -> AsyncGenerator[bytes, None]:
    wants_usage, is_continuous = wanted_usage(request)
    chunk = Completion(
        id=job.id,
        created=job.created,
        model=request.model,
        choices=[],
        usage=None if wants_usage else msgspec.UNSET,
    )
    # With the first output and not before: until then the status can still say what went wrong.
    events: list[bytes] = []
    to_echo = set(range(len(job.submits) // job.n)) if request.echo else set()
    count = UsageCount(job.submits, job.n)
    async with aclosing(_batches(job, request)) as batches:
        async for batch in batches:
            for index, delta in batch:
                count.add(index, delta)
                if is_continuous:
                    chunk.usage = count.usage()
                if to_echo and index // job.n in to_echo:
                    to_echo.discard(index // job.n)
                    for choice in _echoes(job, request, index // job.n, delta.prompt_logprobs):
                        chunk.choices = [choice]
                        events.append(event(chunk))
                if _is_worth_sending(delta, request):
                    chunk.choices = [_chunk_choice(job, request, index, delta)]
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
            events.clear()
    if wants_usage:
        chunk.choices, chunk.usage = [], count.usage()
        yield event(chunk)
    yield DONE


def _is_worth_sending(delta: TextDelta, request: CompletionRequest) -> bool:
    has_ids = request.return_token_ids and delta.tokens  # half a character has no text yet
    return bool(delta.text or delta.logprobs or delta.finish_reason or has_ids or delta.revision)


def _chunk_choice(
    job: Job, request: CompletionRequest, index: int, delta: TextDelta
) -> CompletionChoice:
    logprobs = _logprobs(job, request, delta)
    if request.echo and logprobs is not None:
        _behind_echo(job, index, logprobs)
    return CompletionChoice(
        index=index,
        text=delta.text,
        logprobs=logprobs,
        finish_reason=delta.finish_reason.value if delta.finish_reason else None,
        stop_reason=delta.stop_reason,
        token_ids=delta.tokens if request.return_token_ids else msgspec.UNSET,
        adapter_revision=delta.revision or msgspec.UNSET,
    )


def _logprobs(
    job: Job, request: CompletionRequest, made: Collected | TextDelta
) -> CompletionLogprobs | None:
    if request.logprobs is None:
        return None
    return completion_logprobs(made.logprobs, made.offsets, _naming(job, request))


def _behind_echo(job: Job, index: int, logprobs: CompletionLogprobs) -> None:
    """Offsets in a text that begins with its prompt."""
    shift = len(job.prompt_text(index // job.n))
    logprobs.text_offset = [shift + offset for offset in logprobs.text_offset]


def _naming(job: Job, request: CompletionRequest) -> Naming:
    return naming(job.service.tokenizer, by_id=request.return_tokens_as_token_ids)
