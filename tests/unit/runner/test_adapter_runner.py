"""The runner with adapters, driven by the real loop and scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import SchedulerSettings
from manyroots.engine.loop import EngineLoop
from manyroots.ids import NO_ADAPTER, AdapterName, AdapterSlot, RequestId, Row, StepId, Tier
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason, Submit
from manyroots.runner.batch import PersistentBatch
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Arrival, LoadAdapter, LoadId, Plan, SlotRef
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.patience import PATIENCE_S
from tests.helpers.runners import make_runner
from tests.helpers.scheduler_harness import submit
from tests.unit.models.peft_models import ADAPTERS, Pair, make_pair, pool_for, read

PAGE_SIZE, NUM_PAGES, MAX_LEN = 4, 120, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return make_pair(folder, "llama", ADAPTERS)


class Engine:
    """A loop over the runner. Adapters are registered by their folders' names."""

    def __init__(self, pair: Pair, folder: Path, *, max_loras: int) -> None:
        self.pair, self.folder = pair, folder
        self.read: Callable[[str], AdapterWeights] = lambda path: read(Path(path), pair.ours)[1]
        pool = pool_for(pair.ours, num_slots=max_loras + 1)
        self.loader = AdapterLoader(lambda path: self.read(path), pool)
        self.runner = make_runner(
            pair.ours, self.loader, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_seqs=8,
            max_model_len=MAX_LEN,
        )  # fmt: skip
        self.cache = PrefixCache(
            CacheLayout.of(PAGE_SIZE, (Capacity(FULL_ATTENTION, NUM_PAGES),)), CachePolicies()
        )
        self.scheduler = Scheduler(
            SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=24),
            self.cache,
            Residency(AdapterLimits(max_loras=max_loras, max_cpu_loras=0)),
            max_model_len=MAX_LEN,
        )
        self.loop = EngineLoop(self.scheduler, self.runner)

    def register(self, name: str) -> None:
        adapter, _ = read(self.folder / name, self.pair.ours)
        self.scheduler.load_adapter(AdapterName(name), adapter, path=str(self.folder / name))

    def run(self, requests: list[Submit]) -> tuple[dict[int, list[int]], dict[int, str | None]]:
        """Tokens and errors by request."""
        tokens: dict[int, list[int]] = {int(request.request_id): [] for request in requests}
        errors: dict[int, str | None] = {}
        for request in requests:
            self.loop.handle(request)
        while self.loop.has_work:
            for output in self.loop.step():
                tokens[int(output.request_id)].extend(output.tokens)
                if output.finish_reason is FinishReason.ERROR:
                    errors[int(output.request_id)] = output.error
        return tokens, errors

    def close(self) -> None:
        self.loop.close()


def greedy(pair: Pair, request: Submit) -> list[int]:
    """PEFT's own answer."""
    history = list(request.prompt)
    assert request.sampling.max_tokens is not None
    for _ in range(request.sampling.max_tokens):
        history.append(int(pair.expected(request.adapter, history)[-1].argmax()))
    return history[len(request.prompt) :]


