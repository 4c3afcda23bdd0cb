"""S01: a row's token is its own affair, where logits tie too: the same alone and in any mix of
neighbours, and the one that the plain rules give.

On the GPU where there is one: `python -m tests.gpu.check sampler`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from manyroots.ids import RequestId, Row, StepId
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.likeliest import likeliest, order_keys
from manyroots.runner.logprobs import score
from manyroots.runner.sampler import Choices, Sampler
from manyroots.runner.sampling_state import SamplingState
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Plan
from tests.plain_sampler import PlainRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARIES = (7, 65, 300, 1031, 20_011)
"""Below, between and above the widths at which the sampler changes its ways; odd, so that rows lie
unevenly in memory."""


def random_row(rng: random.Random, vocab: int) -> PlainRow:
    """Logits of half precision, so that nearly every cut falls among equals."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    exact = torch.randn(vocab, generator=generator) * rng.choice([0.0, 0.5, 2.0, 6.0])
    coarse = exact.round() if rng.random() < 0.3 else exact.to(torch.bfloat16)
    logits = coarse.tolist()
    temperature = rng.choice([0.0, 1e-6, 1e-5, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0])
    params: dict[str, Any] = {"temperature": temperature}
    if rng.random() < 0.4:
        params["top_k"] = rng.choice([1, 2, 20, 63, 64, 65, 1024, vocab - 1, vocab, 10 * vocab])
    if rng.random() < 0.4:
        params["top_p"] = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999])
    if rng.random() < 0.3:
        params["min_p"] = rng.choice([1e-6, 0.05, 0.3, 1.0])
    known = [rng.randrange(vocab) for _ in range(12)]
    stop_ids: tuple[int, ...] = ()
    if rng.random() < 0.3:
        params["repetition_penalty"] = rng.choice([0.01, 0.5, 2.0, 100.0])
        params["frequency_penalty"] = rng.choice([0.0, 0.5, -2.0])
        params["presence_penalty"] = rng.choice([0.0, 0.25, 2.0])
    if rng.random() < 0.2:
        params["logit_bias"] = {rng.randrange(vocab): rng.choice([-100.0, 0.5, 4.0])}
    if rng.random() < 0.2:
        params["min_tokens"], stop_ids = 12, tuple({rng.randrange(vocab) for _ in range(3)})
    if rng.random() < 0.2:
        params["logprobs"] = rng.choice([0, 1, 5, 20])
    return PlainRow(
        logits, SamplingParams(**params), rng.getrandbits(64), known[:4],
        known[4 : rng.randrange(4, 12)], stop_ids,
    )  # fmt: skip


class Rows:
    """The real sampler with some rows in it."""

    def __init__(self, rows: Sequence[PlainRow]) -> None:
        self.plain = rows
        self.logits = torch.tensor([row.logits for row in rows], device=DEVICE)
        batch = PersistentBatch(max_num_seqs=len(rows), max_model_len=64, page_size=16)
        state = SamplingState(len(rows))
        arrivals = tuple(self._arrival(Row(place), row) for place, row in enumerate(rows))
        for arrival in arrivals:
            state.arrive(arrival)
        empty = np.empty(0, np.int32)
        batch.apply(Plan(StepId(1), arrivals, (), empty, empty, np.empty(0, np.bool_)))
        self.sampler = Sampler(batch, state)

    def _arrival(self, place: Row, row: PlainRow) -> Arrival:
        known = np.array(row.prompt + row.output, np.int32)
        return Arrival(
            row=place, request_id=RequestId(place), tokens=known,
            num_prompt_tokens=len(row.prompt), num_computed_tokens=0,
            page_tables=(np.array([place], np.int32),), sampling=row.params, seed=row.seed,
            stop_ids=row.stop_ids, adapter_slot=None, adapter_from=0,
        )  # fmt: skip

    def sample(self, places: Sequence[int]) -> Choices:
        return self.sampler.sample(self.logits[list(places)], np.array(places, np.int32))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_s01_a_row_gets_the_same_token_alone_and_in_every_mix(vocab: int, seed: int) -> None:
    rng = random.Random(f"{vocab} {seed}")
    count = 40 if vocab < 10_000 else 8
    rows = Rows([random_row(rng, vocab) for _ in range(count)])
    alone = [rows.sample([place]) for place in range(count)]
    assert not any(choice.faults for choice in alone)
    tokens = [int(choice.tokens[0]) for choice in alone]
    mixes = [list(range(count)), list(reversed(range(count)))]
    mixes += [rng.sample(range(count), rng.randrange(2, count)) for _ in range(6)]
    for mix in mixes:
        together = rows.sample(mix)
        assert not together.faults
        assert together.tokens.tolist() == [tokens[place] for place in mix]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab", VOCABULARIES[:-1])
def test_s01_a_row_gets_the_token_that_the_plain_rules_give(vocab: int, seed: int) -> None:
    rng = random.Random(f"plain {vocab} {seed}")
    rows = Rows([random_row(rng, vocab) for _ in range(40)])
    expected = [row.token() for row in rows.plain]
    assert rows.sample(range(40)).tokens.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_order_is_by_logit_and_then_by_id(dtype: torch.dtype) -> None:
    """Whatever the width: `topk` alone orders equals differently at different widths."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 2000, generator=generator) * 3).to(dtype).float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[2, 5:1500] = -torch.inf
    logits[3, [7, 1999]] = torch.finfo(torch.float32).max
    expected = logits.sort(dim=-1, descending=True, stable=True).indices
    keys = order_keys(logits.to(DEVICE))
    for width in (1, 2, 20, 1024, 2000):
        assert likeliest(keys, width).tolist() == expected[:, :width].tolist()


def test_s01_logprobs_name_equals_by_id_and_ranks_agree() -> None:
    """Also where others ask for more, and where more are asked for than there are tokens."""
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0]).repeat(3, 1)
    scores = score(logits.to(DEVICE), torch.tensor([3, 4, 1], device=DEVICE), [20, 3, 0])
    assert [entry.top_tokens for entry in scores] == [(1, 3, 0, 2, 4), (1, 3, 0), ()]
    assert [entry.rank for entry in scores] == [2, 5, 1]
    generator = torch.Generator().manual_seed(2)
    coarse = (torch.randn(5, 700, generator=generator) * 4).round().to(DEVICE)
    nine = torch.full((5,), 9, device=DEVICE)
    alone = [score(coarse[i : i + 1], nine[:1], [3])[0] for i in range(5)]
    beside = score(coarse, nine, [3, 3, 3, 3, 20])
    assert [entry.top_tokens for entry in alone] == [entry.top_tokens[:3] for entry in beside]
    top = torch.tensor(beside[4].top_tokens, device=DEVICE)
    ranks = [entry.rank for entry in score(coarse[4:].repeat(20, 1), top, [0] * 20)]
    assert ranks == list(range(1, 21))
