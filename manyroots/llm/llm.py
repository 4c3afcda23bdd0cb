"""`LLM`: the engine inside your own process, for scripts and batch work.

Takes prompts (text, token ids or chats), sampling parameters and adapters; gives finished
completions in the order of the prompts. The same loop, intake and text as the server's; no process
boundary. Ctrl-C ends the call that runs, and the next one finds the engine in order. Calls of
several threads run one after the other. A forked process and a closed `LLM` get an error.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from manyroots.adapter_names import LoraModule, LoRARequest
from manyroots.config import engine_settings
from manyroots.engine.adapter_tensors import memory_adapter
from manyroots.engine.build import build_engine, free_memory
from manyroots.engine.client import reply_error
from manyroots.engine.input_processor import InputProcessor
from manyroots.engine.interrupts import Interrupts
from manyroots.engine.loop import EngineLoop
from manyroots.engine.retention import SHARE, checked_ranges
from manyroots.errors import RequestError, UnavailableError
from manyroots.flag_aliases import translate_settings
from manyroots.ids import AdapterName, RequestId
from manyroots.llm.inputs import (
    Prompt,
    adapters_by_name,
    chats_of,
    check_type,
    per_prompt,
    prompts_of,
)
from manyroots.llm.outputs import CompletionOutput, RequestOutput, by_token
from manyroots.messages import (
    Abort,
    Control,
    ControlKind,
    ErrorKind,
    FinishReason,
    KeepRange,
    LoadLora,
    LoraReply,
    Output,
    PublishLora,
    Retention,
    Stats,
    StepOutputs,
    Submit,
    UnloadLora,
)
from manyroots.process.progress import Display, told_to
from manyroots.sampling import SamplingParams
from manyroots.text.assembler import TextAssembler
from manyroots.text.chat import ChatTemplate, load_chat_template
from manyroots.text.generation_config import sampling_defaults
from manyroots.text.tokenizer_files import load_tokenizer
from manyroots.text.tools import check_tools

logger = logging.getLogger(__name__)

MessageMapping = Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

_READ_WAIT_S = 0.2
"""How long Ctrl-C may wait for an adapter's files."""


@dataclass(slots=True)
class _Sequence:
    """A completion under way."""

    request: RequestOutput
    output: CompletionOutput
    assembler: TextAssembler


@dataclass(slots=True)
class _NotedAdapter:
    """What a caller said of a name."""

    path: str
    number: int | None = None
    """The number that it came with last."""
    published: object = None
    """Its content, if it came from memory."""
    is_pinned: bool = False


