"""POST /v1/embeddings

A text's vector is the model's hidden state after its last token, after the final norm, of length
1. Each text is a sequence like any other: it shares prefixes, batches and adapters, and its one
sampled token is dropped.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.errors import GenerationError, renamed
from manyroots.api.events import answer
from manyroots.api.generation import Outputs, failure_of
from manyroots.api.preprocess import Job, completion_job
from manyroots.api.requests import CompletionRequest, EmbeddingsRequest
from manyroots.api.responses import EmbeddedText, EmbeddingList, EmbeddingsUsage
from manyroots.api.state import ServerState, server_of
from manyroots.errors import RequestError
from manyroots.messages import FinishReason, Submit
from manyroots.step import Floats

_FORMATS = ("float", "base64")
MAX_TEXTS = 2048
"""In one request, as with OpenAI: clients fill their requests up to this number."""


async def embeddings(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, EmbeddingsRequest)
    _check(body)
    portions = _portions(body.input, server.settings.max_prompts_per_request)
    if len(portions) > 1:
        return await answer(request, _in_turn(server, body, request, portions))
    job = await embedding_job(server, body, request)
    with job.permits:
        return await answer(request, _whole(job, body))


def _portions(texts: str | list[Any], size: int) -> list[str | list[Any]]:
    """Texts that are computed together. Those beyond the limit are left in one, to be refused."""
    is_one = isinstance(texts, str) or all(type(token) is int for token in texts)
    if is_one or not size < len(texts) <= MAX_TEXTS:
        return [texts]
    return [texts[at : at + size] for at in range(0, len(texts), size)]


async def _in_turn(
    server: ServerState,
    request: EmbeddingsRequest,
    web: Request,
    portions: list[str | list[Any]],
) -> EmbeddingList:
    """More texts than a request may have sequences: one portion after the other."""
    vectors: list[Floats] = []
    num_tokens = 0
    for portion in portions:
        with _numbered_from(len(vectors)):
            asked = msgspec.structs.replace(request, input=portion)
            job = await embedding_job(server, asked, web)
        with job.permits:
            vectors += await embedding_vectors(job)
        num_tokens += _num_tokens(job)
    return _listed(request, vectors, num_tokens)


@contextmanager
def _numbered_from(first: int) -> Iterator[None]:
    """A fault of one text says which one it is among all."""
    try:
        yield
    except RequestError as error:
        text = re.sub(r"\binput\[(\d+)\]", lambda m: f"input[{first + int(m[1])}]", str(error))
        raise type(error)(text, field=error.field) from error


def _check(request: EmbeddingsRequest) -> None:
    if request.messages is not None:
        raise RequestError(
            "messages is not supported by this server: send the text as input.", field="messages"
        )
    if request.encoding_format not in (None, *_FORMATS):
        raise RequestError(
            f"encoding_format is {request.encoding_format!r:.60}; choose float or base64.",
            field="encoding_format",
        )


async def embedding_job(server: ServerState, request: EmbeddingsRequest, web: Request) -> Job:
    """A completion of one token for each text, which also gives its state."""
    asked = CompletionRequest(
        model=request.model,
        prompt=request.input,
        max_tokens=1,
        temperature=0.0,
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt,
        priority=request.priority,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        lora_path=request.lora_path,
    )
    with renamed({"prompt": "input"}):
        job = await completion_job(server, asked, web.headers)
    sampling = dataclasses.replace(job.submits[0].sampling, wants_hidden=True)
    submits = [dataclasses.replace(submit, sampling=sampling) for submit in job.submits]
    return dataclasses.replace(job, submits=submits)


async def _whole(job: Job, request: EmbeddingsRequest) -> EmbeddingList:
    return _listed(request, await embedding_vectors(job), _num_tokens(job))


def _num_tokens(job: Job) -> int:
    return sum(len(submit.prompt) for submit in job.submits)


def _listed(request: EmbeddingsRequest, vectors: list[Floats], num_tokens: int) -> EmbeddingList:
    length = len(vectors[0])
    if request.dimensions not in (None, length):
        # The model's own length is what clients such as mem0 send; here it is known by now only.
        raise RequestError(
            f"dimensions is {request.dimensions}; this model's vectors have {length}, and a hidden "
            "state has no other form that means the same. Remove it.",
            field="dimensions",
        )
    return EmbeddingList(
        data=[
            EmbeddedText(index=index, embedding=_written(vector, request.encoding_format))
            for index, vector in enumerate(vectors)
        ],
        model=request.model,
        usage=EmbeddingsUsage(num_tokens, num_tokens),
    )


async def embedding_vectors(job: Job) -> list[Floats]:
    """Of all texts of a job, each of length 1."""
    reason = FinishReason.ABORT  # if its caller goes away
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_vector(job, submit)) for submit in job.submits]
        reason = FinishReason.STOP
    except* Exception as errors:
        reason = FinishReason.ERROR
        raise errors.exceptions[0] from None
    finally:
        job.watch.end(reason.value)
    return [task.result() for task in tasks]


async def _vector(job: Job, submit: Submit) -> Floats:
    service = job.service
    adapter = service.adapters.label(submit.adapter)
    timer = service.metrics.sequence(submit.request_id, len(submit.prompt), adapter)
    reason = FinishReason.ABORT
    outputs = cast(Outputs, service.engine.generate(submit))
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    reason = output.finish_reason
                    raise failure_of(output)
                timer.tokens(len(output.tokens))
                if output.notice is not None and output.notice.hidden:
                    reason = FinishReason.STOP
                    return _normalised(output.notice.hidden)
    finally:
        timer.finish(reason.value)
    raise GenerationError("The engine gave no hidden state for this text.")


def _normalised(hidden: tuple[float, ...]) -> Floats:
    vector = np.array(hidden, np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        raise GenerationError("This text's hidden state has no direction: it is 0 or not finite.")
    return (vector / length).astype(np.float32)


def _written(vector: Floats, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
