"""POST /v1/messages and POST /v1/messages/count_tokens

Takes Anthropic's request, gives its message, whole or as events. A chat underneath: the same
template, tools and parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.anthropic.cache_control import LIFETIMES_S, PRIORITIES, marks
from manyroots.api.anthropic.conversion import chat_request
from manyroots.api.anthropic.shapes import (
    NAMES,
    CacheCreation,
    CountTokensRequest,
    MessageAnswer,
    MessageDeltaUsage,
    MessagesRequest,
    MessageUsage,
    ThinkingTokens,
    TokenCount,
)
from manyroots.api.anthropic.writer import BlockEvent, BlockWriter
from manyroots.api.body import beside_reading
from manyroots.api.chat_stream import TOOL_CALLS, AnswerDelta, answer_deltas
from manyroots.api.errors import anthropic_error, renamed
from manyroots.api.events import EventStream, answer, json_response, named_event
from manyroots.api.generation import UsageCount
from manyroots.api.offered_tools import tool_use
from manyroots.api.preprocess import ChatMark, Job, chat_job, encode_chat
from manyroots.api.requests import ChatRequest
from manyroots.api.state import Service, server_of
from manyroots.messages import FinishReason
from manyroots.text.chat_output import ReasoningDelta

U = TypeVar("U", bound=MessageDeltaUsage)


async def messages(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, MessagesRequest)
    with renamed(NAMES):
        options = _template_options(server.accepting)
        chat, keeps = await beside_reading(request, lambda: _conversation(body, options))
        job = await chat_job(server, chat, request.headers, keeps)
    making = _MessageMaking(job, body)
    if body.stream:
        return EventStream(making.stream(), job.permits, last_words=_failure)
    with job.permits:
        return await answer(request, making.whole())


async def count_tokens(request: Request) -> Response:
    """How many tokens a message's prompt has."""
    server = server_of(request)
    body = await server.read(request, CountTokensRequest)
    service = server.service
    service.adapters.resolve(body.model)
    options = _template_options(service)
    chat = await beside_reading(request, lambda: chat_request(body, options))
    use = await beside_reading(request, lambda: tool_use(chat, server.notices))
    _, tokens = await asyncio.to_thread(encode_chat, service, chat, use)
    return json_response(TokenCount(len(tokens)))


def _conversation(
    body: MessagesRequest, options: frozenset[str]
) -> tuple[ChatRequest, list[ChatMark]]:
    """The request as a chat, and the places up to which it is to be kept."""
    keeps = [
        ChatMark(chat_request(cut, options), PRIORITIES[for_s], for_s) for cut, for_s in marks(body)
    ]
    return chat_request(body, options), keeps


def _template_options(service: Service) -> frozenset[str]:
    return frozenset() if service.template is None else frozenset(service.template.options)


def _failure(error: Exception) -> bytes:
    """The last event of a stream that can't go on."""
    _, body = anthropic_error(error)
    return named_event("error", body)


class _MessageMaking:
    """One message, as it comes about."""

    def __init__(self, job: Job, request: MessagesRequest) -> None:
        self._job = job
        self._max_tokens = request.max_tokens
        self._blocks = BlockWriter()
        self._count = UsageCount(job.submits, job.n)
        self._num_thinking_tokens = 0
        self._message = MessageAnswer(
            id="msg_" + job.id.partition("-")[2],
            model=request.model,
            content=[],
            usage=self._usage(MessageUsage),
        )

    async def whole(self) -> MessageAnswer:
        async with aclosing(answer_deltas(self._job)) as batches:
            async for batch in batches:
                for delta in batch:
                    self._take(delta)
        self._blocks.close()
        self._message.content = self._blocks.blocks
        self._message.usage = self._usage(MessageUsage)
        return self._message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        # With the first output and not before: until then the status can still say what went wrong.
        data = b""
        async with aclosing(answer_deltas(self._job)) as batches:
            async for batch in batches:
                events: list[BlockEvent] = []
                for delta in batch:
                    events += self._take(delta)
                if not data:
                    start = {"type": "message_start", "message": self._begun()}
                    data = named_event("message_start", start)
                    yield data
                if events:
                    yield b"".join(named_event(item["type"], item) for item in events)
        ending = [
            *self._blocks.close(),
            {
                "type": "message_delta",
                "delta": {
                    "stop_reason": self._message.stop_reason,
                    "stop_sequence": self._message.stop_sequence,
                    "stop_details": self._message.stop_details,
                    "container": self._message.container,
                },
                "usage": self._usage(MessageDeltaUsage),
            },
            {"type": "message_stop"},
        ]
        yield b"".join(named_event(item["type"], item) for item in ending)

    def _begun(self) -> MessageAnswer:
        """The message before it says anything; what was cached is known by now."""
        usage = self._usage(MessageUsage)
        usage.output_tokens = usage.output_tokens_details.thinking_tokens = 0
        empty: dict[str, Any] = {
            "stop_reason": None,
            "stop_sequence": None,
            "content": [],
            "usage": usage,
        }
        return msgspec.structs.replace(self._message, **empty)

    def _take(self, added: AnswerDelta) -> list[BlockEvent]:
        self._count.add(added.index, added.delta)
        if added.delta.revision:
            self._message.adapter_revision = added.delta.revision
        if any(isinstance(said, ReasoningDelta) for said in added.events):
            self._num_thinking_tokens += len(added.delta.tokens)
        if added.finish_reason is not None:
            self._end(added)
        return [event for said in added.events for event in self._blocks.add(said)]

    def _end(self, added: AnswerDelta) -> None:
        stop = added.delta.stop_reason
        match added.finish_reason:
            case FinishReason.LENGTH.value:
                is_full = self._count.usage().completion_tokens < self._max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
                self._message.stop_reason = reason
            case reason if reason == TOOL_CALLS:
                self._message.stop_reason = "tool_use"
            case _ if isinstance(stop, str):
                self._message.stop_reason, self._message.stop_sequence = "stop_sequence", stop
            case _:
                self._message.stop_reason = "end_turn"

    def _usage(self, kind: type[U]) -> U:
        usage = self._count.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        created = self._created(num_cached)
        num_created = created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens
        made = kind(
            input_tokens=usage.prompt_tokens - num_cached - num_created,
            cache_creation_input_tokens=num_created,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(self._num_thinking_tokens),
            cache_read_input_tokens=num_cached,
        )
        if isinstance(made, MessageUsage):
            made.cache_creation = created
        return made

    def _created(self, num_cached: int) -> CacheCreation:
        """Tokens that were marked and not cached yet, as whole pages."""
        created, retention = CacheCreation(), self._job.submits[0].retention
        page_size, first = self._job.service.engine.info.page_size, num_cached
        for marked in sorted(retention.ranges if retention else (), key=lambda r: r.until_token):
            end = max(first, marked.until_token // page_size * page_size)
            if marked.for_s == LIFETIMES_S["1h"]:
                created.ephemeral_1h_input_tokens += end - first
            else:
                created.ephemeral_5m_input_tokens += end - first
            first = end
        return created