def _alone(
    method: Callable[Concatenate[LLM, P], R],
) -> Callable[Concatenate[LLM, P], R]:
    """A method that other threads' calls wait for."""

    @functools.wraps(method)
    def waits(llm: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with llm._held():
            return method(llm, *args, **kwargs)

    return waits


class LLM:
    """A model, loaded and ready. Keyword arguments are the server's flags, in vLLM's names and
    SGLang's, too."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        ours, notes = translate_settings(settings)
        for note in notes:
            logger.info("%s", note)
        resolved = engine_settings(ours)
        self._settings = resolved
        self._lock = threading.RLock()
        """Held by the thread whose call works with the engine."""
        self._is_closed = False
        self._build()
        self._process_id = os.getpid()
        self.tokenizer = load_tokenizer(
            resolved.model.tokenizer or self.info.model_path, revision=resolved.model.revision
        )
        self._template = load_chat_template(
            self.tokenizer,
            resolved.model.chat_template,
            tool_call_parser=resolved.model.tool_call_parser,
            reasoning_parser=resolved.model.reasoning_parser,
        )
        self._defaults = sampling_defaults(
            self.info.model_path,
            resolved.model.generation_config,
            resolved.model.override_generation_config,
        )
        self._input_processor = InputProcessor(
            self.info, self.tokenizer, random.Random(resolved.model.seed)
        )
        self._ids = itertools.count(1)
        self._interrupts = Interrupts()
        self._under_way: set[RequestId] = set()
        """Submitted, and not known to be over."""
        self._weights: str | None = None
        """Those that were taken last, where they are not the model's own."""
        self._missed: list[Output] = []
        """What came while no call read outputs."""
        self._adapters = {
            module.name: _NotedAdapter(module.path) for module in resolved.lora.lora_modules
        }
        """What each name was last said to be: `wake_up` tells it to a new engine."""

    def _build(self) -> None:
        with Display(is_on=self._settings.model.progress_bars) as display, told_to(display):
            engine = build_engine(self._settings)
        self._engine: EngineLoop | None = engine.loop
        self.info = engine.info

    @property
    def _loop(self) -> EngineLoop:
        if self._engine is None:
            self._check_open()
            raise UnavailableError("this LLM is asleep; call wake_up() first.")
        return self._engine

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this LLM is closed; make another one.")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Other threads wait until the block ends, and Ctrl-C works as they wait."""
        # A fork copies the lock, maybe held, and the memory, but none of the engine's threads.
        if os.getpid() != self._process_id:
            raise UnavailableError(
                f"this LLM belongs to process {self._process_id}, from which this one was forked; "
                "make an LLM in this process, and none before it is forked."
            )
        with self._lock:
            yield

    @_alone
    def generate(
        self,
        prompts: Prompt | Sequence[Any] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: object = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] | None = None,
        retention: Sequence[KeepRange] = (),
    ) -> list[RequestOutput]:
        """Complete each prompt; together, so that they share steps and prefixes.

        `prompts`: texts, token ids, or mappings with `prompt` or `prompt_token_ids`, and maybe a
        `cache_salt` of their own. `prompt_token_ids`: the same as ids alone, as older scripts have
        it. `sampling_params`: by default those that the model's makers recommend; what of
        max_tokens does not fit after a prompt is cut off.
        `lora_request`: one adapter for all, or one per prompt with None for the base model.
        `priority`: with scheduling_policy="priority", one for all or one per prompt; the lower,
        the more important. `retention`: parts of each prompt to keep in the cache for longer.
        `use_tqdm`: has no effect, nothing is drawn.
        """
        check_type("retention", retention, Sequence)
        for place, asked_range in enumerate(retention):
            check_type(f"retention[{place}]", asked_range, KeepRange)
        ranges = tuple(checked_ranges(retention))
        kept = Retention(ranges, None, SHARE) if ranges else None
        batch = prompts_of(prompts if prompt_token_ids is None else prompt_token_ids)
        defaults = self.get_default_sampling_params()
        given = per_prompt("sampling_params", sampling_params, SamplingParams, len(batch))
        params = [defaults if each is None else each for each in given]
        loras = per_prompt("lora_request", lora_request, LoRARequest, len(batch))
        adapters = self._note(loras)
        priorities = [each or 0 for each in per_prompt("priority", priority, int, len(batch))]
        sequences: dict[RequestId, _Sequence] = {}
        submits: list[Submit] = []
        results: list[RequestOutput] = []
        asked = zip(batch, params, loras, adapters, priorities, strict=True)
        for place, (prompt, sampling, lora, adapter, importance) in enumerate(asked):
            field = "prompt" if len(batch) == 1 else f"prompts[{place}]"
            tokens = prompt.tokens
            if tokens is None:
                tokens = self._input_processor.encode(str(prompt.text), field=field)
            salt = prompt.cache_salt or cache_salt
            check_type("cache_salt", salt, str | None)
            made = self._input_processor.submits(
                tokens, sampling, salt, self._next_id, adapter=adapter, priority=importance,
                field=field, retention=kept,
            )  # fmt: skip
            result = RequestOutput(str(len(results)), prompt.text, list(made[0].prompt), [])
            result.lora_request = lora
            if sampling.prompt_logprobs is not None:
                result.prompt_logprobs = [None]
            results.append(result)
            for index, submit in enumerate(made):
                sequences[submit.request_id] = self._sequence(result, index, submit)
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

    def _sequence(self, result: RequestOutput, index: int, submit: Submit) -> _Sequence:
        output = CompletionOutput(index, lora_request=result.lora_request)
        if submit.sampling.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        result.outputs.append(output)
        return _Sequence(result, output, TextAssembler(self.tokenizer, submit.sampling))

    def chat(
        self,
        messages: Sequence[MessageMapping] | Sequence[Sequence[MessageMapping]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: object = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, by the model's chat template or the text of another one. With
        `continue_final_message` (and add_generation_prompt=False) the last message goes on. What
        the model writes to call `tools` is in the text as it writes it. The rest is as in
        `generate`."""
        check_type("chat_template", chat_template, str | None)
        check_type("chat_template_kwargs", chat_template_kwargs, Mapping | None)
        template = self._template
        if chat_template is not None:
            template = ChatTemplate(chat_template, self.tokenizer.special_tokens.for_template())
        rendered = [
            self._render(
                chat,
                template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=chat_template_kwargs,
                use=check_tools(tools, None),
            )
            for chat in chats_of(messages)
        ]
        return self.generate(
            rendered,
            sampling_params,
            lora_request=lora_request,
            cache_salt=cache_salt,
            priority=priority,
        )

    def stream_chat(
        self,
        messages: Sequence[MessageMapping],
        sampling_params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[str]:
        """Answer one conversation piece by piece. Leaving early ends the answer."""
        if sampling_params.n != 1:
            raise RequestError(
                f"n is {sampling_params.n}; a stream is of one answer. Use chat() for several.",
                field="n",
            )
        tokens = self._render(messages, self._template)["prompt_token_ids"]
        with self._held():
            [adapter] = self._note([lora_request])
            [submit] = self._input_processor.submits(
                tokens, sampling_params, None, self._next_id, adapter=adapter
            )
        sequence = self._sequence(RequestOutput("0", None, [], []), 0, submit)
        under_way, output = {submit.request_id: sequence}, sequence.output
        # Never held while the caller works: between the pieces Ctrl-C is the caller's own.
        try:
            with self._held(), self._interrupts.held():
                self._begin([submit])
            shown = 0
            while under_way:
                with self._held(), self._interrupts.held():
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
            with self._held(), self._interrupts.held():
                if self._under_way <= {submit.request_id}:  # else another call has taken over
                    self._end()

    def _render(
        self, messages: Sequence[MessageMapping], template: ChatTemplate | None, **how: Any
    ) -> dict[str, Any]:
        """A chat as a prompt, with its ids: the template has written all special tokens."""
        if template is None:
            raise RequestError(
                "this model has no chat template; pass chat_template=FILE to LLM, or use "
                "generate().",
                field="messages",
            )
        text = template.render(messages, **how)
        tokens = self._input_processor.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": tokens}

    @_alone
    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, load_inplace: bool = False
    ) -> LoraReply:
        """Read an adapter now, or give a name new weights; raises why it can't be used.

        Not needed before `generate(lora_request=...)`, which reads what it has not seen.
        """
        check_type("name", name, str)
        check_type("path", path, str | os.PathLike)
        load = LoadLora(next(self._ids), AdapterName(name), str(path), pinned, load_inplace)
        reply = self._ask(load)
        self._adapters[name] = _NotedAdapter(str(path), is_pinned=pinned)
        return reply

    @_alone
    def publish_adapter(
        self, name: str, tensors: Mapping[str, Any], config: object, *, pinned: bool = False
    ) -> LoraReply:
        """Give a name the weights that training has in memory: a state dict and a config, as PEFT's
        `get_peft_model_state_dict` and `peft_config` are. What the name meant before finishes what
        it has begun, and `name@revision` asks for it meanwhile. The tensors may change again when
        this returns."""
        check_type("name", name, str)
        adapter = memory_adapter(tensors, config)
        reply = self._ask(PublishLora(next(self._ids), AdapterName(name), adapter, pinned))
        self._adapters[name] = _NotedAdapter(reply.path, published=adapter, is_pinned=pinned)
        return reply

    @_alone
    def unload_adapter(self, name: str) -> LoraReply:
        """Forget an adapter; gives what was freed."""
        check_type("name", name, str)
        self._adapters.pop(name, None)
        return self._ask(UnloadLora(next(self._ids), AdapterName(name)))

    def _ask(self, message: LoadLora | PublishLora | UnloadLora) -> LoraReply:
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
        for name, request in adapters_by_name(requests).items():
            known = self._adapters.get(name)
            path = str(request.lora_path or (known.path if known else ""))
            number = request.lora_int_id
            is_other = known is not None and (
                path != known.path or (number is not None and known.number not in (None, number))
            )
            if is_other or request.load_inplace:
                self.load_adapter(name, path, load_inplace=True)
            elif known is None:
                self._loop.note_adapter(LoraModule(name, path))
                self._adapters[name] = _NotedAdapter(path)
            if number is None and known is not None:
                number = known.number
            self._adapters[name].number = number
        return [None if item is None else AdapterName(item.lora_name) for item in requests]

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use where they are given none; see `--generation-config`."""
        return self._defaults.params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it, a copy: `tokenizer` is the engine's."""
        return self.tokenizer.for_transformers()

    @_alone
    def reset_prefix_cache(self) -> bool:
        """Have nothing that was computed so far be found again."""
        self._control(ControlKind.RESET_CACHE)
        return True

    @_alone
    def update_weights(self, model_path: str) -> None:
        """Take other weights of the same model from a folder, for everything from now on; nothing
        that the old ones computed is found again. What does not fit changes nothing."""
        self._control(ControlKind.PAUSE)
        try:
            self._control(ControlKind.UPDATE_WEIGHTS, str(model_path))
        finally:
            self._control(ControlKind.RESUME)
        self._weights = str(model_path)

    @_alone
    def sleep(self, level: int = 1) -> None:
        """Give all memory back until `wake_up`, whatever the level."""
        if self._engine is not None:
            with self._interrupts.held():
                self._end()
                self._engine.close()
                self._engine = None
            free_memory()

    @_alone
    def wake_up(self, tags: object = None) -> None:
        """Load again, with the newest weights. Pinned adapters are read at once, the others when
        they are next named. Takes as long as a start. `tags`: all at once, whatever is named."""
        self._check_open()
        if self._engine is not None:
            return
        self._build()
        if self._weights is not None:
            self.update_weights(self._weights)
        for name, adapter in self._adapters.items():
            if adapter.published is not None:
                self._ask(
                    PublishLora(
                        next(self._ids), AdapterName(name), adapter.published, adapter.is_pinned
                    )
                )
            elif adapter.is_pinned:
                self._ask(LoadLora(next(self._ids), AdapterName(name), adapter.path, True, False))
            else:
                self._loop.note_adapter(LoraModule(name, adapter.path))

    def _control(self, kind: ControlKind, path: str = "") -> None:
        control = Control(next(self._ids), kind, path)
        with self._interrupts.held():
            self._loop.handle(control)
            while True:
                self._missed.extend(self._loop.step())
                for reply in self._loop.take_controls():
                    if reply.op_id == control.op_id:
                        if reply.error is not None:
                            raise RequestError(reply.error, field=None)
                        return

    def stats(self) -> Stats:
        return self._loop.stats()

    def close(self) -> None:
        """Give the model's threads and memory back, for good. A forked process gives nothing back:
        what it has is its parent's."""
        if os.getpid() != self._process_id:
            return
        with self._lock, self._interrupts.held():
            engine, self._engine = self._engine, None
            self._is_closed = True
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def _begin(self, submits: list[Submit]) -> None:
        """Submit; only while interrupts are held."""
        loop = self._loop
        # Left by a call that was interrupted where it could not tidy up.
        self._end()
        for submit in submits:
            self._under_way.add(submit.request_id)
            loop.handle(submit)

    def _end(self) -> None:
        """Leave nothing running; only while interrupts are held."""
        if self._engine is None:  # asleep or closed, where nothing runs
            self._under_way.clear()
            return
        self._loop.handle(Abort(list(self._under_way)))
        while self._loop.has_work:
            self._loop.step()
            self._loop.take_replies()  # of a load that no call waits for any more
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
            spell = self.tokenizer.token_text
            sequence.output.add(delta, spell)
            if sequence.request.prompt_logprobs is not None:
                scores = [by_token(item, spell) for item in delta.prompt_logprobs]
                sequence.request.prompt_logprobs.extend(scores)
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
                    field = None if output.notice is None else output.notice.error_field
                    raise RequestError(str(delta.error), field=field or "lora_request")
                raise RuntimeError(f"request failed: {delta.error}")


def _checked(reply: LoraReply) -> LoraReply:
    if error := reply_error(reply):
        raise error
    return reply
