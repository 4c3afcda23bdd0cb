"""A whole engine around a tiny model, observed: its decisions, and the bytes that they produce.

`RealEngine` is the engine as it is built for serving, on a CPU, audited as it steps; it keeps
its plans and the cache's events. `check_units` compares every unit that can be found, on the
device, on the host and in storage, with what a cold engine computes for the same tokens and
weights: a page that is found under the wrong name, copied to the wrong place or written by the
wrong weights differs, whether or not an answer's tokens show it.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.events import CacheEvent, PagesStored
from manyroots.cache.keys import Owner, PrefixKey
from manyroots.cache.matching import Match
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId, Tier
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.lora.audit import audit as audit_adapters
from manyroots.messages import (
    Abort,
    CacheUse,
    FinishReason,
    LoadLora,
    LoraReply,
    Retention,
    Submit,
    UnloadLora,
)
from manyroots.sampling import SamplingParams
from manyroots.scheduler.audit import audit as audit_scheduler
from manyroots.step import Plan, Runner, StepResult
from manyroots.store.unit_values import unit_key, unpack
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.audits import CacheAudits
from tests.helpers.cache_harness import Path as PagePath
from tests.helpers.cache_harness import resident
from tests.helpers.patience import PATIENCE_S
from tests.soaks.differential import ALL_MIXES, ATTENTION, BLOCK, RECURRENT
from tests.soaks.differential import PAGE as PAGE
from tests.unit.models.tiny import FULL, load_tiny, save_tiny
from tests.unit.models.tiny import RECURRENT as LINEAR
from tests.unit.text.tiny_tokenizer import tiny_backend

VOCAB, MAX_LEN = 300, 160


def text(seed: int, count: int) -> list[int]:
    """A prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


MODULES = (*ATTENTION, *BLOCK, *RECURRENT)
ADAPTERS = {name: Recipe(rank=4, modules=MODULES, seed=i) for i, name in enumerate("abc", start=1)}
ROUNDING = 10
"""Factor on the error of one computation: errors of chunked states and pages add up. Values of
wrong tokens or weights are off by as much as they are large."""
Numbers = npt.NDArray[np.float32]
Units = list[Numbers | None]
"""Of one page, by family; None where a family keeps nothing of it."""


TWO = {"num_hidden_layers": 2}
HYBRID = {**TWO, "layer_types": [LINEAR, FULL]}
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    "full": TWO, "window": TWO, "latents": TWO, "mamba beside attention": TWO, "mamba": HYBRID,
    "delta nets": HYBRID,
}  # fmt: skip
"""One or two of each family: pages and states are found and copied alike with more, and most time
is theirs."""


class RealWorld:
    """A tiny model with adapters on disk, and what a cold engine computes with them."""

    def __init__(self, folder: Path, mix: str, **changes: Any) -> None:
        self.mix, self.folder, self.model = mix, folder, folder / "model"
        kind, given = ALL_MIXES[mix]
        given = {**given, **FEWER_LAYERS.get(mix, {})}
        save_tiny(self.model, kind, vocab_size=VOCAB, **{**given, **changes})
        tiny_backend().save(str(self.model / "tokenizer.json"))
        targets = load_tiny(self.model).adapter_targets()
        for name, recipe in ADAPTERS.items():
            write_adapter(folder / name, targets, recipe)
        self._cold: RealEngine | None = None
        self._known: dict[tuple[AdapterDigest | None, bytes], Units] = {}
        """By adapter and tokens."""
        self._salts = itertools.count()

    def path(self, content: str) -> str:
        return str(self.folder / content)

    def cold_unit(self, path: PagePath, family: int) -> Numbers:
        """What a cold engine has of a path's last page."""
        adapter = path[0][0].namespace.adapter
        assert {owner for owner, _ in path} == {path[0][0]}, "pages of one owner alone"
        key = (adapter, b"".join(tokens for _, tokens in path))
        # Not every boundary of a longer prompt has a state, but every prompt's last one.
        if key not in self._known or self._known[key][family] is None:
            self._compute(*key)
        unit = self._known[key][family]
        assert unit is not None, f"a cold engine keeps nothing of page {len(path) - 1}"
        return unit

    def _compute(self, adapter: AdapterDigest | None, tokens: bytes) -> None:
        """All pages of a prompt at once, without anything that is cached."""
        if self._cold is None:
            # Not audited: it has thousands of pages, and one request at a time.
            self._cold = RealEngine(
                self, audits=False, checkpoint_interval_tokens=PAGE, kv_cache_memory_bytes=64 << 20
            )
        cold, salt = self._cold, f"cold {next(self._salts)}"
        name = None if adapter is None else cold.name_of(adapter)
        prompt = [*np.frombuffer(tokens, np.int32).tolist(), 3]
        cold.ask(prompt, name, salt=salt, max_tokens=1)
        found: dict[PagePath, Units] = {}
        for (plane, path), unit in resident(cold.cache).items():
            if path[0][0].namespace.salt == salt:
                units = found.setdefault(path, [None] * len(cold.cache.layout.device))
                units[plane] = cold.unit(plane, unit)
        for path, values in found.items():
            key = (adapter, b"".join(page for _, page in path))
            known = self._known.setdefault(key, values)
            for family, numbers in enumerate(values):
                known[family] = numbers if known[family] is None else known[family]
        cold.cache.evict_namespace(Namespace(adapter, salt))

    def close(self) -> None:
        if self._cold is not None:
            self._cold.close()


