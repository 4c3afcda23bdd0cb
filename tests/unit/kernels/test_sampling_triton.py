"""Tokens from logits in Triton: the same rule, the same draws."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.sampling import reference  # isort: skip
from manyroots.kernels.sampling import triton as fast  # isort: skip

VOCAB = 10_000


def inputs(rows: int, temperature: list[float]) -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor(temperature, device=DEVICE),
        torch.arange(rows, device=DEVICE) * 7_777_777_777 - 5,
        torch.arange(rows, device=DEVICE) * 3,
    )


def test_tokens_are_those_of_the_reference() -> None:
    logits = randn(12, VOCAB) * 3
    args = inputs(12, [0.0, 1.0, 0.3, 2.0, 0.7, 1.0, 0.0, 1.5, 1.0, 1.0, 0.1, 5.0])
    tokens, finite = fast.sample(logits, *args)
    expected, _ = reference.sample(logits, *args)
    assert tokens.tolist() == expected.tolist()
    assert finite.all()


def test_the_first_of_equal_logits_wins() -> None:
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    logits[0, [5000, 9000]] = 1.0
    tokens, _ = fast.sample(logits, *inputs(2, [0.0, 0.0]))
    assert tokens.tolist() == [5000, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_logits_tie_a_row_alone_gets_the_token_it_gets_among_others(
    dtype: torch.dtype,
) -> None:
    """And the reference's: the first of equals, by id, across spans too."""
    logits = (randn(10, VOCAB) * 3).round().to(dtype)
    temperature = [0.0, 1.0, 0.3, 2.0, 0.7, 1e-5, 0.0, 1.5, 50.0, 1.0]
    args = inputs(10, temperature)
    together, finite = fast.sample(logits, *args)
    assert finite.all()
    assert together.tolist() == reference.sample(logits, *args)[0].tolist()
    for row in (0, 1, 5, 6, 8):
        only = [arg[row : row + 1].contiguous() for arg in args]
        assert fast.sample(logits[row : row + 1], *only)[0].tolist() == [together[row]]


def test_rows_that_are_not_finite_are_told_and_the_others_are_not_touched() -> None:
    logits = randn(4, VOCAB)
    logits[0, 77] = float("nan")
    logits[1, 9_999] = float("inf")
    logits[2] = float("-inf")
    args = inputs(4, [0.0, 1.0, 1.0, 1.0])
    tokens, finite = fast.sample(logits, *args)
    assert finite.tolist() == [False, False, False, True]
    assert tokens[3] == reference.sample(logits, *args)[0][3]


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.full((64, VOCAB), float("-inf"), device=DEVICE)
    logits[:, [3, 4096, 9_999]] = 0.0
    tokens, finite = fast.sample(logits, *inputs(64, [1.0] * 64))
    assert finite.all()
    assert set(tokens.tolist()) == {3, 4096, 9_999}
