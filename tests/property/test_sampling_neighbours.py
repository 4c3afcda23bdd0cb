"""S01: a row's token is its own affair, where logits tie too: the same alone and in any mix of
neighbours, and the one that the plain rules give.

On the GPU where there is one: `python -m tests.gpu.check sampler`.
"""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import pytest
import torch

from manyroots.kernels.sampling import reference, torch_ops
from manyroots.kernels.sampling.likeliest import likeliest, order_keys
from manyroots.kernels.sampling.rows import NO_FAULT
from manyroots.runner.logprobs import score
from tests.helpers.sampled_rows import Rows, assert_logprobs_close, outcomes, random_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARIES = (7, 65, 300, 1031, 20_011)
"""Below, between and above the widths at which the sampler changes its ways; odd, so that rows lie
unevenly in memory."""


def fast() -> ModuleType:
    """The device's own sampler."""
    if DEVICE.type == "cpu":
        return torch_ops
    from manyroots.kernels.sampling import triton

    return triton


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_s01_a_row_gets_the_same_token_alone_and_in_every_mix(vocab: int, seed: int) -> None:
    rng = random.Random(f"{vocab} {seed}")
    count = 40 if vocab < 10_000 else 8
    rows = Rows([random_row(rng, vocab) for _ in range(count)], device=DEVICE)
    alone = [outcomes(*rows.sample(fast().sample, [place]))[0] for place in range(count)]
    mixes = [list(range(count)), list(reversed(range(count)))]
    mixes += [rng.sample(range(count), rng.randrange(2, count)) for _ in range(6)]
    for mix in mixes:
        assert outcomes(*rows.sample(fast().sample, mix)) == [alone[place] for place in mix]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_s01_a_row_gets_what_the_reference_gives(vocab: int, seed: int) -> None:
    """Tokens, faults, counts, ranks and the likeliest, bit by bit; logprobs but for rounding."""
    rng = random.Random(f"reference {vocab} {seed}")
    count = 40 if vocab < 10_000 else 8
    rows = Rows([random_row(rng, vocab) for _ in range(count)], device=DEVICE)
    places = range(count)
    ours, asked = rows.sample(fast().sample, places)
    theirs, also = rows.sample(reference.sample, places)
    assert outcomes(ours, asked) == outcomes(theirs, also)
    assert_logprobs_close(ours, theirs, asked)


@pytest.mark.parametrize("sampler", [fast(), reference], ids=["fast", "reference"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", VOCABULARIES[:-1])
def test_s01_a_row_gets_the_token_that_the_plain_rules_give(
    vocab: int, seed: int, sampler: ModuleType
) -> None:
    rng = random.Random(f"plain {vocab} {seed}")
    rows = Rows([random_row(rng, vocab) for _ in range(40)], device=DEVICE)
    sampled, _ = rows.sample(sampler.sample, range(40))
    for place, row in enumerate(rows.plain):
        if sampled.faults[place] == NO_FAULT:
            assert int(sampled.tokens[place]) == row.token()
        else:
            assert not np.isfinite(row.edited()).any()


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