@dataclass
class Said:
    """The outcome of one request."""

    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    cache_use: CacheUse | None = None
    reason: FinishReason | None = None
    error: str | None = None
    first_step: int | None = None
    """The number of steps before its first token."""


class _Kept:
    """A runner that keeps every plan."""

    def __init__(self, runner: Runner, plans: list[Plan]) -> None:
        self._runner, self._plans = runner, plans

    def launch(self, plan: Plan) -> Future[StepResult]:
        self._plans.append(plan)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


class RealEngine:
    """One engine and its outputs."""

    def __init__(
        self,
        world: RealWorld,
        *,
        names: Iterable[str] = ADAPTERS,
        audits: bool = True,
        **settings: Any,
    ) -> None:
        """`names`: adapters that are loaded from the start on. `audits`: as it steps."""
        self.world, self._audits = world, audits
        self.plans: list[Plan] = []
        self.events: list[CacheEvent] = []
        given = {
            "model": str(world.model), "dtype": "float32", "block_size": PAGE,
            "max_model_len": MAX_LEN, "enable_lora": True, "progress_bars": False,
            "kv_storage_timeout_s": PATIENCE_S, **settings,
        }  # fmt: skip
        self.runner: Any = None

        def watch(runner: Runner) -> Runner:
            self.runner = runner
            return _Kept(runner, self.plans)

        self.loop = build_engine(engine_settings(given), watch).loop
        self.scheduler: Any = self.loop._scheduler
        self.cache: PrefixCache = self.scheduler._cache
        self._cache_audits = CacheAudits(self.cache)
        # Whether a load is worth its time must not depend on this machine's speed.
        costs: Any = self.cache.costs
        costs.is_worth_loading = costs.is_worth_fetching = lambda *_: True
        self._keep_events()
        self._ids = itertools.count(1)
        self.said: dict[int, Said] = {}
        self.num_steps = 0
        self._replies: dict[int, LoraReply] = {}
        self._digests: dict[str, AdapterDigest] = {}
        """Of every name that was ever loaded."""
        for name in names:
            self.load(name)

    def _keep_events(self) -> None:
        sink: Any = self.loop._events
        if sink is None:
            return
        publish: Callable[[Sequence[CacheEvent]], None] = sink.publish

        def kept(events: Sequence[CacheEvent]) -> None:
            self.events += events
            publish(events)

        sink.publish = kept

    # What it is asked

    def submit(
        self, prompt: list[int], adapter: str | None = None, *, salt: str | None = None,
        max_tokens: int = 5, priority: int = 0, stop_ids: tuple[int, ...] = (),
        retention: Retention | None = None, **sampling: Any,
    ) -> int:  # fmt: skip
        number = next(self._ids)
        params = SamplingParams(
            max_tokens=max_tokens, **{"temperature": 0, "ignore_eos": True, **sampling}
        )
        name = None if adapter is None else AdapterName(adapter)
        self.said[number] = Said()
        self.loop.handle(
            Submit(RequestId(number), prompt, salt, params, number, stop_ids, name, priority,
                   retention=retention)
        )  # fmt: skip
        return number

    def ask(self, prompt: list[int], adapter: str | None = None, **more: Any) -> Said:
        """Run one request alone, to its end."""
        number = self.submit(prompt, adapter, **more)
        self.run()
        said = self.said[number]
        assert said.error is None, said.error
        return said

    def abort(self, *numbers: int) -> None:
        self.loop.handle(Abort([RequestId(number) for number in numbers]))

    def load(self, name: str, content: str | None = None) -> LoraReply:
        path = self.world.path(content or name)
        reply = self._op(LoadLora(next(self._ids), AdapterName(name), path))
        self._digests[name] = self.scheduler.adapters.registry.loaded[AdapterName(name)].digest
        return reply

    def unload(self, name: str) -> LoraReply:
        return self._op(UnloadLora(next(self._ids), AdapterName(name)))

    def _op(self, message: LoadLora | UnloadLora) -> LoraReply:
        self.loop.handle(message)
        while message.op_id not in self._replies:
            self.step()
        reply = self._replies[message.op_id]
        assert reply.error is None, reply.error
        return reply

    def fail_next(self) -> None:
        """The next step that computes anything fails, after all that its plan starts."""
        compute = self.runner._compute

        def fail(*arguments: Any) -> Any:
            self.runner._compute = compute
            raise RuntimeError("planted")

        self.runner._compute = fail

    def name_of(self, digest: AdapterDigest) -> str:
        name = self.scheduler.adapters.registry.name_of(digest)
        assert name is not None
        return str(name)

    # What it does

    def step(self) -> None:
        if self.loop.is_reading and not self.loop.has_work:
            self.loop.wait_for_read(1.0)
        outputs = self.loop.step()
        self.num_steps += 1
        for output in outputs:
            said = self.said.get(int(output.request_id))
            if said is None:
                continue
            said.tokens += output.tokens
            said.num_cached = output.num_cached_tokens
            said.cache_use = output.cache_use or said.cache_use
            said.reason, said.error = output.finish_reason, output.error
            if said.tokens and said.first_step is None:
                said.first_step = self.num_steps
        self._replies |= {reply.op_id: reply for reply in self.loop.take_replies()}
        if self._audits:
            self._cache_audits.after_step(is_last=not self.loop.has_work)
            self._audit_scheduler()

    def audit(self) -> None:
        audit(self.cache)
        self._audit_scheduler()

    def _audit_scheduler(self) -> None:
        audit_adapters(self.scheduler.adapters)
        audit_scheduler(self.scheduler.slices, self.scheduler.fetches)
        if self.scheduler._memory is not None:
            self.scheduler._memory.audit()

    def finish_loads(self) -> None:
        """Wait for adapters that are loading, so that the number of steps does not depend on this
        machine."""
        self.runner._thread.submit(int).result(PATIENCE_S)  # All that was launched has begun.
        loader = self.runner._mover._adapters
        with loader._changed:
            assert loader._changed.wait_for(lambda: not loader._num_under_way, PATIENCE_S)

    def finish_copies(self) -> None:
        """Wait for copies between tiers, so that what the next step finds there does not depend on
        this machine."""
        self.runner._thread.submit(int).result(PATIENCE_S)  # All that was launched has begun.
        ends = self.runner._mover._tiers._ends
        with ends._changed:
            assert ends._changed.wait_for(lambda: not ends._num_under_way, PATIENCE_S)

    def run(self, *, max_steps: int = 5000) -> None:
        """Step until nothing is left to do. Steps beside loads and copies don't count: their number
        depends on this machine's speed."""
        deadline, num_steps = time.monotonic() + PATIENCE_S, 0
        while self.loop.has_work or self.loop.is_reading:
            is_over = num_steps >= max_steps or time.monotonic() > deadline
            assert not is_over, f"not done after {num_steps} steps"
            num_steps += not self._is_moving
            self.step()

    @property
    def _is_moving(self) -> bool:
        mover = self.runner._mover
        copies = None if mover._tiers is None else mover._tiers._ends
        parts = [part for part in (mover._adapters, copies) if part is not None]
        return any(part._num_under_way for part in parts)

    def close(self) -> None:
        self.loop.close()

    # What it has

    def found(self, prompt: list[int], adapter: str | None = None, salt: str | None = None) -> int:
        """How many tokens of a prompt could be reused."""
        return self.match(prompt, adapter, salt).num_pages * PAGE

    def match(
        self, prompt: list[int], adapter: str | None = None, salt: str | None = None
    ) -> Match:
        key = PrefixKey(self.namespace(adapter, salt))
        return self.cache.lookup(key, np.array(prompt, np.int32))

    def namespace(self, adapter: str | None, salt: str | None = None) -> Namespace:
        return Namespace(None if adapter is None else self._digests[adapter], salt)

    def unit(self, plane: int, unit: int) -> Numbers:
        """The numbers of a unit, as they are in memory."""
        layout = self.cache.layout
        of = layout.planes[plane]
        arenas = self.runner._arenas
        if of.tier is Tier.HOST:
            arenas = self.runner._mover._tiers.host
        row = arenas[of.family_index].data[unit]
        rows: npt.NDArray[np.uint8] = row.contiguous().view(torch.uint8).numpy()
        return rows.reshape(-1).view(np.float32).copy()

    def free(self) -> list[int]:
        return [plane.num_free for plane in self.cache.stats().planes]

    def check_units(self) -> int:
        """Check that every unit found on the device and the host has the numbers of its tokens and
        weights; returns how many. Only while nothing runs."""
        assert not self.loop.has_work
        found = resident(self.cache)
        # The longest first: their cold computation includes all of their prefixes.
        for (plane, path), unit in sorted(found.items(), key=lambda item: -len(item[0][1])):
            family = self.cache.layout.planes[plane].family_index
            self._compare(self.unit(plane, unit), self.world.cold_unit(path, family), plane, path)
        return len(found)

    def _compare(self, numbers: Numbers, wanted: Numbers, plane: int, path: PagePath) -> None:
        close = TOLERANCES["logits", torch.float32]
        rtol, atol = ROUNDING * close.rtol, ROUNDING * close.atol
        assert np.allclose(numbers, wanted, rtol=rtol, atol=atol), (
            f"plane {plane}, page {len(path) - 1} of {path[0][0]}: "
            f"{np.abs(numbers - wanted).max()} apart"
        )

    def check_storage(self, values: dict[bytes, bytes]) -> int:
        """The same for storage, by what the events say of each hash."""
        paths = paths_of(self.events)
        num_families = len(self.cache.layout.device)
        num_found = 0
        for page, path in paths.items():
            for family in range(num_families):
                key = unit_key(page, family, 0, 1)
                if key not in values:
                    continue
                wanted = self.world.cold_unit(path, family)
                unit = unpack(key, values.pop(key), wanted.nbytes)
                assert unit is not None
                self._compare(np.frombuffer(unit, np.float32), wanted, family, path)
                num_found += 1
        assert not values, f"{len(values)} values that no event names"
        return num_found


def paths_of(events: Iterable[CacheEvent]) -> dict[bytes, PagePath]:
    """By hash, what a page is: the weights that computed it and all tokens up to its end. Two
    events that name one hash must mean the same page."""
    paths: dict[bytes, PagePath] = {}
    for event in events:
        if not isinstance(event, PagesStored):
            continue
        path = () if event.parent is None else paths[event.parent]
        size = len(event.tokens) // len(event.hashes)
        for place, page in enumerate(event.hashes):
            tokens = event.tokens[place * size : (place + 1) * size]
            path = (*path, (Owner(event.namespace, event.begin if place == 0 else 0), tokens))
            assert paths.setdefault(page, path) == path, "one hash for two pages"
    return paths


def events_to(folder: Path) -> str:
    """A setting that publishes events below a folder, with replay from `folder/r`."""
    return json.dumps({
        "enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/e",
        "replay_endpoint": f"ipc://{folder}/r",
    })  # fmt: skip


def stored_values(folder: Path) -> dict[bytes, bytes]:
    """What a folder of storage has, by key."""
    files = folder.glob("v1/??/*")
    return {bytes.fromhex(file.parent.name + file.name): file.read_bytes() for file in files}
