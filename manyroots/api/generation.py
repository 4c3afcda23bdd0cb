"""Runs a request's sequences and merges what they give.

Takes `Submit`s; gives batches of (choice index, `TextDelta`) as they come, several at once where
several are ready. Ending the iteration early, for whatever reason, aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import cast

from manyroots.api.errors import GenerationError
from manyroots.api.responses import (
    CachedByTier,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from manyroots.api.state import Service
from manyroots.errors import ManyrootsError, NotFoundError, RequestError, UnavailableError
from manyroots.messages import CacheUse, ErrorKind, FinishReason, Output, Submit
from manyroots.observe.requests import RequestWatch
from manyroots.step import TokenLogprobs
from manyroots.text.assembler import TextAssembler, TextDelta

TextBatch = list[tuple[int, TextDelta]]
Outputs = AsyncGenerator[Output, None]
"""What the engine's iterators are: that they can be closed is their documented contract."""


async def generate(
    service: Service,
    submits: Sequence[Submit],
    watch: RequestWatch,
    shown_ids: frozenset[int] = frozenset(),
) -> AsyncGenerator[TextBatch, None]:
    """Deltas of all sequences until each has finished. The index is the place in `submits`.
    `shown_ids`: special tokens that are part of the text."""
    reason = FinishReason.ABORT
    try:
        if len(submits) == 1:
            # Most have one: no tasks and no queue, and as few generators as can be, each of which
            # every token passes.
            sequence = _Sequence(service, submits[0], shown_ids)
            with closing(sequence):
                async with aclosing(sequence.outputs) as outputs:
                    async for output in outputs:
                        delta = sequence.take(output)
                        _tell(watch, 0, delta)
                        yield [(0, delta)]
                        if delta.finish_reason is not None:
                            break
            return
        async with aclosing(_merged(service, submits, shown_ids)) as batches:
            async for batch in batches:
                for index, delta in batch:
                    _tell(watch, index, delta)
                yield batch
    except Exception:
        reason = FinishReason.ERROR
        raise
    finally:
        watch.end(reason.value)


def _tell(watch: RequestWatch, index: int, delta: TextDelta) -> None:
    end = None if delta.finish_reason is None else delta.finish_reason.value
    watch.saw(index, delta.tokens, delta.num_cached_tokens, end)


async def _merged(
    service: Service, submits: Sequence[Submit], shown_ids: frozenset[int]
) -> AsyncGenerator[TextBatch, None]:
    ready: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()

    async def pump(index: int, submit: Submit) -> None:
        try:
            sequence = _Sequence(service, submit, shown_ids)
            with closing(sequence):
                async with aclosing(sequence.outputs) as outputs:
                    async for output in outputs:
                        delta = sequence.take(output)
                        ready.put_nowait((index, delta))
                        if delta.finish_reason is not None:
                            break
        except Exception as error:  # raised again below, in the task of the request
            ready.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, submit)) for index, submit in enumerate(submits)]
    num_running = len(tasks)
    try:
        while num_running:
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            batch: TextBatch = []
            for index, item in items:
                if isinstance(item, Exception):
                    raise item
                batch.append((index, item))
                num_running -= item.finish_reason is not None
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Sequence:
    """One sequence: the engine's outputs of it, what they say, and how it ended."""

    __slots__ = ("_assembler", "_reason", "_timer", "outputs")

    def __init__(self, service: Service, submit: Submit, shown_ids: frozenset[int]) -> None:
        self._assembler = TextAssembler(service.tokenizer, submit.sampling, shown_ids)
        adapter = service.adapters.label(submit.adapter)
        self._timer = service.metrics.sequence(submit.request_id, len(submit.prompt), adapter)
        self._reason = FinishReason.ABORT
        # The protocol promises only an iterator; that it can be closed is its documented contract.
        self.outputs = cast(AsyncGenerator[Output, None], service.engine.generate(submit))

    def take(self, output: Output) -> TextDelta:
        """Raises what an output says that ends the sequence without an answer."""
        delta = self._assembler.push(output)
        if output.adapter_was is not None:
            self._timer.adapter_was = output.adapter_was
        if output.cache_use is not None:
            self._timer.reused(output.num_cached_tokens)
        self._timer.tokens(len(delta.tokens))
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._reason = output.finish_reason
            raise failure_of(output)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        return delta

    def close(self) -> None:
        self._timer.finish(self._reason.value)


def failure_of(output: Output) -> ManyrootsError:
    """What an unfinished sequence means to its caller."""
    if output.finish_reason is FinishReason.ABORT:
        return UnavailableError("The engine gave up this sequence; try again.")
    match output.error_kind:
        case ErrorKind.NOT_FOUND:
            return NotFoundError(str(output.error), field="model")
        case ErrorKind.UNAVAILABLE:
            return UnavailableError(str(output.error))
        case ErrorKind.REQUEST:
            field = None if output.notice is None else output.notice.error_field
            return RequestError(str(output.error), field=field or "model")
    return GenerationError(f"The engine could not finish this sequence: {output.error}")


@dataclass(slots=True)
class Collected:
    """One choice, whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    revision: str | None = None
    """Of the adapter that computed it."""

    def add(self, delta: TextDelta) -> None:
        self.revision = self.revision or delta.revision
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.prompt_logprobs += delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


class UsageCount:
    """Counts a request's tokens. Its prompts count once, however many choices each has."""

    def __init__(self, submits: Sequence[Submit], n: int) -> None:
        self._n = n
        self._num_prompt_tokens = sum(len(submit.prompt) for submit in submits[::n])
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}
        self._uses: dict[int, CacheUse] = {}
        self._num_draft_tokens = self._num_accepted_tokens = 0

    def add(self, index: int, delta: TextDelta) -> None:
        self._num_completion_tokens += len(delta.tokens)
        if delta.drafts is not None:
            self._num_draft_tokens += delta.drafts.num_draft_tokens
            self._num_accepted_tokens += delta.drafts.num_accepted_tokens
        # Later choices reuse the first one's prompt; what the request saved is the first's number.
        if index % self._n == 0:
            self._num_cached_tokens[index] = delta.num_cached_tokens
            if delta.cache_use is not None:
                self._uses[index] = delta.cache_use

    def usage(self) -> Usage:
        usage = Usage(
            self._num_prompt_tokens,
            self._num_completion_tokens,
            self._num_prompt_tokens + self._num_completion_tokens,
            self._details(),
        )
        if self._num_draft_tokens:
            num_rejected = self._num_draft_tokens - self._num_accepted_tokens
            usage.completion_tokens_details = CompletionTokensDetails(
                self._num_accepted_tokens, num_rejected
            )
        return usage

    def _details(self) -> PromptTokensDetails:
        details = PromptTokensDetails(sum(self._num_cached_tokens.values()))
        uses = list(self._uses.values())
        if uses:
            host = sum(use.num_host_tokens for use in uses)
            stored = sum(use.num_storage_tokens for use in uses)
            device = details.cached_tokens - host - stored
            details.cached_by_tier = CachedByTier(device, host, stored)
            details.uncached_because = uses[0].limit
        return details


async def collect(
    generated: AsyncGenerator[TextBatch, None], submits: Sequence[Submit], n: int
) -> tuple[list[Collected], Usage]:
    """Every choice, whole."""
    choices = [Collected() for _ in submits]
    count = UsageCount(submits, n)
    async with aclosing(generated) as batches:
        async for batch in batches:
            for index, delta in batch:
                choices[index].add(delta)
                count.add(index, delta)
    return choices, count.usage()
