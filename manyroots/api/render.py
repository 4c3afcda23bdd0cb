"""POST /v1/chat/completions/render and /v1/completions/render, as vLLM has them.

Takes the requests of the routes without `/render`; gives what would be computed, and computes
nothing: token ids, the prompt as text, and the sampling parameters with all defaults filled in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.events import encode, json_response
from manyroots.api.preprocess import Job, chat_job, completion_job
from manyroots.api.requests import ChatRequest, CompletionRequest
from manyroots.api.state import server_of

_INSIDE = ("bad_token_ids", "thinking_budget", "wants_hidden")
"""Of the sampling parameters: what no caller has sent in this form."""


class Rendered(msgspec.Struct, kw_only=True):
    """A prompt as the engine would get it."""

    request_id: str
    token_ids: list[int]
    text: str
    """What these spell, special tokens included."""
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


async def render_chat(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, ChatRequest)
    job = await chat_job(server, body, request.headers)
    with job.permits:
        return json_response(_rendered(job, body, 0))


async def render_completion(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, CompletionRequest)
    job = await completion_job(server, body, request.headers)
    with job.permits:
        places = range(len(job.submits) // job.n)
        made = [_rendered(job, body, place) for place in places]
        return Response(encode(made), media_type="application/json")


def _rendered(job: Job, body: ChatRequest | CompletionRequest, place: int) -> Rendered:
    submit = job.submits[place * job.n]
    params = {
        name: value
        for name, value in dataclasses.asdict(submit.sampling).items()
        if name not in _INSIDE
    }
    params["max_tokens"] = submit.max_tokens or submit.sampling.max_tokens
    params["logit_bias"] = {str(token): bias for token, bias in submit.sampling.logit_bias.items()}
    return Rendered(
        request_id=job.id,
        token_ids=list(submit.prompt),
        text=job.service.tokenizer.decode(submit.prompt, skip_special_tokens=False),
        sampling_params=params,
        model=body.model,
        stream=bool(body.stream),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
    )
