"""No parameter of one request can fail a step: each odd value is refused by the input processor by
name, or samples a token of the vocabulary, and the neighbours' tokens are what they are without it.

The values are drawn from seeds of our own, so that the same ones are tried every time (R06).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyroots import LLM, SamplingParams
from manyroots.distributed import wire as ranks
from manyroots.engine import wire
from manyroots.engine.input_processor import InputProcessor
from manyroots.errors import RequestError
from manyroots.ids import RequestId, Row, StepId
from manyroots.kernels.sampling import torch_ops
from manyroots.kernels.sampling.rows import Sampled, SamplingRows, SamplingTables
from manyroots.messages import Submit
from manyroots.runner import choices
from manyroots.runner.packet import send
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Arrival, Plan
from tests.unit.engine.test_input_processor import info
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend, tiny_tokenizer

VOCAB = 300
ODD: list[Any] = [
    None, True, False, "", "1", "é", "\ud800", b"1", [], {}, (), [1], object(), 1j,
    0, -0.0, 1, -1, 2, 20, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 10**5000,
    0.5, 1.0, 100.0, 1e-5, 1e-6, 1e-38, 1e-40, 1e-45, 5e-324, 1e38, 1e300,
    float("inf"), float("-inf"), float("nan"), Fraction(1, 3),
    np.int64(3), np.int32(-1), np.float32(0.7), np.float64(1e-45), np.float16(2), np.bool_(True),
]  # fmt: skip
IN_RANGE: dict[str, list[Any]] = {
    "n": [2], "temperature": [0, 1e-5, 1e-4, 0.01, 0.7, 1, 100], "top_p": [1e-300, 1e-45, 0.5, 1],
    "top_k": [-1, 0, 1, VOCAB - 1, VOCAB, 2**31 - 1], "min_p": [0, 1e-300, 1e-45, 0.3, 1, 1.0],
    "presence_penalty": [-2, 2, 1e-45, -0.0], "frequency_penalty": [-2, 2, 1e-45, -0.0],
    "repetition_penalty": [0.01, 0.5, 1, 100], "seed": [-(2**63), -1, 2**63 - 1],
    "max_tokens": [1, 20], "min_tokens": [0, 1, 20], "logprobs": [0, 20],
    "prompt_logprobs": [0, 20], "ignore_eos": [True], "include_stop_str_in_output": [True],
    "skip_special_tokens": [False], "stop": ["x", None, ["a", "b"]],
    "stop_token_ids": [None, [0], list(range(128)), {5}], "logit_bias": [None, {5: 100, 7: -100}],
    "allowed_token_ids": [None, [5], range(200), {7, 8}], "bad_words": [None, ["a", "b c"], []],
}  # fmt: skip


def random_values(rng: random.Random) -> dict[str, Any]:
    """A few fields; most values good, so that many requests get to the sampler."""
    values: dict[str, Any] = {"max_tokens": 8}
    for name in rng.sample([*IN_RANGE], rng.randrange(1, 6)):
        is_odd = rng.random() < 0.15
        values[name] = rng.choice(ODD if is_odd else IN_RANGE[name])
        if is_odd and name == "stop":
            values[name] = rng.choice([values[name], [values[name]], ["x"] * 33, ["x" * 257]])
        if is_odd and name == "stop_token_ids":
            values[name] = rng.choice([values[name], [values[name]], [5, values[name]], range(129)])
        if is_odd and name == "logit_bias":
            keys = [key for key in ODD if not isinstance(key, list | dict)]
            pair = {5: values[name]} if rng.random() < 0.5 else {rng.choice(keys): 1}
            values[name] = rng.choice([values[name], pair])
    return values


class Asker:
    """What a request becomes on its way to the sampler."""

    def __init__(self) -> None:
        self.input_processor = InputProcessor(
            info(vocab_size=VOCAB), tiny_tokenizer(), random.Random(0)
        )
        self.refusals: Counter[str | None] = Counter()

    def ask(self, values: dict[str, Any]) -> list[Submit]:
        """Empty where it is refused, which must be by the name of a field that was given."""
        try:
            return self._submits(values)
        except RequestError as error:
            refusal = error
        assert refusal.field in values, f"{values} were refused for {refusal.field}: {refusal}"
        assert refusal.field in str(refusal)
        assert len(str(refusal)) < 400
        self.refusals[refusal.field] += 1
        return []

    def _submits(self, values: dict[str, Any]) -> list[Submit]:
        ids = map(RequestId, itertools.count(1))
        return self.input_processor.submits(
            [3, 4, 4, 5], SamplingParams(**values), None,
            lambda: next(ids), adapter=None,
        )  # fmt: skip


def sample(submits: list[Submit], output: list[int], logits: torch.Tensor) -> Sampled:
    """One step of all rows, with scores for those that ask for them."""
    tables = SamplingTables.zeros(len(submits), VOCAB, torch.device("cpu"))
    state = SamplingState(len(submits), tables)
    known = np.array([3, 4, 4, 5, *output], np.int32)
    arrivals = tuple(
        Arrival(
            row=Row(row), request_id=RequestId(row), tokens=known, num_prompt_tokens=4,
            num_computed_tokens=0, page_tables=(np.array([row], np.int32),),
            sampling=submit.sampling, seed=submit.seed, stop_ids=submit.stop_ids,
            adapter_slot=None, adapter_from=0,
        )
        for row, submit in enumerate(submits)
    )  # fmt: skip
    empty = np.empty(0, np.int32)
    plan = Plan(StepId(1), arrivals, (), empty, empty, np.empty(0, np.bool_))
    _, plan = ranks.decode(ranks.encode(ranks.RankMessageKind.PLAN, plan))
    state.apply(plan.arrivals)
    assert not state.failures
    rows = np.arange(len(submits), dtype=np.int32)
    arrays = state.arrays(rows, np.full(len(rows), len(output), np.int64))
    sampled = torch_ops.sample(logits.clone(), SamplingRows.of(send(arrays, logits.device), tables))
    at, wanted = np.arange(len(rows)), state.num_logprobs(rows)
    for entry in choices.logprobs(sampled, at, wanted, VOCAB).values():
        assert not np.isnan([entry.logprob, *entry.top_logprobs]).any()
    return sampled


@pytest.mark.parametrize("seed", range(12))
def test_an_odd_value_is_refused_by_name_or_samples_a_token(seed: int) -> None:
    """Trust: 250 requests a seed, 3,000 in all."""
    rng, asker = random.Random(f"odd {seed}"), Asker()
    generator = torch.Generator().manual_seed(seed)
    plain = asker.ask({"temperature": 1.0, "top_k": 20, "seed": 1})[0]
    accepted = [submits[0] for _ in range(250) if (submits := asker.ask(random_values(rng)))]
    assert len(accepted) > 100
    assert asker.refusals.total() > 20
    for begin in range(0, len(accepted), 16):
        some = [plain, *accepted[begin : begin + 16]]
        for submit in some[1:]:
            arrived = wire.SubmitReader().decode(wire.SubmitWriter().encode(submit))
            assert arrived.sampling == submit.sampling
        spread = rng.choice([0.0, 1e-40, 1.0, 1e4, 1e30, 3e37])
        logits = torch.randn(len(some), VOCAB, generator=generator) * spread
        output = [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
        sampled = sample(some, output, logits)
        assert not sampled.faults.any()
        assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()
        assert sampled.tokens[0] == sample([plain], output, logits[:1]).tokens[0]


@pytest.mark.parametrize("name", [*IN_RANGE])
def test_each_field_refuses_what_is_no_value_of_its_kind(name: str) -> None:
    """With the value in the message, however long it would be."""
    asker = Asker()
    for value in (object(), b"1", 1j, 10**5000, float("nan"), "\ud800"):
        assert not asker.ask({name: value}), f"{name}={value!r:.40} was accepted"
    for value, shown in ((1j, "1j"), (float("nan"), "nan"), (2**70, str(2**70))):
        with pytest.raises(RequestError, match=shown) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"logit_bias": {True: 1}}, "True"),
        ({"logit_bias": {1.0: 1}}, "1.0"),
        ({"logit_bias": {"1": 1}}, "'1'"),
        ({"logit_bias": {5: True}}, "True"),
        ({"logit_bias": {5: 1e38}}, "1e+38"),
        ({"stop_token_ids": (True,)}, "True"),
        ({"stop_token_ids": (1.0,)}, "1.0"),
        ({"stop_token_ids": 5}, "5"),
        ({"stop": 5}, "5"),
        ({"stop": [5]}, "5"),
        ({"temperature": True}, "True"),
        ({"repetition_penalty": 1e-45}, "1e-45"),
        ({"repetition_penalty": 1e38}, "1e+38"),
        ({"ignore_eos": 1}, "1"),
    ],
)
def test_what_passed_the_door_once_and_failed_a_step_is_refused(
    values: dict[str, Any], shown: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.field in values
    assert shown in str(caught.value)


def test_numpys_numbers_and_none_are_taken_as_what_they_mean() -> None:
    params = SamplingParams(
        top_k=np.int64(3), temperature=np.float32(0.5), stop=None, stop_token_ids=np.array([4, 5]),
        logit_bias={np.int32(7): np.float64(1)}, seed=np.uint64(9),
    )  # type: ignore[arg-type]  # what scripts pass  # fmt: skip
    assert params == SamplingParams(
        top_k=3, temperature=0.5, stop_token_ids=(4, 5), logit_bias={7: 1.0}, seed=9
    )
    assert type(params.top_k) is type(params.seed) is int
    assert [type(token) for token in params.stop_token_ids] == [int, int]


def test_a_request_that_could_never_choose_is_refused_at_the_door() -> None:
    """Every token would end the text, and none may before min_tokens."""
    input_processor = InputProcessor(info(vocab_size=8), tiny_tokenizer())
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(8)))
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        input_processor.submits([1], params, None, lambda: RequestId(1), adapter=None)
    assert caught.value.field == "min_tokens"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "llama", vocab_size=VOCAB)
    tiny_backend().save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=400) as llm:
        yield llm


def test_odd_values_through_the_whole_engine(llm: LLM) -> None:
    """Together in one batch, with the model's own logits."""
    rng, asker = random.Random("engine"), Asker()
    odd = [values for values in (random_values(rng) for _ in range(120)) if asker.ask(values)]
    assert len(odd) > 40
    params = [SamplingParams(**values) for values in odd]
    results = llm.generate([[3, 4, 4, 5]] * len(params), params)
    for result, asked in zip(results, params, strict=True):
        assert len(result.outputs) == asked.n
        for output in result.outputs:
            assert output.token_ids
            assert all(0 <= token < VOCAB for token in output.token_ids)
            for entry in output.logprobs or ():
                assert np.isfinite([score.logprob for score in entry.values()]).all()


def test_s01_a_seed_gives_its_tokens_whatever_its_neighbour_asks_for(llm: LLM) -> None:
    """bfloat16 logits tie, and a neighbour's cut once decided which of the equals came first. Both
    batches have the same shape, so that products are rounded alike."""
    prompts = [[5, 6, 7, 8, 9], [9, 8, 7, 6]]
    others = [{"top_k": 20}, {"top_p": 0.95}, {"min_p": 0.01}, {"temperature": 0.0}]
    neighbours = [
        SamplingParams(**{"seed": 9, "max_tokens": 12, "ignore_eos": True, **other})  # type: ignore[arg-type]  # mixed
        for other in others
    ]
    for seed in range(4):
        mine = SamplingParams(top_k=20, seed=seed, max_tokens=12, ignore_eos=True)
        given = [llm.generate(prompts, [mine, other])[0] for other in neighbours]
        assert len({tuple(result.outputs[0].token_ids) for result in given}) == 1
