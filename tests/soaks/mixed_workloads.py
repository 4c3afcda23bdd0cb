"""Everything at once through real engines around tiny models, each request against itself alone.

    python -m tests.soaks.mixed_workloads --requests 3000 [--seed 0] [--jobs 1] [--state FILE]
                                          [--speculate]

A seed draws a model (full attention, windows, states), how little memory each tier has, and a
workload: prompts that share and part, samplings of every kind, drafts, adapters that are loaded,
given other weights under their name and unloaded while they are used, more of them than places,
other weights of the model, pauses, aborts, steps that fail, a storage (files or Redis) that is
slow, broken, damaged and shared by a second engine, engines that are closed and started on what
they left. The cache and the adapters are audited throughout, and what a router mirrors from the
events of an engine is what its cache has. Each answer must be what the same request gives alone on
an engine that reuses nothing (tokens, text, log-probabilities), but for near ties, which are
measured (`near_ties.py`), counted apart and printed with their gap. In the end nothing may be held,
and closed engines leave no thread and no open file. A failure gives its seed; where storage is
slow, the same seed may go another way the next time.

With --speculate every seed drafts, each ten seeds have another mix of families, all of them in
turn, and models with a prediction layer use it in every second seed. Most other seeds guess what a
request says alone, with wrong tokens among it. The engine that answers a request alone never
drafts, so that answers with and without drafts are compared. Then --compared is the number of
answers, in place of --requests.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import redis

from manyroots.cache.audit import audit
from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine
from manyroots.engine.input_processor import InputProcessor
from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.checks import check_structure
from manyroots.ids import AdapterName, RequestId
from manyroots.lora.audit import audit as audit_adapters
from manyroots.messages import (
    Abort,
    Control,
    ControlKind,
    ControlReply,
    FinishReason,
    LoadLora,
    LoraReply,
    Output,
    Submit,
    UnloadLora,
)  # fmt: skip
from manyroots.sampling import SamplingParams
from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS
from manyroots.step import Int32s, Runner, TokenLogprobs
from manyroots.store.backends.files import Files
from manyroots.store.backends.redis import Redis
from manyroots.store.sources.sources import AdapterSources
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.assembler import TextAssembler
from manyroots.text.tokenizer_files import load_tokenizer
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.prediction_layers import add_prediction
from tests.helpers.quick_tiers import worth_loading
from tests.helpers.storm_folders import storm_folder
from tests.soaks.differential import ADAPTERS, ALL_MIXES, PAGE, RECURRENT
from tests.soaks.kv_events import Consumer, resident
from tests.soaks.near_ties import Difference, is_close, near_tie
from tests.soaks.slices import command
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.store.tiers import RedisServer, server_program
from tests.unit.text.tiny_tokenizer import tiny_backend

MAX_LEN, VOCAB = 96, 300
MIXES = (
    "full", "five to one", "full and window", "sinks and experts", "convolutions", "delta nets",
    "mamba", "mamba beside attention",
)  # fmt: skip
PREDICTING = (
    "latents and sigmoids", "latents and few groups", "delta nets", "delta nets and experts",
)  # fmt: skip
"""Mixes whose models may have a prediction layer."""
SEEDS_PER_MIX = 10
INVOCATION = (7, 8)
CONTENTS = {
    **ADAPTERS,
    "other": Recipe(rank=8, modules=("q_proj", "v_proj", "down_proj", *RECURRENT), seed=4),
    "invoked": Recipe(
        rank=4,
        modules=("q_proj", "q_b_proj", "o_proj", "o_b_proj"),
        invocation_tokens=INVOCATION,
        seed=5,
    ),
}
NAMES = ("red", "green", "blue", "black", "white")
WEIGHTS = ("one", "two")
HANGS_S = PATIENCE_S
"""Without a single output while a request waits for one."""
AUDITED = 0.2
"""Of the steps: it takes as long as a step."""
STRUCTURES = (
    StructuredOutputsParams(choice=("hello world", "stop", "hello")),
    *(StructuredOutputsParams(regex=f"[a-f]{{3,{most}}}(stop)?") for most in range(4, 12)),
    StructuredOutputsParams(
        json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
        '"additionalProperties": false}'
    ),
)


@dataclass
class Answer:
    """What came of one sequence."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class World:
    """A tiny model with two sets of weights, adapters for it, and what each request gives alone."""

    def __init__(self, mix: str, *, predicts: bool) -> None:
        """`predicts`: whether the model has a prediction layer."""
        self.mix = mix
        self.predicts = predicts
        self.folder = storm_folder("mixed")
        kind, changes = ALL_MIXES[mix]
        if predicts and kind == "deepseek-v3":
            changes = {**changes, "num_mtp_layers": 1}
        for seed, name in enumerate(WEIGHTS):
            save_tiny(self.folder / name, kind, seed=seed, vocab_size=VOCAB, **changes)
            if predicts:
                add_prediction(self.folder / name, is_right=True, seed=seed)
            tiny_backend().save(str(self.folder / name / "tokenizer.json"))
        decoder = load_tiny(self.folder / WEIGHTS[0])
        self.targets = decoder.adapter_targets()
        for name, recipe in CONTENTS.items():
            write_adapter(self.folder / "adapters" / name, self.targets, recipe)
        pages = [f for f in decoder.families if not f.is_state]
        self.page_bytes = sum(f.unit_bytes(PAGE, decoder.dtype) for f in pages)
        self.state_bytes = sum(
            f.unit_bytes(PAGE, decoder.dtype) for f in decoder.families if f.is_state
        )
        self.tokenizer = load_tokenizer(str(self.folder / WEIGHTS[0]))
        self._cold: dict[str, Alone] = {}
        self._answers: dict[Any, Answer] = {}

    def adapter(self, content: str) -> str:
        return str(self.folder / "adapters" / content)

    def digests(self) -> dict[str, str]:
        """Contents by digest."""
        return self.engine(WEIGHTS[0]).digests

    def alone(self, weights: str, content: str | None, submit: Submit) -> Answer:
        """The same request by itself, cold."""
        key = (weights, content, tuple(submit.prompt), repr(submit.sampling), submit.seed)
        if key not in self._answers:
            self._answers[key] = self.engine(weights).ask(content, submit)
        return self._answers[key]

    def warm_up(self) -> None:
        """Start every thread of the engines that answer alone."""
        for weights in WEIGHTS:
            for content in (None, *CONTENTS):
                for structure in (None, STRUCTURES[1]):
                    sampling = SamplingParams(max_tokens=2, structured_outputs=structure)
                    submit = Submit(
                        RequestId(1), [5, 6, *INVOCATION, 9], None, sampling, 0, (), None
                    )
                    self.alone(weights, content, submit)

    def engine(self, weights: str) -> Alone:
        if weights not in self._cold:
            self._cold[weights] = Alone(self, weights)
        return self._cold[weights]


