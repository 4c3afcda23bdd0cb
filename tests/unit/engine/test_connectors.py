"""Connectors hear what happens to pages, in order, and slow no step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from manyroots import LLM, SamplingParams
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.config import engine_settings
from manyroots.engine import connectors
from manyroots.engine.connectors import (
    ConnectorEvent,
    ConnectorInfo,
    PagesAllocated,
    TransferEnded,
    TransferStarted,
)
from manyroots.engine.preflight import check_start
from manyroots.errors import ConfigError
from manyroots.ids import Tier
from manyroots.observe.tiers import TierCounts
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import quick_tiers
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j) % 290 for j in range(42)] for i in range(4)]


class Recorder:
    """Keeps what it hears; waits before it does where it is told to."""

    def __init__(self, info: ConnectorInfo) -> None:
        self.info = info
        self.events: list[ConnectorEvent] = []
        self.missed: list[int] = []
        self.was_called, self.may_go_on, self.is_closed = (threading.Event() for _ in range(3))
        self.may_go_on.set()
        OPENED.append(self)

    def hear(self, events: Sequence[ConnectorEvent], num_missed: int) -> None:
        self.was_called.set()
        assert self.may_go_on.wait(PATIENCE_S)
        self.events += events
        self.missed.append(num_missed)

    def close(self) -> None:
        self.is_closed.set()


class Broken(Recorder):
    def hear(self, events: Sequence[ConnectorEvent], num_missed: int) -> None:
        raise ValueError("no such thing")


OPENED: list[Recorder] = []


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    OPENED.clear()
    names = {"recorder": Recorder, "broken": Broken}
    entries = []
    for name, kind in names.items():
        entries.append(mock.Mock(spec=EntryPoint, value="here"))
        entries[-1].name = name
        entries[-1].load.return_value = kind
    with mock.patch.object(connectors, "entry_points", return_value=entries):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", vocab_size=300)
    tiny_backend().save(str(folder / "tokenizer.json"))
    return folder


def engine(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model), dtype="float32", block_size=4, max_model_len=64, max_num_seqs=2,
        num_gpu_blocks_override=28, progress_bars=False, **settings,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    return [llm.generate([prompt], PARAMS)[0].outputs[0].token_ids for prompt in PROMPTS]


def test_t14_a_connector_hears_of_every_page_in_order(model: Path) -> None:
    """T14: allocated, then stored, then removed; a copy starts before it ends. What was stored and
    not removed is what the cache has."""
    with quick_tiers(), engine(model, kv_connectors=("recorder",), num_host_pages=20) as llm:
        answers(llm)
        stats = llm.stats()
        (recorder,) = OPENED
    assert recorder.is_closed.wait(PATIENCE_S)
    assert recorder.info == ConnectorInfo(recorder.info.model_name, 4, 28)
    kinds = {type(event) for event in recorder.events}
    assert kinds == {PagesAllocated, PagesStored, PagesRemoved, TransferStarted, TransferEnded}
    resident: set[tuple[Tier, bytes]] = set()
    allocated: set[int] = set()
    copies: dict[int, TransferStarted] = {}
    for event in recorder.events:
        match event:
            case PagesAllocated():
                allocated.add(event.request_id)
            case PagesStored():
                assert allocated, "stored before anything was allocated"
                added = {(event.tier, page) for page in event.hashes}
                assert not added & resident
                resident |= added
            case PagesRemoved():
                gone = {(event.tier, page) for page in event.hashes}
                assert gone <= resident
                resident -= gone
            case TransferStarted():
                copies[event.copy_id] = event
            case TransferEnded():
                assert len(copies.pop(event.copy_id).target_units) == len(event.arrived)
    assert len(allocated) == len(PROMPTS)
    on_device = [page for tier, page in resident if tier is Tier.DEVICE]
    assert len(on_device) == stats.num_cached_pages
    grown = [e for e in recorder.events if isinstance(e, PagesAllocated) and e.first_place]
    assert grown, "a request that grew was not heard of"
    assert recorder.missed == [0] * len(recorder.missed)


def test_t14_a_connector_that_hangs_slows_no_step_and_its_drops_are_counted(model: Path) -> None:
    """T14: all tokens come while it hangs; /metrics counts what it missed, and it is told."""
    with engine(model) as plain:
        wanted = answers(plain)
    with (
        mock.patch.object(connectors, "MAX_BATCHES", 4),
        engine(model, kv_connectors=("recorder",)) as llm,
    ):
        (recorder,) = OPENED
        recorder.may_go_on.clear()
        assert answers(llm) == wanted
        assert recorder.was_called.wait(PATIENCE_S)
        assert recorder.events == []
        drops = llm.stats().connector_drops["recorder"]
        assert drops > 0
        registry = CollectorRegistry()
        registry.register(TierCounts("tiny", llm.stats))
        name, labels = "manyroots:connector_batches_dropped_total", 'connector="recorder"'
        line = f'{name}{{{labels},model_name="tiny"}} {float(drops)}'
        assert line in generate_latest(registry).decode()
        recorder.may_go_on.set()
        deadline = time.monotonic() + PATIENCE_S
        while sum(recorder.missed) < drops and time.monotonic() < deadline:
            llm.generate([PROMPTS[0]], PARAMS)
    assert sum(recorder.missed) >= drops


def test_t14_a_connector_that_raises_harms_no_request(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T14: it is counted, and logged once; another connector hears everything."""
    with engine(model) as plain:
        wanted = answers(plain)
    caplog.clear()
    with engine(model, kv_connectors=("broken", "recorder")) as llm:
        assert answers(llm) == wanted
        recorder = OPENED[1]
        deadline = time.monotonic() + PATIENCE_S
        while not llm.stats().connector_failures["broken"] and time.monotonic() < deadline:
            time.sleep(0.01)
        failures = llm.stats().connector_failures
    assert recorder.is_closed.wait(PATIENCE_S)
    assert failures["broken"] > 0
    assert failures["recorder"] == 0
    assert sum("connector broken failed" in line.getMessage() for line in caplog.records) == 1
    assert any(isinstance(event, PagesStored) for event in recorder.events)


def test_t14_connectors_that_are_not_installed_are_refused() -> None:
    """T14: with those that are; before a model is loaded."""
    with pytest.raises(ConfigError, match="installed connectors are: broken, recorder"):
        check_start(engine_settings({"kv_connectors": ("other",)}))
    with pytest.raises(ConfigError, match="'broken' twice"):
        engine_settings({"kv_connectors": ("broken", "broken")})
