"""A small engine with real adapters in one process: directory, scheduler, cache, runner, files.

Wired as `engine/build.py` wires it, around a tiny model that is made once for many engines. Every
step is audited, every plan is checked against the cap on adapters and against slots that launched
steps still use, and every read of a folder is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from manyroots.adapter_names import LoraModule
from manyroots.cache.audit import audit as audit_cache
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import LoraSettings, SchedulerSettings
from manyroots.engine.adapter_directory import AdapterDirectory, AdapterFiles
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterName, AdapterSlot, RequestId
from manyroots.lora.audit import audit as audit_adapters
from manyroots.lora.limits import AdapterLimits, DeviceBlocks
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, LoadLora, LoraReply, Output, Submit, UnloadLora
from manyroots.models.decoder import Decoder
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import LoadAdapter, LoadId, Plan, Runner, StepResult
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool, pooled_bytes
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.runners import make_runner
from tests.unit.models.tiny import load_tiny, save_tiny

CPU = torch.device("cpu")
VOCAB = 97
PAGE_SIZE = 4
MAX_LEN = 48
MOST_SLOTS = 256
"""If no cap is set."""
BLOCK_BYTES = 4096
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class TinyWorld:
    """A model, and adapters for it by content: one folder each."""

    def __init__(self, folder: Path, recipes: dict[str, Recipe]) -> None:
        self.folder = folder
        save_tiny(folder / "model", "llama", vocab_size=VOCAB, **SIZES, **HEADS)
        self.targets = self.load_model().adapter_targets()
        for content, recipe in recipes.items():
            self.write(content, recipe)

    def load_model(self) -> Decoder:
        """One for each engine: a model's layers know its pages and its adapters' memory."""
        return load_tiny(self.folder / "model")

    def write(self, content: str, recipe: Recipe) -> str:
        write_adapter(self.folder / content, self.targets, recipe)
        return self.path(content)

    def path(self, content: str) -> str:
        return str(self.folder / content)


class Watched:
    """A runner that checks each plan before passing it on."""

    def __init__(self, runner: Runner, max_loras: int) -> None:
        self._runner = runner
        self._max_loras = max_loras
        self._slot_of_row: dict[int, AdapterSlot | None] = {}
        self._loading: dict[LoadId, AdapterSlot | None] = {}
        """None: on its way to the host alone."""
        self._launched: list[Future[StepResult]] = []
        self.num_adapters: Counter[int] = Counter()
        """The number of steps by their number of adapters."""

    def launch(self, plan: Plan) -> Future[StepResult]:
        for done in [step for step in self._launched if step.done()]:
            self._launched.remove(done)
            if done.exception() is None:
                for answer in done.result().adapters:
                    del self._loading[answer.load_id]
        self._slot_of_row |= {int(a.row): a.adapter_slot for a in plan.arrivals}
        used = {self._slot_of_row[row] for row in plan.rows.tolist()} - {None}
        assert not self._max_loras or len(used) <= self._max_loras, "more adapters than the cap"
        self.num_adapters[len(used)] += 1
        for intent in plan.adapters:
            if isinstance(intent, LoadAdapter):
                target = intent.target
                self._loading[intent.load_id] = None if target is None else target.slot
        assert not used & set(self._loading.values()), "a slot was rotated under a running request"
        self._launched.append(self._runner.launch(plan))
        return self._launched[-1]

    def close(self) -> None:
        self._runner.close()


class AdapterEngine:
    """One engine and its outputs. `step` audits."""

    def __init__(
        self,
        world: TinyWorld,
        *,
        names: dict[str, str] | None = None,
        num_pages: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_loras: int = 2,
        max_cpu_loras: int = 0,
        num_blocks: int | None = None,
        records_events: bool = False,
        adapter_quantum_steps: int | None = None,
    ) -> None:
        """`names` are known from the start: name and content. `num_blocks`: blocks of memory that
        adapters share, as with --max-loras auto, instead of `max_loras`."""
        max_loras = max_loras if num_blocks is None else 0
        modules = tuple(LoraModule(name, world.path(at)) for name, at in (names or {}).items())
        lora = LoraSettings(
            enable_lora=True, lora_modules=modules, max_loras=max_loras, max_cpu_loras=max_cpu_loras
        )
        self.world = world
        self.model = world.load_model()
        self.reads: Counter[str] = Counter()
        """How often each folder was read."""
        self.before_read: Callable[[], object] = lambda: None
        blocks = None
        if num_blocks is not None:
            blocks = DeviceBlocks(num_blocks, BLOCK_BYTES, num_slots=MOST_SLOTS)
        limits = AdapterLimits(max_loras=max_loras, max_cpu_loras=max_cpu_loras, blocks=blocks)
        self.residency = Residency(limits)
        self.pool = AdapterPool(
            self.model.lora_parts(), num_slots=self.residency.limits.num_slots or MOST_SLOTS,
            num_blocks=num_blocks, max_rank=16, dtype=torch.float32, device=CPU,
        )  # fmt: skip
        self.loader = AdapterLoader(lambda path: self._read(Path(path), None)[1], self.pool)
        self.cache = PrefixCache(
            CacheLayout.of(PAGE_SIZE, (Capacity(FULL_ATTENTION, num_pages),)),
            CachePolicies(records_events=records_events, identity=b"tiny"),
        )
        step = SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            adapter_quantum_steps=adapter_quantum_steps,
        )
        scheduler = Scheduler(step, self.cache, self.residency, max_model_len=MAX_LEN)
        files = AdapterFiles(self._read, self.loader.keep)
        directory = AdapterDirectory(lora, scheduler, files, base_names={"base"})
        self.model_runner = runner = make_runner(
            self.model, self.loader, num_pages=num_pages, page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs, max_model_len=MAX_LEN,
        )  # fmt: skip
        self._launcher = runner._thread
        self.runner = Watched(runner, max_loras)
        self.loop = EngineLoop(scheduler, self.runner, directory=directory)
        self.outputs: dict[int, list[Output]] = {}
        self.replies: dict[int, LoraReply] = {}
        self._num_ops = 0

    def _read(
        self, folder: Path, allowed: Sequence[Path] | None
    ) -> tuple[AdapterSpec, AdapterWeights]:
        self.reads[folder.name] += 1
        self.before_read()
        spec, weights = read_adapter(
            folder, self.world.targets, max_rank=16, dtype=torch.float32,
            vocab_size=VOCAB, allowed_dirs=allowed,
        )  # fmt: skip
        return replace(spec, device_bytes=pooled_bytes(weights, is_transposed=True)), weights

    def submit(
        self,
        number: int,
        prompt: Sequence[int],
        adapter: str | None = None,
        *,
        sampling: SamplingParams = GREEDY,
        salt: str | None = None,
    ) -> None:
        """The request's number is also its seed."""
        name = None if adapter is None else AdapterName(adapter)
        seed = number if sampling.seed is None else sampling.seed
        self.loop.handle(Submit(RequestId(number), list(prompt), salt, sampling, seed, (), name))

    def abort(self, *numbers: int) -> None:
        self.loop.handle(Abort([RequestId(number) for number in numbers]))

    def load(self, name: str, content: str, *, in_place: bool = False) -> int:
        """Returns the operation number of the reply."""
        self._num_ops += 1
        path = self.world.path(content)
        self.loop.handle(LoadLora(self._num_ops, AdapterName(name), path, in_place=in_place))
        return self._num_ops

    def unload(self, name: str) -> int:
        self._num_ops += 1
        self.loop.handle(UnloadLora(self._num_ops, AdapterName(name)))
        return self._num_ops

    def step(self) -> None:
        for output in self.loop.step():
            self.outputs.setdefault(int(output.request_id), []).append(output)
        self.replies |= {reply.op_id: reply for reply in self.loop.take_replies()}
        audit_cache(self.cache)
        audit_adapters(self.residency)

    def run(self, *, max_steps: int = 5000) -> None:
        """Step until nothing is left to do and nothing is being read. Steps beside loads don't
        count: their number depends on this machine's speed."""
        deadline, num_steps = time.monotonic() + PATIENCE_S, 0
        while self.loop.has_work or self.loop.is_reading:
            is_over = num_steps >= max_steps or time.monotonic() > deadline
            assert not is_over, f"not done after {num_steps} steps"
            num_steps += not self.loader._num_under_way
            if not self.loop.has_work:
                self.loop.wait_for_read()
            self.step()

    def run_with_quick_loads(self) -> None:
        """As `run`, but each load ends before the next step: which requests run together depends
        only on what was asked."""
        while self.loop.has_work or self.loop.is_reading:
            if not self.loop.has_work:
                self.loop.wait_for_read()
            self.step()
            self.finish_loads()

    def finish_loads(self) -> None:
        """Wait for adapters that are loading, so that the number of steps does not depend on this
        machine."""
        self._launcher.submit(int).result(PATIENCE_S)  # All that was launched has begun.
        loader = self.loader
        with loader._changed:
            assert loader._changed.wait_for(lambda: not loader._num_under_way, PATIENCE_S)

    def answer(self, number: int, prompt: Sequence[int], adapter: str | None = None) -> list[int]:
        """Run a request to its end; returns its greedy tokens."""
        self.submit(number, prompt, adapter)
        self.run()
        return self.tokens(number)

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs.get(number, []) for token in output.tokens]

    def last(self, number: int) -> Output | None:
        """The latest output of a request."""
        return self.outputs[number][-1] if number in self.outputs else None

    def is_over(self, number: int) -> bool:
        last = self.last(number)
        return last is not None and last.finish_reason is not None

    def cached(self, number: int) -> int:
        return self.outputs[number][-1].num_cached_tokens

    def close(self) -> None:
        self.loop.close()

    def assert_nothing_of_adapters_is_left(self) -> None:
        """No page, slot or host copy is held, and no request is under way."""
        stats = self.loop.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_held_pages) == (0, 0, 0)
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        owners = {node.namespace.adapter for node in self.cache.index.tree.nodes()}
        assert owners <= {None}, "pages of an adapter that is not loaded"
        adapters = stats.adapters
        assert adapters is not None
        assert (adapters.num_loaded, adapters.num_draining, adapters.num_running) == (0, 0, 0)
        assert (adapters.num_on_device, adapters.num_on_host, adapters.num_loading) == (0, 0, 0)
        assert self.pool.used_bytes == 0
        assert not self.loader._host
