"""The runner as it runs on a GPU, where there is none: in fixed shapes, with reference kernels.

Everything but Triton's kernels and their capture is the same: tokens that the host does not know
yet, padding, prompts as single tokens, adapters as a GPU has them. The runner as it runs on a CPU
says what is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.bench.random_adapters import write_adapters
from manyroots.bench.recorded_drafts import RecordedDrafts
from manyroots.cache.cache import PrefixCache
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.config import SchedulerSettings
from manyroots.engine.grammar_compiles import GrammarCompiles
from manyroots.engine.loop import EngineLoop
from manyroots.grammar.cache import GrammarCache
from manyroots.ids import AdapterName, RequestId
from manyroots.kernels.attention import reference, sharing
from manyroots.kernels.attention.paged import DecodeRows
from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.sampling import torch_ops
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.messages import FinishReason, Output, Submit
from manyroots.models.decoder import Decoder
from manyroots.runner import mixed
from manyroots.runner.graphs import Graphs
from manyroots.runner.in_flight import InFlight
from manyroots.runner.inputs import StepInputs, as_single_tokens, table_rows_of
from manyroots.runner.repeated import RepeatedSteps, StepLayout
from manyroots.runner.runner import ModelRunner
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.step_arrays import decode_arrays, run_arrays, sampling_rows
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.scheduler.speculation import DraftSource
from manyroots.step import Plan
from manyroots.store.adapter_loader import AdapterLoader
from manyroots.store.adapter_pool import AdapterPool
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers import runners
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.grammar import tiny_grammars
from tests.unit.models.peft_models import ADAPTERS, make_pair, read
from tests.unit.models.tiny import MODELS, load_tiny, save_tiny

PAGE_SIZE, NUM_PAGES, MAX_LEN, MAX_SEQS = 4, 120, 64, 6
CPU = torch.device("cpu")
SAME_STEPS = ("llama-tied", "llama-llama3", "llama-linear", "llama-yarn", "mistral", "phi3")
"""Models that differ from others in numbers alone: nothing else is run for them."""
DRAFTS = '{"method": "suffix", "num_speculative_tokens": 4, "adaptive": false}'


def make_runner(
    decoder: Decoder,
    loader: AdapterLoader | None = None,
    grammars: GrammarCache | None = None,
    *,
    drafts: bool = False,
) -> ModelRunner:
    """As on a GPU if the decoder has the references for kernels."""
    return runners.make_runner(
        decoder, loader, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN, fixed_shapes=_is_plain(decoder), grammars=grammars, drafts=drafts,
    )  # fmt: skip


def _is_plain(decoder: Decoder) -> bool:
    return decoder.kernels == reference_kernels()


class Both:
    """One model with the kernels of a CPU, and with the references."""

    def __init__(self, folder: Path) -> None:
        self.cpu = load_tiny(folder)
        self.plain = load_tiny(folder, kernels=reference_kernels())


def run(
    runner: ModelRunner,
    requests: list[Submit],
    adapters: dict[str, tuple[Path, Decoder]] | None = None,
    *,
    max_loras: int = 2,
    fails: int | None = None,
    grammars: GrammarCache | None = None,
    drafts: DraftSource | None = None,
) -> dict[int, list[Output]]:
    """What the real scheduler and loop get from a runner, by request; of which one may fail.
    `drafts`: what guesses tokens; None for no guesses."""
    families = runners.cache_families(
        runner._decoder, page_size=PAGE_SIZE, max_len=MAX_LEN, interval=2
    )
    capacities = tuple(Capacity(family, NUM_PAGES) for family in families)
    cache = PrefixCache(CacheLayout.of(PAGE_SIZE, capacities), CachePolicies())
    scheduler = Scheduler(
        SchedulerSettings(
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=24 if drafts is None else 64,
            speculative_config=None if drafts is None else DRAFTS,
        ),
        cache,
        Residency(AdapterLimits(max_loras=max_loras, max_cpu_loras=0)),
        max_model_len=MAX_LEN,
        draft_source=drafts,
    )
    compiles = None if grammars is None else GrammarCompiles(grammars)
    loop = EngineLoop(scheduler, runner, compiles=compiles)
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
    return Submit(RequestId(number), prompt, None, params, number, (2,), name)


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
def llama(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return Both(folder)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """References take their time for every token, padding's as well."""
    monkeypatch.setattr(mixed, "TOKENS", range(8, 129, 8))


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token reaches the host before the engine waits for it."""
    monkeypatch.setattr(InFlight, "is_done", property(lambda self: False))


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps as large as a graph's."""
    monkeypatch.setattr(Graphs, "size_for", lambda self, num_rows: 8)


