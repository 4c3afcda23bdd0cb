"""From a typed request to sequences that are ready to run.

Takes a request and the loaded model; gives a `Job`: admitted, tokenized, checked by the input
processor. Large texts are tokenized, and templates are rendered, off the event loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from manyroots.api.aside import aside, grammar_aside
from manyroots.api.checks import (
    chat_sampling,
    check_count,
    check_logprobs,
    check_spaces,
    check_supported,
    completion_sampling,
    prompts_of,
    salt_of,
    structure_of,
    wants_structure,
)
from manyroots.api.concurrency import Permits
from manyroots.api.middleware import id_or_new
from manyroots.api.offered_tools import tool_use
from manyroots.api.requests import ChatRequest, CompletionRequest, GenerationFields, TokenizeRequest
from manyroots.api.retention import retention_of, shared_tokens
from manyroots.api.state import ServerState, Service
from manyroots.api.tenants import Tenant, current_tenant
from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from manyroots.ids import AdapterName
from manyroots.messages import KeepRange, Retention, Submit
from manyroots.observe.requests import RequestFacts, RequestWatch
from manyroots.sampling import MAX_TOKENS_LIMIT, SamplingParams, ThinkingBudget
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat_output import ChatOutput, parse_plain
from manyroots.text.tools import ToolUse

T = TypeVar("T")

_SMALL_CHARACTERS = 4096
"""Tokenized at once: a thread would take longer than the work."""


def no_format() -> ChatOutput:
    """A completion's text is all content."""
    return ChatOutput(parse_plain)