class Alone:
    """An engine that computes one request at a time, with everything in one step."""

    def __init__(self, world: World, weights: str) -> None:
        self._world = world
        settings = engine_settings({
            "model": str(world.folder / weights), "dtype": "float32", "enable_lora": True,
            "max_loras": len(CONTENTS), "block_size": PAGE, "max_model_len": MAX_LEN,
            "max_num_seqs": 1, "max_num_batched_tokens": MAX_LEN, "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 4 * MAX_LEN * world.page_bytes + 8 * world.state_bytes,
            "progress_bars": False,
        })  # fmt: skip
        self._loop = build_engine(settings).loop
        self._ids = itertools.count(1)
        self.digests: dict[str, str] = {}
        for content in CONTENTS:
            self._loop.handle(LoadLora(1, AdapterName(content), world.adapter(content)))
            replies: list[LoraReply] = []
            while not replies:
                self._loop.step()
                replies = self._loop.take_replies()
            assert replies[0].error is None, replies[0].error
            self.digests[replies[0].digest] = content

    def ask(self, content: str | None, submit: Submit) -> Answer:
        number = RequestId(next(self._ids))
        name = None if content is None else AdapterName(content)
        self._loop.handle(replace(submit, request_id=number, adapter=name))
        answer, assembler = Answer(), TextAssembler(self._world.tokenizer, submit.sampling)
        while answer.reason is None:
            if self._loop.is_reading and not self._loop.has_work:
                self._loop.wait_for_read(0.2)
            for output in self._loop.step():
                if output.request_id == number and take(answer, assembler, output):
                    self._loop.handle(Abort([number]))
        while self._loop.has_work:
            self._loop.step()
        return answer


def take(answer: Answer, assembler: TextAssembler, output: Output) -> bool:
    """Add what an output says; whether the sequence must be aborted, for a stop string."""
    assert answer.reason is None, "an output after the last"
    delta = assembler.push(output)
    answer.tokens += delta.tokens
    answer.text += delta.text
    answer.logprobs += delta.logprobs
    answer.prompt_logprobs += delta.prompt_logprobs
    answer.num_cached_tokens = delta.num_cached_tokens
    answer.reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
    answer.error = delta.error
    return delta.stopped


@functools.cache
def world_of(mix: str, *, predicts: bool = False) -> World:
    return World(mix, predicts=predicts)


# Faults


class Weather:
    """What storage and steps meet just now."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = random.Random(rng.random())
        self._lock = threading.Lock()
        self.fault_share = 0.0
        self.delay_s = 0.0
        self.fails_step = False

    def meet(self) -> None:
        with self._lock:
            is_bad = self._rng.random() < self.fault_share
        time.sleep(self.delay_s)
        if is_bad:
            raise OSError(5, "planted")

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Every folder of storage meets it."""
        with contextlib.ExitStack() as stack:
            for owner, name in ((GrammarCache, "compile"), (AdapterSources, "by_operator")):
                stack.enter_context(mock.patch.object(owner, name, self._late(owner, name)))
            for kind in (Files, Redis):
                for name in ("get", "put", "exists", "remove"):
                    stack.enter_context(mock.patch.object(kind, name, self._meeting(kind, name)))
            yield

    def _late(self, kind: object, name: str) -> Callable[..., Any]:
        """Done beside the steps: whatever comes meanwhile comes in any order with its end."""
        real = getattr(kind, name)

        def call(*arguments: Any) -> Any:
            with self._lock:
                late_s = self._rng.choice((0.0, 0.0, 0.005, 0.03))
            time.sleep(late_s)
            return real(*arguments)

        return call

    def _meeting(self, kind: type, name: str) -> Callable[..., Any]:
        real = getattr(kind, name)

        def call(backend: Any, *arguments: Any) -> Any:
            self.meet()
            return real(backend, *arguments)

        return call


class ShakyModel:
    """A runner's model that fails when the weather says so, after all that a plan starts."""

    def __init__(self, runner: Runner, weather: Weather) -> None:
        model: Any = runner
        self._compute, model._compute = model._compute, self._compute_or_fail
        self._weather = weather
        self.num_failed = 0

    def _compute_or_fail(self, *arguments: Any) -> Any:
        if self._weather.fails_step:
            self._weather.fails_step = False
            self.num_failed += 1
            raise RuntimeError("planted")
        return self._compute(*arguments)


