"""`LLM`: the engine inside your own process, for scripts and batch work.

Takes prompts (text, token ids or chats), sampling parameters and adapters; gives finished
completions in the order of the prompts. The same loop, intake and text as the server's; no process
boundary. Ctrl-C ends the call that runs, and the next one finds the engine in order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from manyroots.adapter_names import LoraModule, LoRARequest
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.engine.client import lora_error
from manyroots.engine.interrupts import Interrupts
from manyroots.errors import RequestError
from manyroots.ids import AdapterName, Namespace, RequestId
from manyroots.intake import Intake
from manyroots.messages import (
    Abort,
    CacheUse,
    ErrorKind,
    FinishReason,
    LoadLora,
    LoraReply,
    Output,
    Stats,
    StepOutputs,
    Submit,
    UnloadLora,
)
from manyroots.progress import Display, told_to
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs
from manyroots.text.assembler import TextAssembler, TextDelta
from manyroots.text.chat import load_chat_template
from manyroots.text.generation_config import sampling_defaults
from manyroots.text.tokenizer_files import load_tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_READ_WAIT_S = 0.2
"""How long Ctrl-C may wait for an adapter's files."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    cache_use: CacheUse | None = None
    """Where those were, and why the rest was computed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """A completion under way."""

    request: RequestOutput
    output: CompletionOutput
    assembler: TextAssembler


class LLM:
    """A model, loaded and ready. Keyword arguments are the server's flags."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        resolved = engine_settings(settings)
        with Display(is_on=resolved.model.progress_bars) as display, told_to(display):
            engine = build_engine(resolved)
        self._loop = engine.loop
        self.info = engine.info
        self.tokenizer = load_tokenizer(
            resolved.model.tokenizer or engine.info.model_path, revision=resolved.model.revision
        )
        self._template = load_chat_template(
            self.tokenizer,
            resolved.model.chat_template,
            tool_call_parser=resolved.model.tool_call_parser,
            reasoning_parser=resolved.model.reasoning_parser,
        )
        self._defaults = sampling_defaults(
            engine.info.model_path,
            resolved.model.generation_config,
            resolved.model.override_generation_config,
        )
        self._intake = Intake(engine.info, self.tokenizer, random.Random(resolved.model.seed))
        self._ids = itertools.count(1)
        self._interrupts = Interrupts()
        self._under_way: set[RequestId] = set()
        """Submitted, and not known to be over."""
        self._missed: list[Output] = []
        """What came while nobody looked at outputs."""
        self._adapters = {
            module.name: LoRARequest(module.name, lora_path=module.path)
            for module in resolved.lora.lora_modules
        }
        """What each name was last said to be."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete each prompt; together, so that they share steps and prefixes.

        `sampling_params`: by default those that the model's makers recommend.
        `lora_request`: one adapter for all, or one per prompt with None for the base model.
        `priority`: with scheduling_policy="priority", one for all or one per prompt; the lower,
        the more important.
        """
        batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _per_prompt(sampling_params, len(batch))
        adapters = self._note(_lora_per_prompt(lora_request, len(batch)))
        priorities = _priority_per_prompt(priority, len(batch))
        namespace = Namespace(adapter=None, salt=cache_salt)
        sequences: dict[RequestId, _Sequence] = {}
        submits: list[Submit] = []
        results: list[RequestOutput] = []
        asked = zip(batch, params, adapters, priorities, strict=True)
        for prompt, sampling, adapter, importance in asked:
            text = prompt if isinstance(prompt, str) else None
            tokens = self._intake.encode(prompt) if isinstance(prompt, str) else list(prompt)
            result = RequestOutput(text, tokens, [])
            results.append(result)
            made = self._intake.submits(
                tokens, sampling, namespace, self._next_id, adapter=adapter, priority=importance
            )
            for index, submit in enumerate(made):
                output = CompletionOutput(index)
                result.outputs.append(output)
                assembler = TextAssembler(self.tokenizer, submit.sampling)
                sequences[submit.request_id] = _Sequence(result, output, assembler)
            submits.extend(made)
        with self._interrupts.held():
            self._begin(submits)
            try:
                while sequences:
                    self._step(sequences)
                    self._interrupts.let_through()
            finally:
                self._end()
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer each conversation, by the model's chat template. The rest is as in `generate`."""
        chats: list[Sequence[Message]]
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)  # type: ignore[arg-type,list-item]
        prompts = [self._render(chat) for chat in chats]
        return self.generate(
            prompts,
            sampling_params,
            lora_request=lora_request,
            cache_salt=cache_salt,
            priority=priority,
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[str]:
        """Answer one conversation piece by piece. Leaving early ends the answer."""
        namespace = Namespace(adapter=None, salt=None)
        tokens = self._render(messages)
        [adapter] = self._note([lora_request])
        [submit] = self._intake.submits(
            tokens, sampling_params, namespace, self._next_id, adapter=adapter
        )
        output = CompletionOutput(0)
        assembler = TextAssembler(self.tokenizer, submit.sampling)
        under_way = {submit.request_id: _Sequence(RequestOutput(None, [], []), output, assembler)}
        # Never held while the caller works: between the pieces Ctrl-C is the caller's own.
        try:
            with self._interrupts.held():
                self._begin([submit])
            shown = 0
            while under_way:
                with self._interrupts.held():
                    if submit.request_id not in self._under_way:
                        raise RequestError(
                            "another call of this LLM has ended this answer; finish one stream "
                            "before the next call.",
                            field=None,
                        )
                    self._step(under_way)
                yield output.text[shown:]
                shown = len(output.text)
        finally:
            with self._interrupts.held():
                if self._under_way <= {submit.request_id}:  # else another call has taken over
                    self._end()

    def _render(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise RequestError(
                "this model has no chat template; pass chat_template=FILE to LLM, or use "
                "generate().",
                field="messages",
            )
        return self._intake.encode(self._template.render(messages), add_special_tokens=False)

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, load_inplace: bool = False
    ) -> LoraReply:
        """Read an adapter now, or give a name new weights; raises why it can't be used.

        Not needed before `generate(lora_request=...)`, which reads what it has not seen.
        """
        load = LoadLora(next(self._ids), AdapterName(name), str(path), pinned, load_inplace)
        reply = self._ask(load)
        self._adapters[name] = LoRARequest(name, lora_path=str(path))
        return reply

    def unload_adapter(self, name: str) -> LoraReply:
        """Forget an adapter; gives what was freed."""
        self._adapters.pop(name, None)
        return self._ask(UnloadLora(next(self._ids), AdapterName(name)))

    def _ask(self, message: LoadLora | UnloadLora) -> LoraReply:
        with self._interrupts.held():
            self._loop.handle(message)
            while True:
                # A stream may be under way: what it gets meanwhile is still its own.
                self._missed.extend(self._turn())
                # Others are of a call that was interrupted while it waited.
                for reply in self._loop.take_replies():
                    if reply.op_id == message.op_id:
                        return _checked(reply)
                self._interrupts.let_through()

    def _note(self, requests: Sequence[LoRARequest | None]) -> list[AdapterName | None]:
        """The names of one call's adapters. A name that comes with another number or folder than
        before gets what is there now: so a loop that trains says that it has other weights."""
        for name, request in _by_name(requests).items():
            known = self._adapters.get(name)
            path = str(request.lora_path or (known.lora_path if known else ""))
            number = request.lora_int_id
            is_other = known is not None and (
                path != known.lora_path
                or (number is not None and known.lora_int_id not in (None, number))
            )
            if is_other or request.load_inplace:
                self.load_adapter(name, path, load_inplace=True)
            elif known is None:
                self._loop.note_adapter(LoraModule(name, path))
            if number is None and known is not None:
                number = known.lora_int_id
            self._adapters[name] = LoRARequest(name, number, path)
        return [None if item is None else AdapterName(item.lora_name) for item in requests]

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use where they are given none; see `--generation-config`."""
        return self._defaults.params()

    def stats(self) -> Stats:
        return self._loop.stats()

    def close(self) -> None:
        """Give the model's thread and memory back."""
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def _begin(self, submits: list[Submit]) -> None:
        """Submit; only while interrupts are held."""
        # Left behind by a call that was interrupted where it could not tidy up.
        self._end()
        for submit in submits:
            self._under_way.add(submit.request_id)
            self._loop.handle(submit)

    def _end(self) -> None:
        """Leave nothing running; only while interrupts are held."""
        self._loop.handle(Abort(list(self._under_way)))
        while self._loop.has_work:
            self._loop.step()
            self._loop.take_replies()  # of a load that nobody waits for any more
        self._under_way.clear()
        self._missed.clear()

    def _turn(self) -> StepOutputs:
        """A step, after waiting for an adapter's files if there is nothing else to do."""
        while self._loop.is_reading and not self._loop.has_work:
            self._loop.wait_for_read(_READ_WAIT_S)
            self._interrupts.let_through()
        return self._loop.step()

    def _step(self, sequences: dict[RequestId, _Sequence]) -> None:
        outputs, self._missed = [*self._missed, *self._turn()], []
        for output in outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:
                continue
            delta = sequence.assembler.push(output)
            sequence.output.add(delta)
            sequence.request.prompt_logprobs.extend(delta.prompt_logprobs)
            if sequence.output.index == 0:
                sequence.request.num_cached_tokens = output.num_cached_tokens
                sequence.request.cache_use = output.cache_use or sequence.request.cache_use
            if delta.stopped:
                self._loop.handle(Abort([output.request_id]))
            if delta.finish_reason is not None:
                del sequences[output.request_id]
                self._under_way.discard(output.request_id)
            if delta.finish_reason is FinishReason.ERROR:
                if output.error_kind is not ErrorKind.ENGINE:
                    raise RequestError(str(delta.error), field="lora_request")
                raise RuntimeError(f"request failed: {delta.error}")


def _checked(reply: LoraReply) -> LoraReply:
    if error := lora_error(reply):
        raise error
    return reply


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} sampling_params; give one for all, or one "
            "each.",
            field="sampling_params",
        )
    return list(params)


def _priority_per_prompt(given: int | Sequence[int], count: int) -> list[int]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts came with {len(given)} priorities; give one for all, or one each.",
            field="priority",
        )
    return list(given)


def _lora_per_prompt(
    given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts came with {len(given)} lora_requests; give one for all, or one each "
            "with None for the base model.",
            field="lora_request",
        )
    return list(given)


def _by_name(requests: Sequence[LoRARequest | None]) -> dict[str, LoRARequest]:
    """What each adapter's name means in one call. One that says no more than the name means what
    the others of that name do."""
    found: dict[str, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        name = request.lora_name
        one = found.get(name, request)
        for what in ("lora_int_id", "lora_path"):
            mine, other = getattr(request, what), getattr(one, what)
            if mine and other and mine != other:
                raise RequestError(
                    f"adapter {name!r} comes with the {what} {other!r} and {mine!r} in one call; "
                    "give each its own name.",
                    field="lora_request",
                )
        found[name] = LoRARequest(
            name,
            one.lora_int_id if one.lora_int_id is not None else request.lora_int_id,
            one.lora_path or request.lora_path,
            load_inplace=one.load_inplace or request.load_inplace,
        )
    return found