def requests_for_all() -> list[Submit]:
    """Two for each adapter and the base, several beginning alike."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 97, (9,), generator=generator).tolist()
    requests = []
    for number, adapter in enumerate([None, *ADAPTERS] * 2):
        tail = torch.randint(3, 97, (1 + number % 5,), generator=generator).tolist()
        requests.append(submit(number, [*shared, *tail], adapter=adapter, max_tokens=6))
    return requests


@pytest.mark.parametrize("max_loras", [2, len(ADAPTERS)])
def test_many_adapters_through_few_slots_give_pefts_tokens_w17(
    pair: Pair, folder: Path, max_loras: int
) -> None:
    """W17: batches of mixed adapters, whose slots rotate, give what each request does alone."""
    engine = Engine(pair, folder, max_loras=max_loras)
    for name in ADAPTERS:
        engine.register(name)
    requests = requests_for_all()
    tokens, errors = engine.run(requests)
    assert errors == {}
    for request in requests:
        assert tokens[int(request.request_id)] == greedy(pair, request), request.adapter
    engine.close()


def test_others_decode_while_an_adapter_loads_w10(pair: Pair, folder: Path) -> None:
    """W10: loads are asynchronous; other requests keep decoding meanwhile."""
    engine = Engine(pair, folder, max_loras=len(ADAPTERS))
    engine.register("rank 1")
    may_read, read_files = threading.Event(), engine.read

    def slow(path: str) -> AdapterWeights:
        assert may_read.wait(PATIENCE_S)
        return read_files(path)

    engine.read = slow
    waiting = submit(1, [4, 5, 6], adapter="rank 1", max_tokens=3)
    engine.loop.handle(waiting)
    for _ in range(4):
        engine.loop.step()  # the load is under way, and there is nothing else to do
    other = submit(2, [4, 5, 6], max_tokens=5)
    engine.loop.handle(other)
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while engine.loop.has_work:
        for output in engine.loop.step():
            tokens[int(output.request_id)].extend(output.tokens)
        if len(tokens[2]) == 5:
            may_read.set()
        assert may_read.is_set() or not tokens[1]
    assert tokens == {1: greedy(pair, waiting), 2: greedy(pair, other)}
    engine.close()


def test_an_adapter_that_can_not_be_loaded_fails_its_own_requests_w10(
    pair: Pair, folder: Path
) -> None:
    """W10: a failed load fails only its own requests with the reason and can be retried."""
    engine = Engine(pair, folder, max_loras=len(ADAPTERS))
    engine.register("rank 1")
    engine.register("rank 16")
    read_files = engine.read

    def broken(path: str) -> AdapterWeights:
        if path.endswith("rank 1"):
            raise OSError("the disk is on fire")
        return read_files(path)

    engine.read = broken
    requests = [
        submit(1, [4, 5, 6], adapter="rank 1"),
        submit(2, [4, 5, 6], adapter="rank 16"),
        submit(3, [4, 5, 6]),
    ]
    tokens, errors = engine.run(requests)
    assert list(errors) == [1]
    assert "the disk is on fire" in str(errors[1])
    for request in requests[1:]:
        assert tokens[int(request.request_id)] == greedy(pair, request)
    engine.read = read_files
    again = submit(4, [4, 5, 6], adapter="rank 1")
    assert engine.run([again])[0][4] == greedy(pair, again)
    engine.close()


def test_an_activated_adapter_reuses_the_bases_pages_and_gives_pefts_tokens_n22(
    tmp_path: Path,
) -> None:
    """N22: an aLoRA is the base model before its invocation, page for page."""
    invocation = [7, 8]
    options = {**ADAPTERS["rank 16"], "alora_invocation_tokens": invocation}
    pair = make_pair(tmp_path, "llama", {"activated": options})
    engine = Engine(pair, tmp_path, max_loras=len(ADAPTERS))
    engine.register("activated")
    document = [token for token in range(20, 41) if token not in invocation]
    base = submit(1, [*document, 50], max_tokens=3)
    assert engine.run([base])[0][1] == greedy(pair, base)
    asked = submit(2, [*document, *invocation, 9], adapter="activated", max_tokens=1)
    engine.loop.handle(asked)
    outputs = []
    while engine.loop.has_work:
        outputs.extend(engine.loop.step())
    assert [token for output in outputs for token in output.tokens] == greedy(pair, asked)
    assert outputs[0].num_cached_tokens == len(document) // PAGE_SIZE * PAGE_SIZE
    engine.close()


def test_prompt_logprobs_are_those_of_the_adapter(pair: Pair, folder: Path) -> None:
    engine = Engine(pair, folder, max_loras=len(ADAPTERS))
    engine.register("everything")
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, logprobs=0)
    plain = submit(1, [4, 5, 6, 7], adapter="everything", max_tokens=1)
    engine.loop.handle(replace(plain, sampling=sampling))
    outputs = []
    while engine.loop.has_work:
        outputs.extend(engine.loop.step())
    wanted = pair.expected("everything", plain.prompt).log_softmax(dim=-1)
    scores = [*outputs[0].prompt_logprobs, *outputs[0].logprobs]
    assert [score.token for score in scores] == [5, 6, 7, *greedy(pair, plain)]
    theirs = wanted[range(4), [score.token for score in scores]]
    ours = torch.tensor([score.logprob for score in scores])
    assert_close("logits", ours, theirs, torch.float32)
    engine.close()


def arrival(row: int, num_tokens: int, slot: int | None, adapter_from: int = 0) -> Arrival:
    return Arrival(
        Row(row), RequestId(row), np.arange(num_tokens, dtype=np.int32), num_tokens, 0,
        (np.arange(4, dtype=np.int32) + 4 * row,), SamplingParams(), 0, (),
        None if slot is None else AdapterSlot(slot), adapter_from,
    )  # fmt: skip


def plan(arrivals: list[Arrival], num_tokens: list[int]) -> Plan:
    return Plan(
        StepId(1), tuple(arrivals), (), np.array([a.row for a in arrivals], np.int32),
        np.array(num_tokens, np.int32), np.ones(len(arrivals), np.bool_),
    )  # fmt: skip


def test_rows_lie_by_adapter_within_decodes_and_within_prefills() -> None:
    batch = PersistentBatch(max_num_seqs=8, max_model_len=16, page_size=4)
    slots = [2, None, 0, 2, 1, None, 0]
    counts = [1, 3, 1, 2, 1, 1, 2]
    step = plan([arrival(row, 4, slot) for row, slot in enumerate(slots)], counts)
    batch.apply(step)
    inputs = batch.inputs(step)
    assert inputs.rows.tolist() == [5, 2, 4, 0, 1, 6, 3]
    assert inputs.token_slots is not None
    assert inputs.token_slots.tolist() == [-1, 0, 1, 2, -1, -1, -1, 0, 0, 2, 2]
    # In the plan's order again.
    assert inputs.rows[inputs.sampling][inputs.sampling_order].tolist() == step.rows.tolist()


def test_a_row_has_its_adapter_from_where_it_is_invoked_and_the_next_owner_has_none() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=16, page_size=4)
    step = plan([arrival(0, 6, 3, adapter_from=4)], [6])
    batch.apply(step)
    slots = batch.inputs(step).token_slots
    assert slots is not None
    assert slots.tolist() == [NO_ADAPTER] * 4 + [3, 3]
    step = plan([arrival(0, 6, None)], [6])
    batch.apply(step)
    assert batch.inputs(step).token_slots is None, "a step without adapters does no LoRA work"


def test_a_step_that_fails_loses_no_answer(pair: Pair, folder: Path) -> None:
    engine = Engine(pair, folder, max_loras=len(ADAPTERS))
    digest = read(folder / "rank 1", pair.ours)[0].digest
    load = LoadAdapter(
        LoadId(1), digest, Tier.STORAGE, SlotRef(AdapterSlot(0), 1),
        path=str(folder / "rank 1"), num_bytes=1,
    )  # fmt: skip
    # A row whose adapter is not there: the step raises.
    faulty = replace(plan([arrival(0, 4, 5)], [4]), adapters=(load,))
    with pytest.raises(RuntimeError, match="slot 5, which is empty"):
        engine.runner.launch(faulty).result()
    empty = replace(plan([], []), waits=True)
    answers = ()
    deadline = time.monotonic() + PATIENCE_S
    while not answers and time.monotonic() < deadline:
        answers = engine.runner.launch(empty).result().adapters
    assert [(answer.load_id, answer.error) for answer in answers] == [(1, None)]
    engine.close()
