"""A directory wired as in the engine, with a fake runner and files read when the test says."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import LoraSettings, SchedulerSettings
from manyroots.engine.adapter_directory import AdapterDirectory, AdapterFiles
from manyroots.engine.loop import EngineLoop
from manyroots.errors import RequestError
from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec, PairSpec
from manyroots.messages import LoadLora, LoadTime, LoraReply, Output, Submit, UnloadLora
from manyroots.runner.fake import FakeRunner
from manyroots.scheduler.scheduler import Scheduler
from tests.helpers.patience import PATIENCE_S
from tests.helpers.scheduler_harness import VOCAB, expected_tokens, submit

PAIR = PairSpec("model.layers.0.self_attn.q_proj", 8, 2.0)


class Files:
    """Stands for reading: a folder's content is its `adapter_config.json`; "broken" is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads: dict[str, int] = {}
        self.kept: list[Any] = []

    def read(self, folder: Path, allowed: Sequence[Path] | None) -> tuple[AdapterSpec, Any]:
        self.num_reads[folder.name] = self.num_reads.get(folder.name, 0) + 1
        assert self.gate.wait(PATIENCE_S)
        content = (folder / "adapter_config.json").read_text()
        if content == "broken":
            raise RequestError("r is 0; it must be at least 1.", field="lora_path")
        if content == "bug":
            raise ZeroDivisionError("a bug")
        digest = digest_of(content)
        return AdapterSpec(digest, 8, 1000, (PAIR,), None), digest


def digest_of(content: str) -> AdapterDigest:
    return AdapterDigest(hashlib.blake2b(content.encode(), digest_size=32).digest())


class Directory:
    """The loop, its directory, and what they have said."""

    def __init__(self, folder: Path, *, max_loras: int = 2, **settings: Any) -> None:
        self.folder = folder
        self.files = Files()
        cache = PrefixCache(CacheLayout.of(4, (Capacity(FULL_ATTENTION, 64),)), CachePolicies())
        lora = LoraSettings(enable_lora=True, max_loras=max_loras, **settings)
        self.residency = Residency(AdapterLimits(max_loras=max_loras, max_cpu_loras=0))
        step = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=32)
        self.scheduler = Scheduler(step, cache, self.residency, max_model_len=256)
        files = AdapterFiles(self.files.read, self.files.kept.append)
        self.directory = AdapterDirectory(lora, self.scheduler, files, base_names={"base"})
        runner = FakeRunner(page_size=4, vocab_size=VOCAB)
        self.loop = EngineLoop(self.scheduler, runner, directory=self.directory)
        self.outputs: dict[int, list[Output]] = {}
        self.replies: dict[int, LoraReply] = {}
        self.loads: list[LoadTime] = []

    def write(self, name: str, content: str | None = None) -> str:
        """A folder with an adapter; its content is its name unless said otherwise."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(name if content is None else content)
        return str(folder)

    def submit(self, number: int, adapter: str | None) -> Submit:
        request = submit(number, [number, 2, 3, 4, 5], max_tokens=4, adapter=adapter)
        self.loop.handle(request)
        return request

    def load(self, op_id: int, name: str, path: str, **more: bool) -> None:
        self.loop.handle(LoadLora(op_id, AdapterName(name), path, **more))

    def unload(self, op_id: int, name: str) -> None:
        self.loop.handle(UnloadLora(op_id, AdapterName(name)))

    def step(self) -> None:
        for output in self.loop.step():
            self.outputs.setdefault(int(output.request_id), []).append(output)
        self.replies |= {reply.op_id: reply for reply in self.loop.take_replies()}
        self.loads += self.loop.take_loads()

    def run(self) -> None:
        """Until nothing is left to do and nothing is being read."""
        while self.loop.has_work or self.loop.is_reading:
            if not self.loop.has_work:
                self.loop.wait_for_read()
            self.step()

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def error(self, number: int) -> str | None:
        return self.outputs[number][-1].error


def expected(request: Submit, content: str | None) -> list[int]:
    return expected_tokens(request, None if content is None else digest_of(content))