@pytest.fixture
def single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has few tokens."""
    monkeypatch.setattr(Graphs, "has_room_for", lambda self, num_rows: True)
    monkeypatch.setattr(Graphs, "size_for", lambda self, num_rows: num_rows + 3)


def _refuse(*_: object) -> None:
    raise AssertionError("a short step ran kernel by kernel")


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_short_steps_run_as_decode_steps_and_give_the_same_tokens(
    tmp_path: Path,
    kind: str,
    single_tokens: None,
    slow_tokens: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny(tmp_path, kind)
    both = Both(tmp_path)
    requests = some_requests(temperature=0.8)
    with monkeypatch.context() as patch:
        expected = run(make_runner(both.cpu), requests)
        patch.setattr(ModelRunner, "_begin_any", _refuse)
        assert tokens(run(make_runner(both.plain), requests)) == tokens(expected)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[StepLayout]:
    """The layouts of steps that repeat an earlier one. Each is compared with the step as it would
    have been laid out without one."""
    seen: list[StepLayout] = []
    plans: list[Plan] = []
    find, step = RepeatedSteps.find, RepeatedSteps.step

    def noted(self: RepeatedSteps, plan: Plan) -> StepLayout | None:
        plans[:] = [plan]
        return find(self, plan)

    def compared(self: RepeatedSteps, layout: StepLayout) -> StepInputs:
        batch, state = self._batch, self._state
        kept = batch._num_computed.copy(), batch._num_guesses.copy()
        wanted = batch.inputs(plans[0])
        if not wanted.is_decode:
            wanted = as_single_tokens(wanted)
        computed, guesses = batch._num_computed.copy(), batch._num_guesses.copy()
        batch._num_computed[:], batch._num_guesses[:] = kept
        inputs, arrays = step(self, layout), layout.arrays
        assert (batch._num_computed == computed).all()
        assert (batch._num_guesses == guesses).all()
        for field in fields(StepInputs):
            np.testing.assert_array_equal(getattr(inputs, field.name), getattr(wanted, field.name))
        size, spare = len(arrays["tokens"]), len(batch.num_tokens)
        expected = decode_arrays(wanted, size=size, num_slots=1, spare_units=np.empty(0, np.int32))
        expected |= run_arrays(expected["token_rows"], expected["lens"])
        rows = sampling_rows(wanted, size=size, spare_row=spare)
        indices, tables = np.zeros(size, np.int64), rows.copy()
        at = wanted.sampled_at
        tables[at] = table_rows_of(wanted, spare)
        indices[at] = batch.num_output_tokens(rows[at]) + wanted.guesses
        expected |= state.arrays(rows, indices, tables)
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
            assert arrays[name].dtype == array.dtype
        seen.append(layout)
        return inputs

    monkeypatch.setattr(RepeatedSteps, "find", noted)
    monkeypatch.setattr(RepeatedSteps, "step", compared)
    return seen


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_steps_that_check_drafts_are_graphs_and_give_the_same_tokens(
    tmp_path: Path, kind: str, slow_tokens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: six rows with four guesses each are 30 rows of a graph, more than sequences may run. The
    reference takes the table of a run's first row, as the kernel does."""
    save_tiny(tmp_path, kind)
    both = Both(tmp_path)
    edited = some_requests(
        temperature=0.7, presence_penalty=0.4, logit_bias={5: 2.0, 9: -3.0}, min_tokens=4
    )
    requests = some_requests(temperature=0.8) + [
        replace(r, request_id=RequestId(r.request_id + 20), prompt=[7, *r.prompt]) for r in edited
    ]
    expected = tokens(run(make_runner(both.cpu), requests))
    source = RecordedDrafts(0.8, vocab_size=97)
    for request in requests:
        source.record(request.prompt, expected[int(request.request_id)])
    sizes = []

    def no_launches(self: ModelRunner, plan: Plan, inputs: StepInputs, *_: object) -> Any:
        assert not plan.drafts, "a step with guesses ran kernel by kernel"
        return begin_any(self, plan, inputs)

    def graph(self: ModelRunner, plan: Plan, inputs: StepInputs, *args: Any, **named: Any) -> Any:
        sizes.append(len(inputs.rows) if plan.drafts else 0)
        return begin_graph(self, plan, inputs, *args, **named)

    longest: list[int] = []
    kept = reference.decode_attention

    def noted(q: Tensor, layer_kv: Tensor, rows: DecodeRows, *args: Any, **options: Any) -> Tensor:
        if rows.runs is not None:
            starts = rows.runs.starts[: int(rows.runs.count) + 1]
            longest.append(int(starts.diff().max()))
        return kept(q, layer_kv, rows, *args, **options)

    begin_any, begin_graph = ModelRunner._begin_any, ModelRunner._begin_graph
    monkeypatch.setattr(reference, "decode_attention", noted)
    monkeypatch.setattr(ModelRunner, "_begin_any", no_launches)
    monkeypatch.setattr(ModelRunner, "_begin_graph", graph)
    runner = make_runner(both.plain, drafts=True)
    runner._computes_later = True  # as on a GPU: such steps are launched by their caller
    assert tokens(run(runner, requests, drafts=source)) == expected
    assert max(sizes) > MAX_SEQS
    assert max(longest) >= 5, "the history of a row is read once for its guesses"


