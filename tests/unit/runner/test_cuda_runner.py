"""The GPU's runner where there is none: the references in its kernels' place, no graphs.

Everything but the kernels and their capture is the same: rows on the device, tokens that the host
does not know yet, padding, adapters in the pool. The runner of the CPU says what is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyroots.bench.random_adapters import write_adapters
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import SchedulerSettings
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterName, RequestId
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason, Output, Submit
from manyroots.models.decoder import Decoder
from manyroots.runner import sampler
from manyroots.runner.cuda_runner import CudaRunner
from manyroots.runner.graphs import DecodeGraphs
from manyroots.runner.in_flight import InFlight
from manyroots.runner.sampler import Sampler
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.torch_runner import TorchRunner
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Runner
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_slots import AdapterSlots
from manyroots.store.arena import PageArena
from tests.adapter_folders import Recipe, write_adapter
from tests.deciding import BASE
from tests.unit.models.peft_models import ADAPTERS, Pair, make_pair, read
from tests.unit.models.tiny import MODELS, load_tiny, save_tiny

PAGE_SIZE, NUM_PAGES, MAX_LEN, MAX_SEQS = 4, 120, 64, 6
CPU = torch.device("cpu")


def make_runner(model: Decoder, loader: AdapterLoader | None, *, cuda: bool) -> Runner:
    spec = model.spec
    arena = PageArena(
        NUM_PAGES, PAGE_SIZE, spec.num_layers, spec.num_kv_heads, spec.head_dim,
        torch.float32, CPU,
    )  # fmt: skip
    sizes = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN}
    if cuda:
        return CudaRunner(model, arena, loader, **sizes, use_graphs=False)
    return TorchRunner(model, arena, loader, **sizes)


def run(
    runner: Runner,
    requests: list[Submit],
    adapters: dict[str, tuple[Path, Decoder]] | None = None,
    *,
    max_loras: int = 2,
    fails: int | None = None,
) -> dict[int, list[Output]]:
    """What the real scheduler and loop get from a runner, by request; of which one may fail."""
    cache = PrefixCache(
        CacheLayout.of(PAGE_SIZE, (Capacity(FULL_ATTENTION, NUM_PAGES),)), CachePolicies()
    )
    scheduler = Scheduler(
        SchedulerSettings(max_num_seqs=MAX_SEQS, max_num_batched_tokens=24),
        cache,
        Residency(AdapterLimits(max_loras=max_loras, max_cpu_loras=0)),
        max_model_len=MAX_LEN,
    )
    loop = EngineLoop(scheduler, runner)
    for name, (path, model) in (adapters or {}).items():
        spec, _ = read(path, model)
        scheduler.load_adapter(AdapterName(name), spec, path=str(path))
    outputs: dict[int, list[Output]] = {int(request.request_id): [] for request in requests}
    for request in requests:
        loop.handle(request)
    while loop.has_work:
        for output in loop.step():
            outputs[int(output.request_id)].append(output)
    loop.close()
    for number, news in outputs.items():
        failed = news[-1].finish_reason is FinishReason.ERROR
        assert failed == (number == fails), news[-1].error
    return outputs


def tokens(outputs: dict[int, list[Output]]) -> dict[int, list[int]]:
    return {number: [t for o in news for t in o.tokens] for number, news in outputs.items()}


def submit(
    number: int, prompt: list[int], *, adapter: str | None = None, **sampling: Any
) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    name = None if adapter is None else AdapterName(adapter)
    return Submit(RequestId(number), prompt, BASE, params, number, (2,), name)


def some_requests(**sampling: Any) -> list[Submit]:
    """More than there are rows, of different lengths, several beginning alike."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(3, 97, (9,), generator=generator).tolist()
    tails = [torch.randint(3, 97, (1 + 3 * i,), generator=generator).tolist() for i in range(9)]
    return [
        submit(number, [*shared, *tail], max_tokens=5 + number % 4, **sampling)
        for number, tail in enumerate(tails)
    ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return load_tiny(folder)


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token reaches the host before somebody waits for it."""
    monkeypatch.setattr(InFlight, "is_done", property(lambda self: False))


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps as large as a graph's."""
    monkeypatch.setattr(DecodeGraphs, "size_for", lambda self, num_rows: 8)


@pytest.fixture
def single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has few tokens, and none runs but as a decode step."""
    monkeypatch.setattr(DecodeGraphs, "has_room_for", lambda self, num_rows: True)
    monkeypatch.setattr(DecodeGraphs, "size_for", lambda self, num_rows: num_rows + 3)

    def refuse(*args: object) -> None:
        raise AssertionError("a short step ran kernel by kernel")

    monkeypatch.setattr(CudaRunner, "_begin_any", refuse)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_short_steps_run_as_decode_steps_and_give_the_same_tokens(
    tmp_path: Path, kind: str, single_tokens: None, slow_tokens: None
) -> None:
    save_tiny(tmp_path, kind)
    model = load_tiny(tmp_path)
    requests = some_requests(temperature=0.8)
    expected = run(make_runner(model, None, cuda=False), requests)
    assert tokens(run(make_runner(model, None, cuda=True), requests)) == tokens(expected)


@pytest.mark.parametrize("kind", MODELS)
def test_fused_layers_give_each_architectures_tokens(
    tmp_path: Path, kind: str, padded: None, slow_tokens: None
) -> None:
    save_tiny(tmp_path, kind)
    model = load_tiny(tmp_path)
    requests = some_requests()
    expected = run(make_runner(model, None, cuda=False), requests)
    assert tokens(run(make_runner(model, None, cuda=True), requests)) == tokens(expected)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"min_tokens": 3, "logit_bias": {5: 2.0}},
    ],
    ids=str,
)
def test_sampling_is_that_of_the_cpu_while_tokens_are_still_on_the_device(
    llama: Decoder, sampling: dict[str, Any], padded: None, slow_tokens: None
) -> None:
    requests = some_requests(**sampling)
    expected = run(make_runner(llama, None, cuda=False), requests)
    assert tokens(run(make_runner(llama, None, cuda=True), requests)) == tokens(expected)


def _failing(what: Callable[..., Any], is_meant: Callable[..., bool]) -> Callable[..., Any]:
    def fails(*args: Any) -> Any:
        if is_meant(*args):
            raise ZeroDivisionError("planted")
        return what(*args)

    return fails


@pytest.mark.parametrize("where", ["draw", "edit", "arrive"])
@pytest.mark.parametrize("cuda", [False, True])
def test_a_row_whose_sampling_fails_fails_alone(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch, where: str, cuda: bool
) -> None:
    """Whatever the reason: its neighbours in the step get the tokens that are theirs."""
    requests = some_requests(temperature=1.0, top_k=9, presence_penalty=0.5)
    expected = tokens(run(make_runner(llama, None, cuda=cuda), requests))
    requests[3] = replace(requests[3], sampling=replace(requests[3].sampling, top_k=7))
    if where == "draw":
        draw = _failing(sampler.draw, lambda _, cuts, __: 7 in cuts.top_k)
        monkeypatch.setattr(sampler, "draw", draw)
    elif where == "edit":
        edit = _failing(Sampler._edit, lambda ours, _, row: ours._state.params[row].top_k == 7)
        monkeypatch.setattr(Sampler, "_edit", edit)
    else:
        take = _failing(SamplingState._take, lambda _, arrival, __: arrival.sampling.top_k == 7)
        monkeypatch.setattr(SamplingState, "_take", take)
    given = run(make_runner(llama, None, cuda=cuda), requests, fails=3)
    assert "ZeroDivisionError: planted" in str(given[3][-1].error)
    others = tokens(given)
    del expected[3], others[3]
    assert others == expected


def test_rows_that_ask_for_logprobs_get_them_beside_rows_that_do_not(llama: Decoder) -> None:
    requests = some_requests()
    requests[2] = submit(2, requests[2].prompt, max_tokens=6, logprobs=3, prompt_logprobs=1)
    expected = run(make_runner(llama, None, cuda=False), requests)
    given = run(make_runner(llama, None, cuda=True), requests)
    assert tokens(given) == tokens(expected)
    for ours, theirs in zip(_scores(given[2]), _scores(expected[2]), strict=True):
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert ours.top_tokens == theirs.top_tokens
    assert all(not output.logprobs for output in given[1])


def _scores(outputs: list[Output]) -> list[Any]:
    return [entry for o in outputs for entry in (*o.prompt_logprobs, *o.logprobs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return make_pair(folder, "llama", ADAPTERS)


@pytest.mark.parametrize("short_steps", [False, True])
def test_adapters_in_a_pool_give_the_tokens_of_adapters_in_slots_w17(
    pair: Pair,
    folder: Path,
    short_steps: bool,
    padded: None,
    slow_tokens: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W17: batches of mixed adapters, whose slots rotate, give what each request does alone; also
    where tokens of prompts are rows of their own."""
    if short_steps:
        monkeypatch.setattr(DecodeGraphs, "has_room_for", lambda self, num_rows: True)
        monkeypatch.setattr(DecodeGraphs, "size_for", lambda self, num_rows: num_rows + 3)
    model = pair.ours
    requests = [
        submit(r.request_id, r.prompt, max_tokens=6, adapter=name)
        for r, name in zip(some_requests(), [None, *ADAPTERS], strict=True)
    ]
    paths = {name: (folder / name, model) for name in ADAPTERS}
    parts = model.lora_parts()
    slots = AdapterSlots(parts, dtype=torch.float32, device=CPU)
    pool = AdapterPool(parts, num_slots=3, max_rank=64, dtype=torch.float32, device=CPU)

    def loader(memory: AdapterSlots | AdapterPool) -> AdapterLoader:
        return AdapterLoader(lambda path: read(Path(path), model)[1], memory)

    expected = run(make_runner(model, loader(slots), cuda=False), requests, paths, max_loras=3)
    given = run(make_runner(model, loader(pool), cuda=True), requests, paths, max_loras=3)
    assert tokens(given) == tokens(expected)


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-mixed"])
def test_adapters_of_experts_in_a_pool_give_the_tokens_of_those_in_slots(
    tmp_path: Path, kind: str, padded: None, slow_tokens: None
) -> None:
    save_tiny(tmp_path / "base", kind)
    model = load_tiny(tmp_path / "base")
    folders = write_adapters(model.adapter_targets(), tmp_path, 3, rank=5)
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 100}))
    # One that routes by weights of its own, beside some that don't.
    router = Recipe(rank=4, alpha=40, modules=("gate", "q_proj"))
    write_adapter(tmp_path / "router", model.adapter_targets(), router)
    paths = {f"a{i}": (folder, model) for i, folder in enumerate([*folders, tmp_path / "router"])}
    names = [None, "a0", "a1", "a3", "a3", "a2", None, "a0"]
    requests = [
        submit(r.request_id, r.prompt, max_tokens=6, adapter=name)
        for r, name in zip(some_requests()[:8], names, strict=True)
    ]
    parts = model.lora_parts()
    slots = AdapterSlots(parts, dtype=torch.float32, device=CPU)
    pool = AdapterPool(parts, num_slots=2, max_rank=8, dtype=torch.float32, device=CPU)

    def loader(memory: AdapterSlots | AdapterPool) -> AdapterLoader:
        return AdapterLoader(lambda path: read(Path(path), model)[1], memory)

    expected = tokens(run(make_runner(model, loader(slots), cuda=False), requests, paths))
    given = tokens(run(make_runner(model, loader(pool), cuda=True), requests, paths))
    assert given == expected
    assert len({tuple(expected[i]) for i in range(8)}) > 4