@functools.cache
def redis_server() -> RedisServer:
    """One for all seeds, each of which empties it."""
    server = RedisServer(Path(tempfile.gettempdir()))
    atexit.register(server.stop)
    return server


# One engine under load


@dataclass
class Live:
    """A sequence under way, and what it should give."""

    submit: Submit
    weights: str
    contents: set[str | None]
    """One of these."""
    assembler: TextAssembler
    answer: Answer = field(default_factory=Answer)
    is_aborted: bool = False
    may_fail: bool = False


class ToldDrafts:
    """Guesses what each request says alone, with wrong tokens among it: text that repeats itself
    is rare here, and guesses from it are seldom right."""

    is_runner = False

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._rng = random.Random(0)

    def guess(self, request: Request, most: int) -> Int32s:
        live = self._driver.live.get(request.submit.request_id)
        if live is None or len(live.contents) != 1:
            return NO_TOKENS
        [content] = live.contents
        said = request.num_tokens - request.num_prompt_tokens
        answer = self._driver.world.alone(live.weights, content, live.submit).tokens
        told = [
            token if self._rng.random() < 0.8 else self._rng.randrange(3, VOCAB)
            for token in answer[said : said + most]
        ]
        return np.array(told, np.int32)

    def ended(self, request: Request) -> None:
        pass

    def forget(self) -> None:
        pass


