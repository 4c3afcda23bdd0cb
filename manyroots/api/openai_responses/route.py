"""POST /v1/responses and POST /v1/responses/input_tokens

Takes OpenAI's request, gives its response, whole or as events, or the length of its prompt. A chat
underneath: the same template, tools and parsers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.body import beside_reading
from manyroots.api.chat_stream import AnswerDelta, answer_deltas
from manyroots.api.errors import error_body, renamed
from manyroots.api.events import EventStream, answer, json_response, named_event
from manyroots.api.generation import UsageCount
from manyroots.api.logprobs import chat_logprobs
from manyroots.api.offered_tools import tool_use
from manyroots.api.openai_responses.conversion import chat_request
from manyroots.api.openai_responses.shapes import (
    NAMES,
    IncompleteDetails,
    InputTokenCount,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextOptions,
)
from manyroots.api.openai_responses.tools import callers_tools
from manyroots.api.openai_responses.writer import Event, ItemWriter
from manyroots.api.preprocess import Job, chat_job, encode_chat
from manyroots.api.requests import ChatRequest
from manyroots.api.responses import Usage
from manyroots.api.state import server_of
from manyroots.messages import FinishReason
from manyroots.step import TokenLogprobs
from manyroots.text.chat_output import ChatEvent, ContentDelta, ReasoningDelta


async def responses(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, ResponsesRequest)
    with renamed(NAMES):
        chat = await beside_reading(request, lambda: chat_request(body, server.notices))
        job = await chat_job(server, chat, request.headers)
    making = _Making(job, body, chat)
    if body.stream:
        return EventStream(making.stream(), job.permits, making.failure, making.sign_of_life)
    with job.permits:
        return await answer(request, making.whole())


async def count_input_tokens(request: Request) -> Response:
    """How many tokens a response's prompt has."""
    server = server_of(request)
    body = await server.read(request, ResponsesRequest)
    service = server.service
    with renamed(NAMES):
        service.adapters.resolve(body.model)
        chat = await beside_reading(request, lambda: chat_request(body, server.notices))
        use = await beside_reading(request, lambda: tool_use(chat, server.notices))
        _, tokens = await asyncio.to_thread(encode_chat, service, chat, use)
    return json_response(InputTokenCount(len(tokens)))


class _Making:
    """One response, as it comes about."""

    def __init__(self, job: Job, request: ResponsesRequest, chat: ChatRequest) -> None:
        self._job = job
        self._chat = chat
        self._items = ItemWriter(callers_tools(request.tools or ()))
        self._count = UsageCount(job.submits, job.n)
        self._num_reasoning_tokens = 0
        self._num_events = 0
        self._finish_reason: str | None = None
        self._unsaid: list[TokenLogprobs] = []
        """Of tokens whose text is held back: part of a character, or perhaps of a stop string."""
        sampling = job.submits[0].sampling
        self._response = ResponseObject(
            id="resp_" + job.id.partition("-")[2],
            created_at=job.created,
            status="in_progress",
            model=request.model,
            output=[],
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning,
            temperature=sampling.temperature,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            text=TextOptions(format=_format(request), verbosity="medium"),
            tool_choice=request.tool_choice or "auto",
            tools=[_shown_tool(tool) for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            prompt_cache_key=request.prompt_cache_key,
            safety_identifier=request.safety_identifier,
            user=request.user,
        )

    async def whole(self) -> ResponseObject:
        async with aclosing(answer_deltas(self._job)) as batches:
            async for batch in batches:
                for delta in batch:
                    self._take(delta)
        self._end()
        return self._response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        # With the first output and not before: until then the status can still say what went wrong.
        async with aclosing(answer_deltas(self._job)) as batches:
            async for batch in batches:
                data = self._told([event for delta in batch for event in self._take(delta)])
                if data:
                    yield data
        yield self._told([*self._end(), self._ended()])

    def failure(self, error: Exception) -> bytes:
        """The last events of a stream that can't go on. Codex reads only the second."""
        detail = error_body(error)[1].error
        self._response.status = "failed"
        self._response.error = ResponseFailure("server_error", detail.message)
        fields = {"code": detail.code, "message": detail.message, "param": detail.param}
        return self._told([("error", fields), self._ended()])

    def sign_of_life(self) -> bytes:
        """While nothing else comes. Codex waits 300 s for an event, whatever comments come."""
        waiting = ("response.in_progress", {"response": self._response})
        return self._told([waiting] if self._num_events else [])

    def _take(self, added: AnswerDelta) -> list[Event]:
        self._count.add(added.index, added.delta)
        if added.delta.revision:
            self._response.adapter_revision = added.delta.revision
        if any(isinstance(said, ReasoningDelta) for said in added.events):
            self._num_reasoning_tokens += len(added.delta.tokens)
        if added.finish_reason is not None:
            self._finish_reason = added.finish_reason
        events: list[Event] = []
        self._unsaid += added.delta.logprobs
        for said in added.events:
            events += self._items.add(said, self._logprobs(said))
        if added.events:  # what is left was of thoughts or calls
            self._unsaid = []
        return events

    def _logprobs(self, said: ChatEvent) -> list[Any]:
        """Of the tokens up to these words, without marks, which are no words."""
        if not isinstance(said, ContentDelta) or not self._unsaid:
            return []
        entries, self._unsaid = self._unsaid, []
        tokenizer = self._job.service.tokenizer
        marks = tokenizer.special_ids | self._job.shown_ids
        words = [entry for entry in entries if entry.token not in marks]
        return list(chat_logprobs(tokenizer, words).content)

    def _end(self) -> list[Event]:
        is_cut = self._finish_reason == FinishReason.LENGTH.value
        events = self._items.close("incomplete" if is_cut else "completed")
        self._response.output = list(self._items.items)
        self._response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._response.completed_at = int(time.time())
        self._response.usage = _usage(self._count.usage(), self._num_reasoning_tokens)
        return events

    def _ended(self) -> Event:
        return f"response.{self._response.status}", {"response": self._response}

    def _told(self, events: list[Event]) -> bytes:
        """Events with their numbers; the first of all say that the response has begun."""
        if self._num_events == 0:
            response = msgspec.structs.replace(self._response, status="in_progress", error=None)
            begun = ("response.created", "response.in_progress")
            events = [*((kind, {"response": response}) for kind in begun), *events]
        data = b""
        for kind, fields in events:
            number = {"type": kind, "sequence_number": self._num_events}
            data += named_event(kind, number | fields)
            self._num_events += 1
        return data


def _format(request: ResponsesRequest) -> dict[str, Any]:
    chosen = None if request.text is None else request.text.format
    return {"type": "text"} if chosen is None else chosen


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With every field that a function has, said or not."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None} | tool


def _usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(num_reasoning_tokens),
        usage.total_tokens,
    )
