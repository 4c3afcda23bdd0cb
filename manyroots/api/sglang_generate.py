"""POST /generate, SGLang's own route: prompts as text or token ids, sampling in an object.

Takes SGLang's request; gives its response: one object for one completion, a list for several.
A stream's events hold the whole text so far, as SGLang's do by default. The work is a completion's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.errors import renamed
from manyroots.api.events import DONE, EventStream, answer, event
from manyroots.api.generation import Collected, collect, generate
from manyroots.api.preprocess import Job, completion_job
from manyroots.api.requests import CompletionRequest, Ignored, Unsupported
from manyroots.api.state import ServerState, server_of
from manyroots.errors import RequestError
from manyroots.step import TokenLogprobs
from manyroots.text.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
}  # fmt: skip
_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "n", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "json_schema", "regex", "ebnf", "logit_bias",
)  # fmt: skip
_FIELDS = {
    "prompt": "text", "prompt_logprobs": "logprob_start_len", "logprobs": "top_logprobs_num",
    **{ours: f"sampling_params.{theirs}" for theirs, ours in _RENAMED.items()},
    **{name: f"sampling_params.{name}" for name in _SAME_NAMES},
}  # fmt: skip
"""What a completion's fields are called here."""

Scored = tuple[float | None, int, str | None]


class SglangGenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /generate"""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    """From this place of the prompt on; -1 is only the output's."""
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    lora_path: str | list[str | None] | None = None
    model: str | None = None
    """Not SGLang's: the served model or an adapter; the served model by default."""
    priority: int | None = None
    extra_key: str | None = None
    """A salt: requests share pages only with those of the same key."""

    rid: Ignored = None
    log_metrics: Ignored = None
    no_logs: Ignored = None
    session_id: Ignored = None
    routing_key: Ignored = None
    conversation_id: Ignored = None

    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    token_ids_logprob: Unsupported = None
    return_hidden_states: Unsupported = None
    session_params: Unsupported = None
    custom_logit_processor: Unsupported = None


class SglangFinish(msgspec.Struct, omit_defaults=True):
    type: str
    matched: str | int | None = None
    length: int | None = None


class SglangMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    finish_reason: SglangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[Scored] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Scored] | None] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Scored] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Scored] | None] | msgspec.UnsetType = msgspec.UNSET