class Driver:
    """One engine, what it is asked, and what it said."""

    def __init__(
        self, world: World, rng: random.Random, weather: Weather, events_folder: Path | None,
        *, is_told: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        """`events_folder`: of the sockets that events are published on; None is nowhere. `is_told`:
        whether guesses are what requests say alone."""
        self.is_told = is_told
        self.world, self.rng, self.weather = world, rng, weather
        self.events_folder = events_folder
        self.settings = settings
        self.weights = WEIGHTS[0]
        self.live: dict[RequestId, Live] = {}
        self.over: list[Live] = []
        self.known: dict[str, str] = {}
        """What each name means, where that is certain."""
        self.unsure: dict[str, set[str | None]] = {}
        """What a name may mean while it is read."""
        self.ops: dict[int, Callable[[Any], None]] = {}
        self.is_paused = False
        self.told: Counter[str] = Counter()
        self.num_outputs = 0
        self._audits = random.Random(0)
        self._ids = itertools.count(1)
        self.router: Consumer | None = None
        self.start()

    def start(self) -> None:
        given = engine_settings({
            "model": str(self.world.folder / self.weights), "dtype": "float32", "block_size": PAGE,
            "max_model_len": MAX_LEN, "enable_lora": True, "progress_bars": False,
            "weights_dirs": [str(self.world.folder)], **self.settings, **self._events(),
        })  # fmt: skip
        self.models: list[ShakyModel] = []

        def watch(runner: Runner) -> Runner:
            self.models.append(ShakyModel(runner, self.weather))
            return runner

        self.engine: Engine = build_engine(given, watch)
        self.loop = self.engine.loop
        self.scheduler: Any = self.loop._scheduler
        if self.is_told:
            self.scheduler.speculation.source = ToldDrafts(self)
        self.cache: Any = self.scheduler._cache
        if self.events_folder is not None:
            address = f"ipc://{self.events_folder}"
            self.router = Consumer(f"{address}/events", f"{address}/replay", b"")
        self.input_processor = InputProcessor(self.engine.info, self.world.tokenizer, self.rng)
        self.known.clear()
        self.unsure.clear()
        self.is_paused = False

    def _events(self) -> dict[str, Any]:
        if self.events_folder is None:
            return {}
        address = f"ipc://{self.events_folder}"
        choice = {
            "enable_kv_cache_events": True, "endpoint": f"{address}/events",
            "replay_endpoint": f"{address}/replay",
        }  # fmt: skip
        return {"kv_events_config": json.dumps(choice)}

    def _mirror(self) -> None:
        """A router knows what the cache has, and nothing else."""
        if self.router is None:
            return
        loop: Any = self.loop
        self.router.catch_up(loop._events._next - 1)
        self.told["mirrored events"] = self.router.num_events
        assert self.router.pages == resident(self.cache), "a router's pages are not the cache's"

    # What it is asked

    def submit(
        self, prompt: list[int], sampling: SamplingParams, name: str | None, salt: str | None,
        priority: int,
    ) -> None:  # fmt: skip
        made = self.input_processor.submits(
            prompt, sampling, salt,
            lambda: RequestId(next(self._ids)),
            adapter=None if name is None else AdapterName(name), priority=priority,
        )  # fmt: skip
        for submit in made:
            contents: set[str | None] = {None}
            if name is not None:
                contents = self.unsure.get(name, set()) | {self.known.get(name, "nothing")}
            assembler = TextAssembler(self.world.tokenizer, submit.sampling)
            live = Live(submit, self.weights, contents, assembler)
            live.may_fail = "nothing" in contents
            self.live[submit.request_id] = live
            self.loop.handle(submit)

    def abort(self, live: Live) -> None:
        live.is_aborted = True
        self.loop.handle(Abort([live.submit.request_id]))

    def load(self, name: str, content: str, *, in_place: bool, path: str | None = None) -> None:
        number = next(self._ids)
        before = self.known.pop(name, None)
        self.unsure.setdefault(name, {before or "nothing"}).add(content)

        def end(reply: LoraReply) -> None:
            self.told["loads" if reply.error is None else "refused loads"] += 1
            self._settle(name)

        self.ops[number] = end
        path = path or self.world.adapter(content)
        is_pinned = self.rng.random() < 0.1
        self.loop.handle(LoadLora(number, AdapterName(name), path, is_pinned, in_place))

    def unload(self, name: str) -> None:
        number = next(self._ids)
        before = self.known.pop(name, None)
        self.unsure.setdefault(name, {before or "nothing"}).add("nothing")
        self.ops[number] = lambda reply: self._settle(name)
        self.loop.handle(UnloadLora(number, AdapterName(name)))

    def _settle(self, name: str) -> None:
        """What a name means now is what the engine says, if nothing about it is under way."""
        directory: Any = self.loop.preparation._directory
        entry = directory._entries.get(name)
        if entry is not None and (entry.is_reading or entry.waiting):
            return
        version = self.scheduler.adapters.registry.loaded.get(AdapterName(name))
        self.unsure.pop(name, None)
        self.known.pop(name, None)
        if version is not None:
            self.known[name] = self.world.digests()[version.digest.hex()]

    def control(self, kind: ControlKind, path: str = "") -> ControlReply:
        number = next(self._ids)
        self.loop.handle(Control(number, kind, path))
        deadline = time.monotonic() + HANGS_S
        while True:
            self.step()
            for reply in self.loop.take_controls():
                assert reply.op_id == number
                return reply
            assert time.monotonic() < deadline, f"{kind} is not answered"

    # What it does

    def step(self) -> None:
        self._note_contents()
        outputs = self.loop.step()
        self.num_outputs += len(outputs)
        for output in outputs:
            assert output.request_id > 0, "a check's own output is told"
            self._take(output)
        self._note_contents()
        for reply in self.loop.take_replies():
            self.ops.pop(reply.op_id)(reply)
        self.loop.take_loads()
        if self._audits.random() < AUDITED:
            audit(self.cache)
            audit_adapters(self.scheduler.adapters)

    def _note_contents(self) -> None:
        """Which weights a request got, where its name was being given others."""
        for number, live in self.live.items():
            if len(live.contents) > 1:
                request = self.scheduler._requests.get(number)
                if request is not None and request.hold is not None:
                    found = self.world.digests()[request.hold.digest.hex()]
                    assert found in live.contents, f"{found} is none of {live.contents}"
                    live.contents, live.may_fail = {found}, False

    def _take(self, output: Output) -> None:
        live = self.live.get(output.request_id)
        if live is None:
            return  # a stop string was found, and the engine says that it has aborted it
        stopped = take(live.answer, live.assembler, output)
        if stopped:
            self.loop.handle(Abort([output.request_id]))
        if live.answer.reason is not None:
            del self.live[output.request_id]
            self.over.append(live)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.loop.is_reading and not self.loop.has_work:
                self.loop.wait_for_read(0.05)
            self.step()

    def drain(self) -> None:
        """Until everything has ended."""
        if self.is_paused:
            self.resume()
        said, deadline = -1, 0.0
        while self.loop.has_work or self.loop.is_reading or self.live:
            if self.num_outputs > said:
                said, deadline = self.num_outputs, time.monotonic() + HANGS_S
            self.run(1)
            assert time.monotonic() < deadline, f"{len(self.live)} requests hang: {self._stuck()}"
        self._mirror()

    def _stuck(self) -> str:
        states = Counter(str(r.state) for r in self.scheduler._requests.values())
        lives = [(live.submit, live.is_aborted) for live in self.live.values()][:3]
        return f"{dict(states)}, {lives}, {self.loop.stats()}"

    def pause(self) -> None:
        assert self.control(ControlKind.PAUSE).error is None
        self.is_paused = True

    def resume(self) -> None:
        assert self.control(ControlKind.RESUME).error is None
        self.is_paused = False

    def take_weights(self, weights: str, ask: Callable[[], None]) -> None:
        """As a trainer does: pause, end what runs, update, resume. Requests that arrive meanwhile
        wait: for their adapter's files, for a grammar, or for the end of the pause."""
        if not self.is_paused:
            self.pause()
        how = self.rng.choice(("abort", "finish"))
        if how == "abort":
            for live in list(self.live.values()):
                self.abort(live)
            self.step()
        else:
            self.resume()
            self.drain()
            self.pause()
        waiting = [live for live in self.live.values() if not live.is_aborted]
        assert not waiting, "a request came in between"
        for _ in range(self.rng.choice((0, 0, 2, 4))):
            ask()
        for _ in range(self.rng.choice((0, 3))):
            self.step()
        reply = self.control(ControlKind.UPDATE_WEIGHTS, weights)
        assert reply.error is None, reply.error
        self.weights = weights
        for live in self.live.values():
            live.weights = weights
        self.told["updates"] += 1
        self.resume()

    def end(self) -> None:
        """Nothing may be left of anything."""
        self.drain()
        for name in list(self.known):
            self.unload(name)
        self.drain()
        assert self.control(ControlKind.RESET_CACHE).error is None
        self.drain()
        stats = self.loop.stats()
        counts = {
            "running": stats.num_running, "waiting": stats.num_waiting,
            "paused": stats.num_paused, "held": stats.num_held_pages,
            "cached": stats.num_cached_pages, "lost": stats.num_pages - stats.num_free_pages,
        }  # fmt: skip
        assert not any(counts.values()), f"left in the end: {counts}"
        adapters = stats.adapters
        assert adapters is not None
        left = {
            "loaded": adapters.num_loaded, "draining": adapters.num_draining,
            "loading": adapters.num_loading, "running": adapters.num_running,
            "on device": adapters.num_on_device, "on host": adapters.num_on_host,
        }  # fmt: skip
        assert not any(left.values()), f"adapters left in the end: {left}"
        self._check_bookkeeping()
        self._check_counts()

    def _check_bookkeeping(self) -> None:
        loop: Any = self.loop
        early = loop.preparation
        kept = {
            "notices": early._notices, "loads": loop._load_timer._begun,
            "preparing": early.waiting, "entries": early._directory._entries,
            "grammars": early._compiles._held, "waiting": early._compiles._waiting,
            "noted": loop._check._noted if loop._check else {},
            "requests": self.scheduler._requests,
            "holds": self.scheduler.adapters.registry.num_holds,
            "leaving": self.scheduler._departures.leaving,
            "ops": self.ops,
        }  # fmt: skip
        left = {name: len(what) for name, what in kept.items() if len(what)}
        assert not left, f"bookkeeping left in the end: {left}"

    def _check_counts(self) -> None:
        stats = self.loop.stats()
        self.told["failed steps"] += sum(model.num_failed for model in self.models)
        self.told["retractions"] += stats.total_retractions
        self.told["pauses"] += stats.total_pauses
        self.told["host tokens"] += stats.total_host_hit_tokens
        self.told["storage tokens"] += stats.total_storage_hit_tokens
        self.told["hit tokens"] += stats.total_hit_tokens
        if stats.speculation is not None:
            self.told["draft tokens"] += stats.speculation.total_draft_tokens
            self.told["accepted draft tokens"] += stats.speculation.total_accepted_tokens
        assert stats.total_hit_tokens <= stats.total_lookup_tokens
        if stats.self_check is not None:
            self.told["self-checks"] += stats.self_check.total_checks
            assert not stats.self_check.total_differences, "pages differ from what is computed"

    def close(self) -> None:
        self.loop.close()
        if self.router is not None:
            self.router.close()

    def restart(self) -> None:
        """Another engine on what this one left in storage; waiting requests are lost."""
        for live in list(self.live.values()):
            self.abort(live)
        self.loop.handle(Control(0, ControlKind.RESUME))
        self.drain_quietly()
        self.close()
        self.start()
        self.told["restarts"] += 1

    def drain_quietly(self) -> None:
        while self.loop.has_work or self.loop.is_reading:
            self.run(1)
            self.loop.take_controls()


# One seed


class Workload:
    """What a seed asks of its engines, and in what order."""

    def __init__(self, seed: int, *, speculates: bool) -> None:
        """`speculates`: as --speculate."""
        self.seed = seed
        self.rng = rng = random.Random(f"mixed {seed}")
        self.speculates = speculates
        mix = rng.choice(MIXES)
        if speculates:
            mix = tuple(ALL_MIXES)[seed // SEEDS_PER_MIX % len(ALL_MIXES)]
        self.world = world_of(mix, predicts=speculates and mix in PREDICTING and seed % 2 == 0)
        self.weather = Weather(rng)
        self.told: Counter[str] = Counter()
        for weights in WEIGHTS:
            self.world.engine(weights)  # its threads are not the workload's
        if speculates:
            self.world.warm_up()  # nor are those that it starts when it is asked
        check_structure(STRUCTURES[0])  # one helper for all of this process, which stays
        if server_program():
            redis_server()
        self.before = held_by_process()
        self.folder = Path(tempfile.mkdtemp(dir=self.world.folder))
        self.has_storage = rng.random() < 0.65
        self.uses_redis = self.has_storage and bool(server_program()) and rng.random() < 0.35
        # Where there is storage, requests are so much alike that another engine's pages are found.
        num_heads, lengths = (2, (24, 31, 45)) if self.has_storage else (6, (3, 8, 13, 24, 31, 45))
        self.heads = [self._text(rng.choice(lengths)) for _ in range(num_heads)]
        self.contents = rng.sample(list(CONTENTS), 2 if self.has_storage else len(CONTENTS))
        self.salts = (None,) * 9 + ("a",) if self.has_storage else (None, None, None, "a", "b")
        settings = self._settings() | self._drafts(random.Random(f"drafts {seed}"))
        self.settings = settings
        num_engines = 2 if self.has_storage and rng.random() < 0.4 else 1
        self.drivers = [
            Driver(
                self.world,
                rng,
                self.weather,
                self._events_folder(number),
                is_told=speculates and not self.world.predicts and seed % 4 != 0,
                **settings,
            )
            for number in range(num_engines)
        ]
        for driver in self.drivers:
            self._load_some(driver)

    def _events_folder(self, number: int) -> Path | None:
        if self.rng.random() < 0.5:
            return None
        folder = self.folder / f"e{number}"
        folder.mkdir()
        return folder

    def _load_some(self, driver: Driver) -> None:
        for name in NAMES[:4]:
            driver.load(name, self.rng.choice(self.contents), in_place=False)

    def _settings(self) -> dict[str, Any]:
        rng, world = self.rng, self.world
        max_num_seqs = rng.choice((1, 3, 4, 6, 8))
        num_pages = rng.choice((1.1, 1.1, 1.5, 2.5)) * (MAX_LEN // PAGE)
        num_checkpoints = rng.choice((1, 3, 8))
        max_loras = rng.choice((1, 2, 2, 3))
        settings: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.choice((max_num_seqs, 9, 24, 64)),
            "kv_cache_memory_bytes": int(
                num_pages
                * world.page_bytes
                * (1.3 if world.mix != "full" else 1)
                * (1.8 if world.predicts else 1)  # the layer's own keys, and hidden states
                + (max_num_seqs + num_checkpoints) * world.state_bytes
            ),
            "max_loras": max_loras,
            "max_cpu_loras": rng.choice((0, max_loras, max_loras + 1)),
            "scheduling_policy": rng.choice(("fcfs", "priority", "pack", "fair")),
            "adapter_quantum_steps": rng.choice((None, 1, 3)),
            "long_prefill_token_threshold": rng.choice((None, None, 5)),
        }
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], max_num_seqs)
        if world.state_bytes:
            settings["checkpoint_memory_bytes"] = num_checkpoints * world.state_bytes
            settings["checkpoint_interval_tokens"] = rng.choice((PAGE, 3 * PAGE))
        if rng.random() < 0.7:
            settings["num_host_pages"] = rng.choice((1, 3, 20, 80))
            settings["kv_load_overlap"] = rng.choice(("on", "off"))
        if self.has_storage:
            settings |= {
                "kv_storage": self._storage(),
                "kv_storage_timeout_s": rng.choice((0.02, 0.3, 5.0)),
                "prefetch": rng.choice(("best-effort", "wait", "timeout")),
                "prefetch_timeout_steps": rng.choice((0, 2, 8)),
            }
            if rng.random() < 0.3 and not self.uses_redis:
                settings["kv_storage_size"] = 40 * 8192 / 2**30
            if rng.random() < 0.5:  # so that much of it comes from there
                settings |= {"prefetch": "wait", "kv_storage_timeout_s": 5.0}
                settings.pop("num_host_pages", None)
        if self.has_storage or "num_host_pages" in settings:
            settings["write_back"] = rng.choice(("through", "through", "reused", "eviction"))
        if rng.random() < 0.3:
            settings["kv_check_share"] = 0.5
        return settings

    def _drafts(self, rng: random.Random) -> dict[str, Any]:
        """Guesses from earlier text, as short as one equal token, so that many are wrong; or of the
        prediction layer."""
        if rng.random() < 0.3 and not self.speculates:
            return {}
        if self.world.predicts:
            config = {
                "method": "mtp", "num_speculative_tokens": rng.choice((1, 2, 4)),
                "adaptive": rng.random() < 0.2,
            }  # fmt: skip
            return {"speculative_config": json.dumps(config)}
        config = {
            "method": "suffix", "num_speculative_tokens": rng.choice((1, 3, 8)),
            "prompt_lookup_min": rng.choice((1, 1, 2)), "adaptive": rng.random() < 0.2,
        }  # fmt: skip
        return {"speculative_config": json.dumps(config)}

    def _storage(self) -> str:
        if not self.uses_redis:
            return f"file://{self.folder}/store"
        server = redis_server()
        with redis.Redis(port=server.port) as client:
            client.flushall()
        return server.url

    def _text(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    # What happens

    def run(self, num_events: int, num_answers: int) -> None:
        """So many events, and more until so many answers are there: what is asked follows from
        what was there, so that a machine that reads adapters later may abort nearly everything."""
        with self.weather.over():
            try:
                for number in itertools.count():
                    if number >= num_events and self._num_answers() >= num_answers:
                        break
                    driver = self.rng.choice(self.drivers)
                    self._event(driver)
                    for each in self.drivers:
                        each.run(self.rng.choice((0, 0, 1, 1, 2, 5)))
                self._clear_up()
                for driver in self.drivers:
                    driver.end()
                    self.told.update(driver.told)
            finally:
                for driver in self.drivers:
                    driver.close()
                shutil.rmtree(self.folder, ignore_errors=True)
        self._check_process()
        judge = Judge(self.world, self.told, f"seed {self.seed}")
        for driver in self.drivers:
            for live in driver.over:
                judge.compare(live)

    def _num_answers(self) -> int:
        return sum(bool(live.answer.tokens) for driver in self.drivers for live in driver.over)

    def _check_process(self) -> None:
        """Closed engines leave no thread and no open file."""
        deadline = time.monotonic() + HANGS_S
        while (now := held_by_process()) != self.before and time.monotonic() < deadline:
            time.sleep(0.02)
        threads, before = Counter(now[0]), Counter(self.before[0])
        assert threads <= before, f"threads are left: {threads - before}"
        assert now[1] <= self.before[1], f"{now[1]} files are open, and {self.before[1]} were"

    def _event(self, driver: Driver) -> None:
        rng = self.rng
        draw = rng.random()
        if draw < 0.62:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                self._ask(driver)
        elif draw < 0.70:
            if driver.live:
                driver.abort(rng.choice(list(driver.live.values())))
        elif draw < 0.80:
            self._change_adapter(driver)
        elif draw < 0.83:
            driver.resume() if driver.is_paused else driver.pause()
        elif draw < 0.85:
            weights = rng.choice(WEIGHTS)
            if driver.live and rng.random() < 0.3:
                self._refused_update(driver, weights)
            else:
                driver.take_weights(weights, lambda: self._ask(driver))
        elif draw < 0.87:
            assert driver.control(ControlKind.RESET_CACHE).error is None
        elif draw < 0.89:
            self.weather.fails_step = not driver.is_paused
        elif draw < 0.96:
            if self.has_storage:
                self._change_weather()
        elif draw < (0.975 if self.has_storage else 0.965):
            driver.restart()
            self._load_some(driver)
        elif draw < 0.98:
            driver.drain()
        else:
            driver.run(30)

    def _refused_update(self, driver: Driver, weights: str) -> None:
        if not driver.is_paused:
            driver.pause()
        num_begun = driver.scheduler.num_begun
        reply = driver.control(ControlKind.UPDATE_WEIGHTS, weights)
        if num_begun:
            assert reply.error is not None
        elif reply.error is None:
            driver.weights = weights
            for live in driver.live.values():
                live.weights = weights  # none had begun
        driver.resume()

    def _clear_up(self) -> None:
        self.weather.fails_step, self.weather.fault_share, self.weather.delay_s = False, 0.0, 0.0

    def _change_weather(self) -> None:
        rng, weather = self.rng, self.weather
        draw = rng.random()
        if draw < 0.35:
            weather.fault_share = rng.choice((0.0, 0.0, 0.3, 1.0))
        elif draw < 0.6:
            weather.delay_s = rng.choice((0.0, 0.0, 0.004, 0.03))
        if draw >= 0.6:
            self._spoil_redis(draw) if self.uses_redis else self._spoil_files(draw)
        for driver in self.drivers:
            health: Any = driver.cache.storage
            for direction in (health._reading, health._writing):
                direction._rests_until = 0

    def _spoil_files(self, draw: float) -> None:
        files = sorted(self.folder.glob("store/v1/??/*"))
        if draw >= 0.97:  # by an operator that needs the space
            shutil.rmtree(self.folder / "store", ignore_errors=True)
        elif files:
            path = self.rng.choice(files)
            with contextlib.suppress(FileNotFoundError):
                if draw < 0.75:
                    path.unlink()
                elif draw < 0.9:
                    path.write_bytes(self._damaged(path.read_bytes()))
                else:
                    path.write_bytes(self.rng.choice(files).read_bytes())

    def _spoil_redis(self, draw: float) -> None:
        with redis.Redis(port=redis_server().port) as client:
            found: Any = client.keys("manyroots:*")
            keys = sorted(found)
            if draw >= 0.97:
                client.flushall()
            elif keys:
                value: Any = client.get(self.rng.choice(keys))
                client.set(self.rng.choice(keys), value if draw < 0.8 else self._damaged(value))

    def _damaged(self, value: bytes) -> bytes:
        changed = bytearray(value)
        if changed and self.rng.random() < 0.3:
            return bytes(changed[: self.rng.randrange(len(changed))])
        if changed:
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def _change_adapter(self, driver: Driver) -> None:
        rng = self.rng
        name, content = rng.choice(NAMES), rng.choice(self.contents)
        draw = rng.random()
        if draw < 0.3:
            driver.unload(name)
        elif draw < 0.4:
            driver.load(name, "broken", in_place=True, path=str(self.folder / "nowhere"))
        elif draw < 0.6:
            # A folder of this name's own, whose files are replaced while the old are in use.
            path = self.folder / f"of-{name}"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.world.adapter(content), path)
            driver.load(name, content, in_place=True, path=str(path))
            self._may_fail_to_load(driver, name)
        else:
            driver.load(name, content, in_place=rng.random() < 0.7)

    def _may_fail_to_load(self, driver: Driver, name: str) -> None:
        """A request with a folder's old content fails if no copy of that content is in memory."""
        for live in driver.live.values():
            live.may_fail |= live.submit.adapter is not None

    def _ask(self, driver: Driver) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.heads))
        old = [live for live in driver.over[-12:] if live.answer.reason is FinishReason.LENGTH]
        if old and rng.random() < 0.35:
            said = rng.choice(old)
            prompt = [*said.submit.prompt, *said.answer.tokens]
        if rng.random() < 0.8:
            prompt += self._text(rng.choice((1, 2, 4, 5, 11)))
        name = rng.choice(NAMES) if rng.random() < 0.6 else None
        if name is not None and name not in driver.known and rng.random() < 0.8:
            name = rng.choice(list(driver.known)) if driver.known else None
        if rng.random() < 0.3:
            prompt = [*prompt[:30], *INVOCATION, *prompt[30:]]
        prompt = prompt[: MAX_LEN - 2]
        salt = rng.choice(self.salts)
        priority = rng.randint(-2, 2) if self.settings["scheduling_policy"] == "priority" else 0
        driver.submit(prompt, self._sampling(prompt), name, salt, priority)

    def _sampling(self, prompt: list[int]) -> SamplingParams:
        rng = self.rng
        room = MAX_LEN - len(prompt)
        given: dict[str, Any] = {
            "max_tokens": min(room, rng.choice((1, 2, 5, 9, 17, 30, 45))),
            "ignore_eos": rng.random() < 0.6,
            "temperature": 0.0 if rng.random() < 0.6 else rng.choice((0.3, 1.0, 2.0)),
            "seed": rng.randrange(1000),
        }
        if rng.random() < 0.25:
            given["n"] = rng.choice((2, 3))
        if rng.random() < 0.3:
            given |= {"top_k": rng.choice((-1, 1, 5)), "top_p": rng.choice((0.3, 0.9, 1.0)),
                      "min_p": rng.choice((0.0, 0.1))}  # fmt: skip
        if rng.random() < 0.3:
            given |= {"presence_penalty": rng.choice((0, 1.5)),
                      "frequency_penalty": rng.choice((0, -0.5)),
                      "repetition_penalty": rng.choice((1.0, 1.3))}  # fmt: skip
        if rng.random() < 0.5:
            given["logprobs"] = rng.choice((0, 1, 5, 20))
        if rng.random() < 0.2:
            given["prompt_logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.2:
            given["logit_bias"] = {rng.randrange(VOCAB): rng.choice((-100, 3, 8)) for _ in "abc"}
        if rng.random() < 0.2:
            given["min_tokens"] = rng.randint(0, given["max_tokens"])
        if rng.random() < 0.3:
            given["stop_token_ids"] = tuple(rng.sample(range(3, VOCAB), 12))
        if rng.random() < 0.2:
            given["stop"] = tuple(
                rng.choice(("a", "\ufffd\ufffd", "lo", "e", "\x00")) for _ in "ab"
            )
            given["include_stop_str_in_output"] = rng.random() < 0.5
        if rng.random() < 0.1:
            given |= {"structured_outputs": rng.choice(STRUCTURES), "ignore_eos": False}
        return SamplingParams(**given)


class Judge:
    """Compares answers with those to the same requests alone."""

    def __init__(self, world: World, told: Counter[str], name: str) -> None:
        """`told`: counts, added to. `name`: goes before what is printed."""
        self.world, self.told, self.name = world, told, name

    def compare(self, live: Live) -> None:
        answer = live.answer
        self.told["requests"] += 1
        self.told["tokens"] += len(answer.tokens)
        if answer.reason is FinishReason.ERROR:
            self.told["errors"] += 1
            error = str(answer.error)
            is_planted = "planted" in error or live.may_fail
            assert is_planted, f"{error}: {live}"
            if not answer.tokens:
                return
        if answer.reason is FinishReason.ABORT:
            self.told["aborts"] += 1
            assert live.is_aborted, f"no caller has aborted {live}"
            if not answer.tokens:
                return
        assert len(live.contents) == 1, f"its weights are unknown: {live}"
        [content] = live.contents
        cold = self.world.alone(live.weights, content, live.submit)
        self.told["compared"] += 1
        where = f"{self.world.mix}, {live.weights}, {content}, {live.submit}"
        at = _parting(answer.tokens, cold.tokens)
        whole = answer.reason in (FinishReason.STOP, FinishReason.LENGTH)
        found = self._first_difference(live, cold, at, where)
        if found is not None:
            self._judge(live, content, found, where)
        elif whole:
            ends = (len(answer.tokens), answer.reason, answer.stop_reason, answer.text)
            wanted = (len(cold.tokens), cold.reason, cold.stop_reason, cold.text)
            assert ends == wanted, f"{ends} from the cache and {wanted} cold: {where}"

    def _first_difference(
        self, live: Live, cold: Answer, at: int | None, where: str
    ) -> Difference | None:
        """`at`: the first token that differs."""
        answer, prompt = live.answer, live.submit.prompt
        if live.submit.sampling.prompt_logprobs is not None and answer.tokens:
            ours, theirs = answer.prompt_logprobs, cold.prompt_logprobs
            assert len(ours) == len(theirs), where
            off = _first_off(ours, theirs, where)
            if off is not None:
                told = prompt[off + 1]
                return Difference(prompt[: off + 1], None, told, told, ours[off], theirs[off])
        ours, theirs = answer.logprobs, cold.logprobs
        off = _first_off(ours[:at], theirs, where)
        if off is None and at is None:
            return None
        place = at if off is None else off
        assert place is not None
        return Difference(
            [*prompt, *answer.tokens[:place]], place, answer.tokens[place], cold.tokens[place],
            *((ours[place], theirs[place]) if ours else ()),
        )  # fmt: skip

    def _judge(self, live: Live, content: str | None, found: Difference, where: str) -> None:
        """Another token, or another log-probability, is right only where rounding may choose it."""
        ask = functools.partial(self.world.engine(live.weights).ask, content)
        tie = near_tie(ask, live.submit, found)
        what = f"after {len(found.before)} tokens: {found.ours} ({found.our_scores}), and cold "
        what += f"{found.theirs} ({found.their_scores}): {where}"
        assert tie is not None, what
        self.told[f"near ties of {tie.kind}"] += 1
        print(f"{self.name}: excused: {tie}: {what}", flush=True)


def _parting(ours: list[int], theirs: list[int]) -> int | None:
    """Where two answers part; one may be shorter."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None


def _first_off(ours: list[TokenLogprobs], theirs: list[TokenLogprobs], where: str) -> int | None:
    """The first log-probabilities that differ."""
    assert len(ours) <= len(theirs), where
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert one.token == other.token, f"{at}: {where}"
        tops = zip(one.top_logprobs, other.top_logprobs, strict=True)
        pairs = ((one.logprob, other.logprob), *tops)
        if not all(is_close(mine, right) for mine, right in pairs):
            return at
    return None


def held_by_process() -> tuple[list[str], int]:
    """The names of its threads, and how many files it has open."""
    names = sorted(thread.name.rpartition("_")[0] for thread in threading.enumerate())
    return names, len(list(Path("/proc/self/fd").iterdir()))


NUM_EVENTS = 60
NUM_ANSWERS = 20
"""Of a seed with --speculate: a model takes longer to make than to ask."""


def run_seed(
    seed: int, num_events: int = NUM_EVENTS, num_answers: int = 0, *, speculates: bool = False
) -> tuple[dict[str, int], str | None]:
    """One workload: counts, and what was wrong."""
    logging.disable()  # what is made to fail says so
    try:
        with worth_loading():
            workload = Workload(seed, speculates=speculates)
            workload.run(num_events, num_answers)
    except Exception:
        return {}, traceback.format_exc()
    finally:
        logging.disable(logging.NOTSET)
    return dict(workload.told), None


def main(argv: list[str] | None = None) -> int:
    what, given = "tests.soaks.mixed_workloads", sys.argv[1:] if argv is None else list(argv)
    if "--speculate" in given:
        given.remove("--speculate")
        run = functools.partial(run_seed, num_answers=NUM_ANSWERS, speculates=True)
        return command(f"{what} --speculate", run, "compared", description=__doc__, argv=given)
    return command(what, run_seed, "requests", description=__doc__, argv=given)


if __name__ == "__main__":
    sys.exit(main())