@dataclass(frozen=True, slots=True)
class Job:
    """One admitted request. The code that runs it releases its permits."""

    id: str
    created: int
    service: Service
    n: int
    submits: list[Submit]
    """n for each prompt, in order."""
    permits: Permits
    texts: list[str | None]
    """The prompts as the caller wrote them; None for those given as token ids, or truncated."""
    watch: RequestWatch
    new_output: Callable[[], ChatOutput] = no_format
    """For each choice of a chat: what reads its text."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are part of that text."""

    def prompt_text(self, place: int) -> str:
        text = self.texts[place]
        if text is not None:
            return text
        prompt = self.submits[place * self.n].prompt
        return self.service.tokenizer.decode(prompt, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ChatMark:
    """A place in a conversation up to which its prompt is to be kept."""

    chat: ChatRequest
    """The conversation, cut off there."""
    priority: int
    for_s: float


async def completion_job(
    server: ServerState, request: CompletionRequest, headers: Mapping[str, str]
) -> Job:
    service = server.accepting
    if request.lora_path is None and request.adapters is None:
        service.adapters.resolve(request.model)
    check_supported(request)
    check_spaces(request, joins_by_spaces=not service.tokenizer.has_bytes)
    run = aside if _is_large(request) or _is_long(request.prompt) else _at_once
    sampling = await run(lambda: completion_sampling(request, service.defaults))
    check_logprobs(sampling, server.settings.max_logprobs, "logprobs")
    prompts = await run(lambda: prompts_of(request))
    adapters = service.adapters.choose_for(request, len(prompts))
    with ExitStack() as undo:
        permits = undo.enter_context(_admit(server, len(prompts), sampling.n))
        tokens = await _encode_prompts(service, prompts, request.add_special_tokens is not False)
        if wants_structure(request) and (
            structure := await grammar_aside(lambda: structure_of(request))
        ):
            sampling = replace(sampling, structured_outputs=structure[1])
        tokens = [_truncated(service, request, sampling, prompt) for prompt in tokens]
        asked = list(zip(tokens, adapters, strict=True))
        run = run if sampling.structured_outputs is None else grammar_aside
        retention = retention_of(request.retention or (), (), _tenant_of(permits))
        submits = await run(
            lambda: _submits(service, request, sampling, asked, "prompt", retention)
        )
        _reserve(service, permits, submits)
        undo.pop_all()
    is_whole = request.truncate_prompt_tokens is None
    texts = [prompt if isinstance(prompt, str) and is_whole else None for prompt in prompts]
    number = _new_id("cmpl", headers)
    watch = _watched(
        server, permits, RequestFacts(number, request.model, sampling.n, submits, headers)
    )
    return Job(number, _now(), service, sampling.n, submits, permits, texts, watch)


async def chat_job(
    server: ServerState,
    request: ChatRequest,
    headers: Mapping[str, str],
    keeps: Sequence[ChatMark] = (),
) -> Job:
    service = server.accepting
    [adapter] = service.adapters.choose_for(request, 1)
    check_supported(request)
    check_spaces(request, joins_by_spaces=not service.tokenizer.has_bytes)
    run = aside if _is_large(request) or request.tools else _at_once
    sampling = await run(lambda: chat_sampling(request, service.defaults))
    check_logprobs(sampling, server.settings.max_logprobs, "top_logprobs")
    use = await run(lambda: tool_use(request, server.notices))
    notice_effort(server, request)
    with ExitStack() as undo:
        permits = undo.enter_context(_admit(server, 1, sampling.n))
        # A template is code, however short the messages: never on the event loop.
        wanted = None
        if wants_structure(request):
            wanted = await grammar_aside(lambda: structure_of(request))
        text, tokens, structure = await asyncio.to_thread(
            _prepare_chat, service, request, use, wanted
        )
        marked: tuple[KeepRange, ...] = ()
        if keeps:
            marked = await asyncio.to_thread(_marked_ranges, service, keeps, use, tokens)
        if structure is not None:
            run = grammar_aside
            sampling = replace(sampling, structured_outputs=structure)
        tokens = _truncated(service, request, sampling, tokens)
        if budget := thinking_budget(server, request, text):
            sampling = replace(sampling, thinking_budget=budget)
        if structure is not None and use.must_call:
            await grammar_aside(lambda: check_structure(structure, "tools"))
        retention = retention_of(request.retention or (), marked, _tenant_of(permits))
        asked = [(tokens, adapter)]
        submits = await run(
            lambda: _submits(service, request, sampling, asked, "messages", retention)
        )
        _reserve(service, permits, submits)
        undo.pop_all()
    number = _new_id("chatcmpl", headers)
    watch = _watched(
        server, permits, RequestFacts(number, request.model, sampling.n, submits, headers)
    )
    assert service.template is not None  # else encode_chat has refused
    chat_format = service.template.format
    is_continued = bool(request.continue_final_message)
    return Job(
        number,
        _now(),
        service,
        sampling.n,
        submits,
        permits,
        [None],
        watch,
        new_output=partial(chat_format.output, use, prompt=text, is_continued=is_continued),
        shown_ids=service.tokenizer.ids_of(chat_format.special_tokens(use)),
    )


def notice_effort(server: ServerState, request: ChatRequest) -> None:
    """Log an effort that the model's template can't be told; it is a hint."""
    template, effort = server.service.template, request.reasoning_effort
    if template is not None and effort is not None and not template.follows_effort(effort):
        server.notices.tell("reasoning_effort", "is no choice of this model's chat template")


def thinking_budget(
    server: ServerState, request: ChatRequest, prompt: str
) -> ThinkingBudget | None:
    """How long a completion of this prompt may reason; None for as long as it likes, or where the
    model does not reason."""
    num_tokens, template = request.thinking_token_budget, server.service.template
    if num_tokens is None or template is None:
        return None
    if not 0 <= num_tokens <= MAX_TOKENS_LIMIT:
        raise RequestError(
            f"thinking_token_budget is {num_tokens}; it must be an integer from 0 to "
            f"{MAX_TOKENS_LIMIT}.",
            field="thinking_token_budget",
        )
    marks = template.format.thinking
    if marks is None and template.format.tools.prefix is None:
        server.notices.tell("thinking_token_budget", "has no effect: this model does not reason")
        return None
    find = server.service.tokenizer.token_id
    begin, end = (None, None) if marks is None else (find(marks.begin), find(marks.end))
    if marks is None or begin is None or end is None:
        raise RequestError(
            "thinking_token_budget can't be held: no single token ends this model's reasoning. "
            "Leave it out, or send reasoning_effort.",
            field="thinking_token_budget",
        )
    is_begun = marks.is_begun_behind(prompt)
    return ThinkingBudget(num_tokens, begin, end, is_begun=is_begun)


async def _at_once(job: Callable[[], T]) -> T:
    return job()


def _is_large(request: GenerationFields) -> bool:
    """Whether what a request says of sampling may take long to check."""
    lists = (request.allowed_token_ids, request.stop_token_ids, request.logit_bias, request.stop)
    return bool(request.bad_words) or sum(len(given or ()) for given in lists) > _SMALL_CHARACTERS


def _is_long(prompt: Any) -> bool:
    """Whether prompts in token ids, or very many, take long to look through."""
    if not isinstance(prompt, list):
        return False
    return sum(len(one) if isinstance(one, list) else 1 for one in prompt) > _SMALL_CHARACTERS


def _prepare_chat(
    service: Service,
    request: ChatRequest,
    use: ToolUse,
    wanted: tuple[str, StructuredOutputsParams] | None,
) -> tuple[str, list[int], StructuredOutputsParams | None]:
    """A chat's prompt, and the shape of its answer. `wanted`: the shape that the request asks
    for."""
    if wanted is not None and use.must_call:
        if wanted[0] != "response_format":
            raise RequestError(
                f"tool_choice demands a call, and {wanted[0]} another answer; give one of them.",
                field=wanted[0],
            )
        wanted = None  # of what is said beside calls, and nothing is: as agents ask for it
    text, tokens = encode_chat(service, request, use)
    assert service.template is not None  # else encode_chat has refused
    structure = service.template.format.structure(
        None if wanted is None else wanted[1], use, prompt=text, tokenizer=service.tokenizer
    )
    return text, tokens, structure


def _marked_ranges(
    service: Service, keeps: Sequence[ChatMark], use: ToolUse, tokens: list[int]
) -> tuple[KeepRange, ...]:
    """A range for each mark. A template may refuse a conversation that ends there: then none."""
    ranges = []
    for keep in keeps:
        with suppress(RequestError):
            _, prefix = encode_chat(service, keep.chat, use)
            end = shared_tokens(tokens, prefix)
            if end:
                ranges.append(KeepRange(end, keep.priority, keep.for_s))
    return tuple(ranges)


def _tenant_of(permits: Permits) -> Tenant | None:
    return None if permits.lease is None else permits.lease.tenant


def encode_chat(
    service: Service, request: ChatRequest | TokenizeRequest, use: ToolUse
) -> tuple[str, list[int]]:
    """A chat as one prompt, by the model's template: its text and its tokens."""
    if service.template is None:
        raise RequestError(
            "this model has no chat template, so it can't take messages; use /v1/completions, "
            "or start the server with --chat-template.",
            field="messages",
        )
    text = service.template.render(
        request.messages or [],
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        options=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
        use=use,
    )
    # The template writes the special tokens itself.
    add_special_tokens = bool(request.add_special_tokens)
    encode = service.input_processor.encode
    return text, encode(text, add_special_tokens=add_special_tokens, field="messages")


async def _encode_prompts(
    service: Service, prompts: list[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    def encode() -> list[list[int]]:
        found: list[list[int]] = []
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                with _naming_place("prompt", place, len(prompts)):
                    found.append(
                        service.input_processor.encode(
                            prompt, add_special_tokens=add_special_tokens
                        )
                    )
            else:
                found.append(prompt)
        return found

    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return encode() if size <= _SMALL_CHARACTERS else await asyncio.to_thread(encode)


def _truncated(
    service: Service, request: GenerationFields, sampling: SamplingParams, tokens: list[int]
) -> list[int]:
    """A prompt's last or first tokens, as many as the request wants to keep."""
    wanted, side = request.truncate_prompt_tokens, request.truncation_side
    if side not in (None, "left", "right"):
        raise RequestError(
            f"truncation_side is {side[:60]!r}; choose left or right.", field="truncation_side"
        )
    if wanted is None:
        return tokens
    longest = service.engine.info.max_model_len
    if not (wanted == -1 or 1 <= wanted < longest):
        raise RequestError(
            f"truncate_prompt_tokens is {wanted}; it must be an integer from 1 to {longest - 1}, "
            "or -1 for as many as fit.",
            field="truncate_prompt_tokens",
        )
    if wanted == -1:
        room = sampling.max_tokens or 1
        # A limit beyond the context says nothing of how long the answer will be.
        wanted = longest - (room if room < longest else 1)
    return tokens[:wanted] if side == "right" else tokens[-wanted:]


def _admit(server: ServerState, num_prompts: int, n: int) -> Permits:
    count = check_count(num_prompts, n, server.settings.max_prompts_per_request)
    permits = server.service.concurrency.admit(count)
    if (tenant := current_tenant()) is not None:
        try:
            permits.lease = tenant.begin(count)
        except Exception:
            permits.release()
            raise
    return permits


def _reserve(service: Service, permits: Permits, submits: list[Submit]) -> None:
    """Set aside what a limited key's request may use."""
    if permits.lease is not None:
        info = service.engine.info
        capacity = info.num_pages * info.page_size
        permits.lease.reserve(submits, info.max_model_len, capacity)


def _watched(server: ServerState, permits: Permits, facts: RequestFacts) -> RequestWatch:
    lease = permits.lease
    if lease is None:
        return server.watch(facts)
    facts.tenant = lease.tenant.name

    def count(ended: RequestFacts) -> None:
        lease.num_used = ended.num_prompt_tokens + ended.num_output_tokens

    return server.watch(facts, count)


def _submits(
    service: Service,
    request: GenerationFields,
    sampling: SamplingParams,
    prompts: list[tuple[list[int], AdapterName | None]],
    field: str,
    retention: Retention | None,
) -> list[Submit]:
    salt = salt_of(request)
    next_id = service.engine.next_request_id
    checked = service.input_processor.check(sampling, priority=request.priority or 0)
    found: list[Submit] = []
    for place, (prompt, adapter) in enumerate(prompts):
        with _naming_place(field, place, len(prompts)):
            found += service.input_processor.submits(
                prompt, checked, salt, next_id, adapter=adapter, field=field, retention=retention
            )
    return found


@contextmanager
def _naming_place(field: str, place: int, num_prompts: int) -> Iterator[None]:
    """A fault of one prompt among several says which one it is."""
    try:
        yield
    except RequestError as error:
        if num_prompts == 1 or error.field != field:
            raise
        text = re.sub(rf"\b{re.escape(field)}\b", f"{field}[{place}]", str(error))
        raise type(error)(text, field=field) from error


def _new_id(prefix: str, headers: Mapping[str, str]) -> str:
    """With the caller's own id in it, so that its logs and its answers can be joined."""
    given = headers.get("x-request-id")
    return f"{prefix}-{id_or_new(() if given is None else (given,))}"


def _now() -> int:
    return int(time.time())
