"""POST /v1/chat/completions

Takes OpenAI's request, gives its response, whole or streamed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.chat_stream import AnswerDelta, WholeAnswer, answer_deltas, whole_answers
from manyroots.api.checks import wanted_usage
from manyroots.api.events import DONE, EventStream, answer, event
from manyroots.api.generation import Collected, UsageCount
from manyroots.api.logprobs import chat_logprobs, prompt_logprobs
from manyroots.api.preprocess import Job, chat_job
from manyroots.api.requests import ChatRequest
from manyroots.api.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    ChatToolCallDelta,
)
from manyroots.api.state import server_of
from manyroots.text.assembler import TextDelta
from manyroots.text.chat_output import (
    Answer,
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegins,
)


async def chat_completions(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, ChatRequest)
    job = await chat_job(server, body, request.headers)
    if body.stream:
        return EventStream(_chunks(job, body), job.permits)
    with job.permits:
        return await answer(request, _whole(job, body))


async def _whole(job: Job, request: ChatRequest) -> ChatCompletion:
    answers, usage = await whole_answers(job)
    completion = ChatCompletion(
        id=job.id,
        created=job.created,
        model=request.model,
        choices=[_choice(job, request, index, made) for index, made in enumerate(answers)],
        usage=usage,
    )
    if request.prompt_logprobs is not None:
        scores = answers[0].made.prompt_logprobs
        completion.prompt_logprobs = prompt_logprobs(job.service.tokenizer, scores)
    if request.return_token_ids:
        completion.prompt_token_ids = list(job.submits[0].prompt)
    return completion


def _choice(job: Job, request: ChatRequest, index: int, whole: WholeAnswer) -> ChatChoice:
    made = whole.made
    return ChatChoice(
        index=index,
        message=_message(whole.answer, request.include_reasoning is not False),
        logprobs=_logprobs(job, request, made),
        finish_reason=whole.finish_reason,
        stop_reason=made.stop_reason,
        token_ids=made.tokens if request.return_token_ids else msgspec.UNSET,
        adapter_revision=made.revision or msgspec.UNSET,
    )


def _message(said: Answer, with_reasoning: bool) -> ChatMessage:
    is_silent = bool(said.tool_calls or said.reasoning)  # then no content is null, not ""
    message = ChatMessage(said.content if is_silent else said.content or "")
    if said.reasoning is not None and with_reasoning:
        message.reasoning_content = said.reasoning
    if said.tool_calls:
        message.tool_calls = [
            ChatToolCall(call.id, CalledFunction(call.name, call.arguments))
            for call in said.tool_calls
        ]
    return message


async def _chunks(job: Job, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    wants_usage, is_continuous = wanted_usage(request)
    chunk = ChatChunk(
        id=job.id,
        created=job.created,
        model=request.model,
        choices=[],
        usage=None if wants_usage else msgspec.UNSET,
    )
    count = UsageCount(job.submits, job.n)
    if is_continuous:
        chunk.usage = count.usage()
    # With the first output and not before: until then the status can still say what went wrong.
    events: list[bytes] = []
    for index in range(len(job.submits)):
        chunk.choices = [ChatChunkChoice(index=index, delta=ChatDelta("assistant", ""))]
        events.append(event(chunk))
    async with aclosing(answer_deltas(job)) as batches:
        async for batch in batches:
            for delta in batch:
                count.add(delta.index, delta.delta)
                if is_continuous:
                    chunk.usage = count.usage()
                for choice in _chunk_choices(job, request, delta):
                    chunk.choices = [choice]
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
            events.clear()
    if wants_usage:
        chunk.choices, chunk.usage = [], count.usage()
        yield event(chunk)
    yield DONE


def _chunk_choices(job: Job, request: ChatRequest, added: AnswerDelta) -> list[ChatChunkChoice]:
    """What was said, then the end in a chunk of its own, as OpenAI sends them."""
    delta = added.delta
    said = [
        _delta(event)
        for event in added.events
        if request.include_reasoning is not False or not isinstance(event, ReasoningDelta)
    ]
    # Tokens without text (half a character, a mark) have their logprobs and ids all the same.
    has_more = delta.logprobs or (request.return_token_ids and delta.tokens) or delta.revision
    if not said and has_more:
        said = [ChatDelta(content="")]
    choices = [ChatChunkChoice(index=added.index, delta=item) for item in said]
    if choices:
        choices[0].logprobs = _logprobs(job, request, delta)
        choices[0].token_ids = delta.tokens if request.return_token_ids else msgspec.UNSET
        choices[0].adapter_revision = delta.revision or msgspec.UNSET
    if added.finish_reason is not None:
        choices.append(
            ChatChunkChoice(
                index=added.index,
                delta=ChatDelta(),
                finish_reason=added.finish_reason,
                stop_reason=delta.stop_reason,
            )
        )
    return choices


def _delta(event: ChatEvent) -> ChatDelta:
    match event:
        case ContentDelta():
            return ChatDelta(content=event.text)
        case ReasoningDelta():
            return ChatDelta(reasoning_content=event.text)
        case ToolCallBegins():
            function = CalledFunction(event.name, "")
            return ChatDelta(
                tool_calls=[ChatToolCallDelta(event.index, function, event.id, "function")]
            )
        case ToolCallArguments():
            function = CalledFunction(msgspec.UNSET, event.text)
            return ChatDelta(tool_calls=[ChatToolCallDelta(event.index, function)])


def _logprobs(job: Job, request: ChatRequest, made: Collected | TextDelta) -> ChatLogprobs | None:
    if not request.logprobs:
        return None
    by_id = request.return_tokens_as_token_ids
    return chat_logprobs(job.service.tokenizer, made.logprobs, by_id=by_id)