class SglangCompletion(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | msgspec.UnsetType = msgspec.UNSET
    """In a stream of several: which one."""


async def sglang_generate(request: Request) -> Response:
    server = server_of(request)
    body = await server.read(request, SglangGenerateRequest)
    asked = _completion(server, body)
    with renamed(_FIELDS):
        job = await completion_job(server, asked, request.headers)
    if body.stream:
        return EventStream(_chunks(job, body), job.permits)
    with job.permits:
        return await answer(request, _whole(job, body))


def _completion(server: ServerState, request: SglangGenerateRequest) -> CompletionRequest:
    if (request.text is None) == (request.input_ids is None):
        raise RequestError("give either text or input_ids.", field="text")
    for name in _UNSUPPORTED:
        if getattr(request, name) not in (None, False, []):
            raise RequestError(f"{name} is not supported by this server; remove it.", field=name)
    asked = CompletionRequest(
        model=request.model or server.accepting.model_name,
        prompt=request.input_ids if request.text is None else request.text,
        stream=request.stream,
        lora_path=request.lora_path,
        priority=request.priority,
        cache_salt=request.extra_key,
        max_tokens=DEFAULT_MAX_NEW_TOKENS,
    )
    fields = {_RENAMED.get(name, name): value for name, value in _sampling(request).items()}
    try:
        given = msgspec.convert(msgspec.to_builtins(asked) | fields, CompletionRequest, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}", field="sampling_params") from error
    if request.return_logprob:
        given.logprobs = request.top_logprobs_num or 0
        if request.logprob_start_len is not None and request.logprob_start_len >= 0:
            given.prompt_logprobs = request.top_logprobs_num or 0
    return given


def _sampling(request: SglangGenerateRequest) -> dict[str, Any]:
    params = request.sampling_params or {}
    known = {*_RENAMED, *_SAME_NAMES}
    for name, value in params.items():
        if name not in known and value is not None:
            raise RequestError(
                f"sampling_params.{name[:60]} is not known here; these are: "
                f"{', '.join(sorted(known))}.",
                field=f"sampling_params.{name[:60]}",
            )
    return {name: value for name, value in params.items() if name in known}


async def _whole(job: Job, request: SglangGenerateRequest) -> Any:
    generated = generate(job.service, job.submits, job.watch)
    collected, _ = await collect(generated, job.submits, job.n)
    made = [_completed(job, request, collected, index) for index in range(len(collected))]
    return made[0] if _is_single(job, request) else made


def _is_single(job: Job, request: SglangGenerateRequest) -> bool:
    """Whether one prompt was sent as such, and one completion of it is wanted."""
    is_batch = isinstance(request.text, list) or (
        bool(request.input_ids) and isinstance((request.input_ids or [0])[0], list)
    )
    return not is_batch and job.n == 1


async def _chunks(job: Job, request: SglangGenerateRequest) -> AsyncGenerator[bytes, None]:
    collected = [Collected() for _ in job.submits]
    is_single = _is_single(job, request)
    async with aclosing(generate(job.service, job.submits, job.watch)) as batches:
        async for batch in batches:
            for index, delta in batch:
                collected[index].add(delta)
            events = []
            for index in dict.fromkeys(index for index, _ in batch):
                made = _completed(job, request, collected, index)
                if not is_single:
                    made.index = index
                events.append(event(made))
            yield b"".join(events)
    yield DONE


def _completed(
    job: Job, request: SglangGenerateRequest, collected: list[Collected], index: int
) -> SglangCompletion:
    made, prompt = collected[index], job.submits[index].prompt
    meta = SglangMeta(
        id=f"{job.id}-{index}" if len(collected) > 1 else job.id,
        finish_reason=_finish(made),
        prompt_tokens=len(prompt),
        completion_tokens=len(made.tokens),
        cached_tokens=made.num_cached_tokens,
    )
    if request.return_logprob:
        # Only a prompt's first choice has computed what all of them share.
        scores = collected[index - index % job.n].prompt_logprobs
        _add_logprobs(meta, job.service.tokenizer, request, made, prompt, scores)
    return SglangCompletion(text=made.text, output_ids=made.tokens, meta_info=meta)


def _finish(made: Collected) -> SglangFinish | None:
    match made.finish_reason:
        case None:
            return None
        case "length":
            return SglangFinish("length", length=len(made.tokens))
    last = made.tokens[-1] if made.tokens else None
    return SglangFinish("stop", matched=last if made.stop_reason is None else made.stop_reason)


def _add_logprobs(
    meta: SglangMeta,
    tokenizer: Tokenizer,
    request: SglangGenerateRequest,
    made: Collected,
    prompt: Sequence[int],
    scores: Sequence[TokenLogprobs],
) -> None:
    def named(logprob: float | None, token: int) -> Scored:
        text = tokenizer.token_text(token) if request.return_text_in_logprobs else None
        return None if logprob is None else max(logprob, _LOWEST), token, text

    def tops(entries: Sequence[TokenLogprobs]) -> list[list[Scored] | None]:
        pairs = (zip(entry.top_logprobs, entry.top_tokens, strict=True) for entry in entries)
        return [[named(*pair) for pair in pair_list] for pair_list in pairs]

    start = request.logprob_start_len
    meta.output_token_logprobs = [named(entry.logprob, entry.token) for entry in made.logprobs]
    meta.input_token_logprobs = []
    if start is not None and start >= 0:
        first = [named(None, prompt[0])]
        meta.input_token_logprobs = [
            *first, *(named(entry.logprob, entry.token) for entry in scores),
        ][start:]  # fmt: skip
    if request.top_logprobs_num:
        meta.output_top_logprobs = tops(made.logprobs)
        if start is not None and start >= 0:
            meta.input_top_logprobs = [None, *tops(scores)][start:]


_LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say."""
_UNSUPPORTED = (
    "input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob",
    "return_hidden_states", "session_params", "custom_logit_processor",
)  # fmt: skip
