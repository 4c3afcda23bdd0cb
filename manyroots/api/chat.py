"""POST /v1/chat/completions

Takes OpenAI's request, gives its response, whole or streamed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.body import read_request
from manyroots.api.checks import wanted_usage
from manyroots.api.events import DONE, EventStream, answer, event
from manyroots.api.generation import Collected, UsageCount, collect, generate
from manyroots.api.jobs import Job, chat_job
from manyroots.api.logprobs import chat_logprobs, prompt_logprobs
from manyroots.api.requests import ChatRequest
from manyroots.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from manyroots.api.state import server_of
from manyroots.text.assembler import TextDelta


async def chat_completions(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, ChatRequest, max_bytes=server.settings.max_body_bytes)
    job = await chat_job(server, body, request.headers)
    if body.stream:
        return EventStream(_chunks(job, body), job.permits)
    with job.permits:
        return await answer(request, _whole(job, body))


async def _whole(job: Job, request: ChatRequest) -> ChatCompletion:
    collected, usage = await collect(job.service, job.submits, job.n, job.watch)
    completion = ChatCompletion(
        id=job.id,
        created=job.created,
        model=request.model,
        choices=[_choice(job, request, index, made) for index, made in enumerate(collected)],
        usage=usage,
    )
    if request.prompt_logprobs is not None:
        scores = collected[0].prompt_logprobs
        completion.prompt_logprobs = prompt_logprobs(job.service.tokenizer, scores)
    if request.return_token_ids:
        completion.prompt_token_ids = list(job.submits[0].prompt)
    return completion


def _choice(job: Job, request: ChatRequest, index: int, made: Collected) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ChatMessage(made.text),
        logprobs=_logprobs(job, request, made),
        finish_reason=made.finish_reason,
        stop_reason=made.stop_reason,
        token_ids=made.tokens if request.return_token_ids else msgspec.UNSET,
    )


async def _chunks(job: Job, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    wants_usage, is_continuous = wanted_usage(request)
    chunk = ChatChunk(
        id=job.id,
        created=job.created,
        model=request.model,
        choices=[],
        usage=None if wants_usage else msgspec.UNSET,
    )
    # With the first output and not before: until then the status can still say what went wrong.
    events: list[bytes] = []
    for index in range(len(job.submits)):
        chunk.choices = [ChatChunkChoice(index=index, delta=ChatDelta("assistant", ""))]
        events.append(event(chunk))
    count = UsageCount(job.submits, job.n)
    async with aclosing(generate(job.service, job.submits, job.watch)) as batches:
        async for batch in batches:
            for index, delta in batch:
                count.add(index, delta)
                if is_continuous:
                    chunk.usage = count.usage()
                for choice in _chunk_choices(job, request, index, delta):
                    chunk.choices = [choice]
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
            events.clear()
    if wants_usage:
        chunk.choices, chunk.usage = [], count.usage()
        yield event(chunk)
    yield DONE


def _chunk_choices(
    job: Job, request: ChatRequest, index: int, delta: TextDelta
) -> list[ChatChunkChoice]:
    """The text, then the end in a chunk of its own, as OpenAI sends them."""
    choices: list[ChatChunkChoice] = []
    has_ids = request.return_token_ids and delta.tokens  # half a character has no text yet
    if delta.text or delta.logprobs or has_ids:
        choices.append(
            ChatChunkChoice(
                index=index,
                delta=ChatDelta(content=delta.text),
                logprobs=_logprobs(job, request, delta),
                token_ids=delta.tokens if request.return_token_ids else msgspec.UNSET,
            )
        )
    if delta.finish_reason is not None:
        choices.append(
            ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=delta.finish_reason.value,
                stop_reason=delta.stop_reason,
            )
        )
    return choices


def _logprobs(job: Job, request: ChatRequest, made: Collected | TextDelta) -> ChatLogprobs | None:
    return chat_logprobs(job.service.tokenizer, made.logprobs) if request.logprobs else None
