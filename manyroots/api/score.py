"""POST /score and /v1/score: how near two texts are, or how likely tokens are after a text.

Two requests share the routes. vLLM's has pairs of texts (`text_1` and `text_2`, or `queries` and
`documents`): a pair's score is the cosine of the vectors that `/v1/embeddings` gives. SGLang's has
`query`, `items` and `label_token_ids`: an item's scores are the probabilities of these tokens after
query and item. A generative model has no head that was trained to rank, so that neither is one.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.embeddings import embedding_job, embedding_vectors
from manyroots.api.errors import renamed
from manyroots.api.events import answer
from manyroots.api.generation import collect, generate
from manyroots.api.preprocess import Job, completion_job
from manyroots.api.requests import CompletionRequest, EmbeddingsRequest, Ignored, Unsupported
from manyroots.api.state import ServerState, Service, server_of
from manyroots.errors import RequestError

_PAIRS = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
)  # fmt: skip
MAX_LABELS = 64
"""Each is a sequence of its own for every item."""

Texts = str | list[Any]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /score"""

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    query: Texts | None = None
    items: Texts | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    """Probabilities among these tokens alone."""
    item_first: bool | None = None

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    lora_path: str | None = None

    user: Ignored = None
    request_id: Ignored = None
    use_activation: Ignored = None
    """Of heads that classify; a cosine has none."""

    instruction: Unsupported = None
    chat_template_kwargs: Unsupported = None
    max_tokens_per_query: Unsupported = None
    max_tokens_per_doc: Unsupported = None
    return_pooled_hidden_states: Unsupported = None


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class PairScore(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class PairScores(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


class LabelScores(msgspec.Struct, kw_only=True):
    object: str = "scoring"
    scores: list[list[float]]
    """For each item, in the order of the labels."""
    model: str
    usage: ScoreUsage


async def score(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, ScoreRequest)
    for name in ("instruction", "chat_template_kwargs", "max_tokens_per_query",
                 "max_tokens_per_doc", "return_pooled_hidden_states"):  # fmt: skip
        if getattr(body, name) not in (None, False, 0, {}):
            raise RequestError(f"{name} is not supported by this server; remove it.", field=name)
    if body.label_token_ids is not None or body.query is not None:
        return await _score_labels(server, body, request)
    return await _score_pairs(server, body, request)


async def _score_pairs(server: ServerState, body: ScoreRequest, request: Request) -> Response:
    first, second = _pair(body)
    left, right = _listed(getattr(body, first)), _listed(getattr(body, second))
    if len(left) not in (1, len(right)) or not right:
        raise RequestError(
            f"{first} has {len(left)} texts and {second} has {len(right)}; give one of {first} for "
            f"all of {second}, or as many.",
            field=first,
        )
    asked = EmbeddingsRequest(
        model=body.model or server.accepting.model_name,
        input=[*left, *right],
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        lora_path=body.lora_path,
    )
    with renamed({"input": second, "prompt": second}):
        job = await embedding_job(server, asked, request)

    async def work() -> PairScores:
        vectors = await embedding_vectors(job)
        ones = vectors[: len(left)] * (len(right) if len(left) == 1 else 1)
        scores = [float(a @ b) for a, b in zip(ones, vectors[len(left) :], strict=True)]
        return PairScores(
            id=job.id.replace("cmpl", "score", 1),
            created=job.created,
            model=asked.model,
            data=[PairScore(index=index, score=score) for index, score in enumerate(scores)],
            usage=_usage(job),
        )

    with job.permits:
        return await answer(request, work())


def _pair(body: ScoreRequest) -> tuple[str, str]:
    given = [pair for pair in _PAIRS if all(getattr(body, name) is not None for name in pair)]
    if len(given) != 1:
        raise RequestError(
            "give text_1 and text_2, or queries and documents, for the cosine of two texts' "
            "vectors; or query, items and label_token_ids for probabilities.",
            field="text_1",
        )
    return given[0]


def _listed(texts: Texts) -> list[Any]:
    is_one = isinstance(texts, str) or (bool(texts) and all(type(item) is int for item in texts))
    return [texts] if is_one else list(texts)


async def _score_labels(server: ServerState, body: ScoreRequest, request: Request) -> Response:
    labels, service = body.label_token_ids, server.accepting
    if not labels or len(labels) > MAX_LABELS:
        raise RequestError(
            f"label_token_ids has {len(labels or ())} ids; give from 1 to {MAX_LABELS}.",
            field="label_token_ids",
        )
    _check_labels(labels, service)
    prompts = await asyncio.to_thread(_label_prompts, body, service)
    asked = CompletionRequest(
        model=body.model or service.model_name,
        prompt=[[*prompt, label] for prompt in prompts for label in labels],
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        cache_salt=body.cache_salt,
        priority=body.priority,
        lora_path=body.lora_path,
    )
    with renamed({"prompt": "items"}):
        job = await completion_job(server, asked, request.headers)

    async def work() -> LabelScores:
        generated = generate(job.service, job.submits, job.watch)
        collected, _ = await collect(generated, job.submits, job.n)
        each = [math.exp(one.prompt_logprobs[-1].logprob) for one in collected]
        rows = [each[at : at + len(labels)] for at in range(0, len(each), len(labels))]
        if body.apply_softmax:
            rows = [[value / (sum(row) or 1.0) for value in row] for row in rows]
        return LabelScores(scores=rows, model=asked.model, usage=_usage(job))

    with job.permits:
        return await answer(request, work())


def _check_labels(labels: list[int], service: Service) -> None:
    vocab_size = service.engine.info.vocab_size
    for place, token in enumerate(labels):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"label_token_ids[{place}] is {token}; this model's ids are from 0 to "
                f"{vocab_size - 1}.",
                field="label_token_ids",
            )


def _label_prompts(body: ScoreRequest, service: Service) -> list[list[int]]:
    """Query and item, joined as text or as token ids."""
    if body.query is None or body.items is None or body.items == []:
        raise RequestError("give query and items beside label_token_ids.", field="items")
    items = _listed(body.items)
    pairs = [(item, body.query) if body.item_first else (body.query, item) for item in items]
    if all(isinstance(text, str) for pair in pairs for text in pair):
        encode = service.input_processor.encode
        is_added = body.add_special_tokens is not False
        return [
            encode(f"{one}{other}", add_special_tokens=is_added, field="items")
            for one, other in pairs
        ]
    if not all(isinstance(ids, list) and all(type(token) is int for token in ids)
               for pair in pairs for ids in pair):  # fmt: skip
        raise RequestError(
            "query and items must both be texts, or both be token ids.", field="items"
        )
    return [[*one, *other] for one, other in pairs]


def _usage(job: Job) -> ScoreUsage:
    num_tokens = sum(len(submit.prompt) for submit in job.submits)
    return ScoreUsage(num_tokens, num_tokens)