@pytest.mark.parametrize(
    ("num_requests", "min_tokens", "least"), [(4, 0, 5), (8, 0, 1), (4, 30, 0)]
)
def test_a_step_that_repeats_an_earlier_ones_layout_has_the_same_arrays(
    tmp_path: Path,
    slow_tokens: None,
    repeats: list[StepLayout],
    num_requests: int,
    min_tokens: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight requests are more than rows: some rows have new owners. Rows whose stop tokens are
    forbidden at first repeat none."""
    save_tiny(tmp_path, "llama")
    both = Both(tmp_path)
    requests = [
        replace(
            submit(
                number, [5, 6, 7 + number] * 3, max_tokens=45, temperature=0.3 + 0.3 * number,
                presence_penalty=0.2 * number, logprobs=2, min_tokens=min_tokens,
            ),
            stop_ids=(96,),
        )
        for number in range(1, num_requests + 1)
    ]  # fmt: skip
    expected = tokens(run(make_runner(both.cpu), requests))
    source = RecordedDrafts(0.8, vocab_size=97)
    for request in requests:
        source.record(request.prompt, expected[int(request.request_id)])
    monkeypatch.setattr(ModelRunner, "_begin_any", _refuse)
    runner = make_runner(both.plain, drafts=True)
    assert tokens(run(runner, requests, drafts=source)) == expected
    assert len(repeats) >= least
    assert bool(repeats) == (min_tokens == 0)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in SAME_STEPS])
def test_fixed_shapes_give_each_architectures_tokens(
    tmp_path: Path, kind: str, padded: None, slow_tokens: None
) -> None:
    """F03: one runner and one decoder, by two sets of kernels, padded as graphs need it or not."""
    save_tiny(tmp_path, kind)
    both = Both(tmp_path)
    requests = [
        submit(r.request_id, r.prompt, max_tokens=3 + r.request_id % 3)
        for r in some_requests()[: MAX_SEQS + 1]
    ]
    expected = run(make_runner(both.cpu), requests)
    assert tokens(run(make_runner(both.plain), requests)) == tokens(expected)


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
    expected = run(make_runner(llama.cpu), requests)
    assert tokens(run(make_runner(llama.plain), requests)) == tokens(expected)


def _failing(what: Callable[..., Any], is_meant: Callable[..., bool]) -> Callable[..., Any]:
    def fails(*args: Any) -> Any:
        if is_meant(*args):
            raise ZeroDivisionError("planted")
        return what(*args)

    return fails


@pytest.mark.parametrize("where", ["draw", "edit", "arrive"])
def test_a_row_whose_sampling_fails_fails_alone(
    llama: Both, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever the reason: its neighbours in the step get the tokens that are theirs."""
    requests = some_requests(temperature=1.0, top_k=9, presence_penalty=0.5)
    expected = tokens(run(make_runner(llama.cpu), requests))
    requests[3] = replace(requests[3], sampling=replace(requests[3].sampling, top_k=7))
    if where == "draw":
        draw = _failing(torch_ops.draw, lambda _, cuts, __: 7 in cuts.top_k)
        monkeypatch.setattr(torch_ops, "draw", draw)
    elif where == "edit":
        edit = _failing(torch_ops.edit, lambda _, rows, index: rows.top_k[index] == 7)
        monkeypatch.setattr(torch_ops, "edit", edit)
    else:
        take = _failing(SamplingState._take, lambda _, arrival, __: arrival.sampling.top_k == 7)
        monkeypatch.setattr(SamplingState, "_take", take)
    given = run(make_runner(llama.cpu), requests, fails=3)
    assert "ZeroDivisionError: planted" in str(given[3][-1].error)
    others = tokens(given)
    del expected[3], others[3]
    assert others == expected


def test_rows_that_ask_for_logprobs_get_them_beside_rows_that_do_not(llama: Decoder) -> None:
    requests = some_requests()
    requests[2] = submit(2, requests[2].prompt, max_tokens=6, logprobs=3, prompt_logprobs=1)
    expected = run(make_runner(llama.cpu), requests)
    given = run(make_runner(llama.plain), requests)
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
def adapted(folder: Path) -> Both:
    make_pair(folder, "llama", ADAPTERS)
    return Both(folder / "base")


def with_adapters(decoder: Decoder, *, num_slots: int, max_rank: int = 64) -> ModelRunner:
    """In a pool as a GPU has it, if the decoder has the references for kernels."""
    pool = AdapterPool(
        decoder.lora_parts(), num_slots=num_slots, max_rank=max_rank, dtype=torch.float32,
        device=CPU, is_transposed=not _is_plain(decoder),
    )  # fmt: skip
    loader = AdapterLoader(lambda path: read(Path(path), decoder)[1], pool)
    return make_runner(decoder, loader)


@pytest.mark.parametrize("short_steps", [False, True])
def test_adapters_in_fixed_shapes_give_the_tokens_of_adapters_on_a_cpu_w17(
    adapted: Both,
    folder: Path,
    short_steps: bool,
    padded: None,
    slow_tokens: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W17: batches of mixed adapters, whose slots rotate, give what each request does alone; also
    where tokens of prompts are rows of their own, and where the embedding and the head change."""
    if short_steps:
        monkeypatch.setattr(Graphs, "has_room_for", lambda self, num_rows: True)
        monkeypatch.setattr(Graphs, "size_for", lambda self, num_rows: num_rows + 3)
    requests = [
        submit(r.request_id, r.prompt, max_tokens=6, adapter=name)
        for r, name in zip(some_requests(), [None, *ADAPTERS], strict=True)
    ]
    paths = {name: (folder / name, adapted.cpu) for name in ADAPTERS}
    expected = run(with_adapters(adapted.cpu, num_slots=3), requests, paths, max_loras=3)
    given = run(with_adapters(adapted.plain, num_slots=3), requests, paths, max_loras=3)
    assert tokens(given) == tokens(expected)


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-mixed"])
def test_adapters_of_experts_in_fixed_shapes_give_the_tokens_of_those_on_a_cpu(
    tmp_path: Path, kind: str, padded: None, slow_tokens: None
) -> None:
    save_tiny(tmp_path / "base", kind)
    both = Both(tmp_path / "base")
    targets = both.cpu.adapter_targets()
    folders = write_adapters(targets, tmp_path, 3, rank=5)
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 100}))
    # One that routes by weights of its own, beside some that don't.
    router = Recipe(rank=4, alpha=40, modules=("gate", "q_proj"))
    write_adapter(tmp_path / "router", targets, router)
    found = [*folders, tmp_path / "router"]
    paths = {f"a{i}": (folder, both.cpu) for i, folder in enumerate(found)}
    names = [None, "a0", "a1", "a3", "a3", "a2", None, "a0"]
    requests = [
        submit(r.request_id, r.prompt, max_tokens=6, adapter=name)
        for r, name in zip(some_requests()[:8], names, strict=True)
    ]
    cpu, plain = (
        tokens(run(with_adapters(decoder, num_slots=2, max_rank=8), requests, paths))
        for decoder in (both.cpu, both.plain)
    )
    assert plain == cpu
    assert len({tuple(cpu[i]) for i in range(8)}) > 4


@pytest.mark.parametrize("grammar", [{"regex": "[a-f]{2,5}(0|1)"}, {"choice": ("ab", "a", "cd")}])
def test_g01_masks_are_in_time_for_tokens_that_are_still_on_the_device(
    tmp_path: Path, padded: None, slow_tokens: None, grammar: dict[str, Any]
) -> None:
    """G01: a step's model is launched before the mask of its choice can be known; with rows that
    have no grammar beside it."""
    save_tiny(tmp_path, "llama", vocab_size=tiny_grammars.VOCAB)
    both = Both(tmp_path)
    wanted = StructuredOutputsParams(**grammar)
    shaped = [
        submit(number, [5, 6, number], max_tokens=9, temperature=1.0, structured_outputs=wanted)
        for number in range(20, 24)
    ]
    requests = [replace(r, stop_ids=(tiny_grammars.EOS,)) for r in (*some_requests(), *shaped)]
    given: list[dict[int, list[int]]] = []
    for decoder in (both.cpu, both.plain):
        grammars = tiny_grammars.cache()
        grammars.compile(wanted)
        runner = make_runner(decoder, grammars=grammars)
        given.append(tokens(run(runner, requests, grammars=grammars)))
    assert given[0] == given[1]
    for number in range(20, 24):
        text = b"".join(tiny_grammars.vocabulary().pieces[t] for t in given[0][number][:-1])
        assert re.fullmatch(grammar.get("regex") or "|".join(grammar["choice"]), text.decode())


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_rows_that_share_a_prefix_read_it_together_and_get_their_own_tokens(
    tmp_path: Path, kind: str, padded: None, slow_tokens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference takes what a row shares from its group's first member, as the kernel does."""
    for name, least in (("SAVED_TOKENS", 0), ("SAVED_SHARE", 0), ("PAGES", 1), ("ROWS", 2)):
        monkeypatch.setattr(sharing, f"MIN_{name}", least)
    seen: list[int] = []
    kept = reference.decode_attention

    def noted(q: Tensor, layer_kv: Tensor, rows: DecodeRows, *args: Any, **options: Any) -> Tensor:
        if rows.shared is not None:
            seen.append(int(rows.shared.lens.count_nonzero()))
        return kept(q, layer_kv, rows, *args, **options)

    monkeypatch.setattr(reference, "decode_attention", noted)
    save_tiny(tmp_path, kind)
    both = Both(tmp_path)
    requests = some_requests()
    expected = run(make_runner(both.cpu), requests)
    assert tokens(run(make_runner(both.plain), requests)) == tokens(expected)
    assert (max(seen, default=0) > 2) == (kind == "llama")


@pytest.mark.parametrize("kind", ["llama", "gpt-oss", "qwen3-moe"])
def test_prompts_beside_decodes_run_in_a_graphs_shape_and_give_the_same_tokens(
    tmp_path: Path, kind: str, slow_tokens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded with tokens and rows of no request; no step runs in its own size."""
    monkeypatch.setattr(mixed, "TOKENS", (16, 40))
    monkeypatch.setattr(mixed, "DECODES", (3,))
    monkeypatch.setattr(Graphs, "has_room_for", lambda self, num_rows: False)
    save_tiny(tmp_path, kind)
    both = Both(tmp_path)
    requests = some_requests(temperature=0.8)
    expected = run(make_runner(both.cpu), requests)
    monkeypatch.setattr(ModelRunner, "_begin_any", _refuse)
    assert tokens(run(make_runner(both.plain), requests)) == tokens(expected)
