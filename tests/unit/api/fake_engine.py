"""An engine made of a rule, with the same interface as the real one.

By default it repeats the prompt, one token per output, until max_tokens; tests give other rules,
hold it at a gate, or let it die.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable

from manyroots.engine.adapter_table import AdapterTable
from manyroots.engine.client import NO_COUNTS, EngineWatch, PauseMode, reply_error
from manyroots.errors import UnavailableError
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    ControlReply,
    EngineInfo,
    FinishReason,
    LoadLora,
    LoraReply,
    Notice,
    Output,
    Stats,
    Submit,
    UnloadLora,
)
from manyroots.process.progress import Progress
from manyroots.snapshot import PlaneView, Snapshot, TreeView
from manyroots.step import TokenLogprobs

Rule = Callable[[Submit], Iterable[Output]]

INFO = EngineInfo(
    model_path="tiny", model_name="tiny", vocab_size=300, max_model_len=512, page_size=16,
    num_pages=1024, max_num_seqs=4, eos_token_ids=(257,), dtype="float32", device="cpu",
    scheduling_policy="fcfs", max_loras=8,
)  # fmt: skip


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    others = tuple((token + place) % 256 for place in range(count))
    return TokenLogprobs(
        token, -0.5, 1, others, tuple(-0.5 - place for place in range(len(others)))
    )


def repeat_prompt(submit: Submit) -> Iterable[Output]:
    sampling = submit.sampling
    limit = submit.max_tokens or sampling.max_tokens or 16
    for place, token in zip(range(limit), itertools.cycle(submit.prompt), strict=False):
        is_last = place == limit - 1
        stops = token in submit.stop_ids and place >= sampling.min_tokens
        scores, prompt_scores = [], []
        if sampling.logprobs is not None:
            scores = [logprobs_of(token, sampling.logprobs)]
        if sampling.prompt_logprobs is not None and place == 0:
            count = sampling.prompt_logprobs
            prompt_scores = [logprobs_of(token, count) for token in submit.prompt[1:]]
        finish = FinishReason.STOP if stops else FinishReason.LENGTH if is_last else None
        yield Output(
            submit.request_id, [token], finish, num_cached_tokens=2,
            stop_token=token if stops else None, logprobs=scores, prompt_logprobs=prompt_scores,
            notice=Notice(hidden=(3.0, 4.0)) if sampling.wants_hidden else None,
        )  # fmt: skip
        if stops:
            return


def script(*tokens: int) -> Rule:
    """These tokens, whatever the prompt, then the end of text."""

    def rule(submit: Submit) -> Iterable[Output]:
        for token in tokens:
            yield Output(submit.request_id, [token], None, 0)
        yield Output(submit.request_id, [257], FinishReason.STOP, 0, stop_token=257)

    return rule


def accept(message: LoadLora | UnloadLora) -> LoraReply:
    if isinstance(message, UnloadLora):
        return LoraReply(message.op_id, num_pages=7, num_bytes=4096)
    return LoraReply(
        message.op_id,
        path=message.path,
        digest="ab" * 32,
        rank=8,
        num_bytes=4096,
        modules=("q_proj", "v_proj"),
    )


def nothing_to_see(since_step: int, wants_tree: bool, explain_step: int | None) -> Snapshot:
    """An engine that does nothing."""
    planes = [PlaneView("full", "full", "device", 1024, 1000, 24, 0)]
    tree = TreeView(16, 1, planes, [], [], []) if wants_tree else None
    return Snapshot(1, NO_COUNTS, 0.0, False, 0, [], [], {}, [], [], tree=tree)


class FakeEngine:
    """Implements `EngineClient`."""

    def __init__(self, rule: Rule = repeat_prompt, info: EngineInfo = INFO) -> None:
        self.adapters = AdapterTable()
        self._info = info
        self._ids = itertools.count(1)
        self.rule = rule
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_alive = True
        self.submitted: list[Submit] = []
        self.running: set[RequestId] = set()
        self.aborted: set[RequestId] = set()
        self.is_closed = False
        self.is_over = False
        self.progress: Progress | None = None
        self.num_restarts = 0
        self.is_paused = False
        self.is_asleep = False
        self.controls: list[str] = []
        self.ended = asyncio.Event()
        self.over_reason = ""
        self.start_error: Exception | None = None
        self.lora_ops: list[LoadLora | UnloadLora] = []
        self.lora_rule: Callable[[LoadLora | UnloadLora], LoraReply] = accept
        self.lora_gate = asyncio.Event()
        self.lora_gate.set()
        self.looks: list[tuple[int, bool, int | None]] = []
        self.snapshot: Callable[[int, bool, int | None], Snapshot] = nothing_to_see

    async def look(
        self, *, since_step: int = 0, wants_tree: bool = False, explain_step: int | None = None
    ) -> Snapshot:
        self.looks.append((since_step, wants_tree, explain_step))
        if not self.is_alive:
            raise UnavailableError("the engine is gone")
        return self.snapshot(since_step, wants_tree, explain_step)

    def abort(self, request_id: RequestId) -> bool:
        is_here = request_id in self.running
        if is_here:
            self.aborted.add(request_id)
        return is_here

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def stats(self) -> Stats | None:
        held = len(self.running)
        return Stats(held, 0, 1024, 1000, 24 - held, held, 0, 100, 40, 7, 70)

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        self._check_alive()
        self.submitted.append(request)
        self.running.add(request.request_id)
        finished = False
        self.watcher.begun(request.request_id)
        try:
            for output in self.rule(request):
                await asyncio.sleep(0)
                await self.gate.wait()
                self._check_alive()
                finished = output.finish_reason is not None
                if output.tokens and request.adapter is not None:
                    self.adapters.found(request.adapter)
                yield output
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.add(request.request_id)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise UnavailableError("the engine died")

    async def load_adapter(self, load: LoadLora) -> LoraReply:
        self._check_alive()
        reply = await self._answer(load)
        self.adapters.loaded(load, reply.path)
        return reply

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        self._check_alive()
        with self.adapters.unloading(name):
            return await self._answer(UnloadLora(len(self.lora_ops), name))

    async def _answer(self, message: LoadLora | UnloadLora) -> LoraReply:
        self.lora_ops.append(message)
        await self.lora_gate.wait()
        reply = self.lora_rule(message)
        if error := reply_error(reply):
            raise error
        return reply

    def watch(self, watch: EngineWatch) -> None:
        self.watcher = watch

    async def pause(self, mode: PauseMode) -> None:
        self.controls.append(f"pause {mode.value}")
        self.is_paused = True

    async def resume(self) -> None:
        self.controls.append("resume")
        self.is_paused = False

    async def sleep(self, mode: PauseMode) -> None:
        self.controls.append(f"sleep {mode.value}")
        self.is_asleep, self.is_alive = True, False

    async def wake(self) -> None:
        self.controls.append("wake")
        self.is_asleep, self.is_alive = False, True

    async def reset_cache(self) -> ControlReply:
        self.controls.append("reset")
        return ControlReply(1, num_pages=5)

    async def update_weights(self, path: str) -> ControlReply:
        self.controls.append(f"update {path}")
        return ControlReply(1, num_pages=6)

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def wait_until_over(self) -> str:
        await self.ended.wait()
        return self.over_reason

    def end(self, reason: str) -> None:
        """It is dead for good."""
        self.is_alive, self.is_over, self.over_reason = False, True, reason
        self.ended.set()
        self.gate.set()

    async def close(self) -> None:
        self.is_closed = True
        self.is_alive = False
        self.is_over = True
        self.gate.set()
