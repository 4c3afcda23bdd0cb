"""One layer of each kind: what launches the same kernels, and how few layers launch them all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from manyroots.models.forms import form_of, shortest_prefix


@pytest.mark.parametrize(
    ("forms", "count"),
    [
        ("A", 1), ("AAAA", 2), ("ABABAB", 4), ("DDEEEE", 4), ("LLLFLLLF", 8), ("ABC", 3),
        ("AAB", 3),
    ],
)  # fmt: skip
def test_the_first_layers_have_every_form_after_every_other_that_it_comes_after(
    forms: str, count: int
) -> None:
    assert shortest_prefix(forms) == count
    prefix = forms[:count]
    assert set(pairwise(prefix)) == set(pairwise(forms))
    assert prefix[-1] == forms[-1]


@dataclass
class Part:
    weight: torch.Tensor
    eps: float = 1e-6
    name: str = "q"


def test_a_form_has_all_but_the_values_of_tensors() -> None:
    whole = torch.zeros(8, 4)
    form = form_of(Part(whole))
    assert form == form_of(Part(torch.ones(8, 4)))
    for other in (
        Part(torch.zeros(4, 8)),
        Part(torch.zeros(4, 8).t()),
        Part(torch.zeros(8, 4, dtype=torch.float16)),
        Part(torch.zeros(33)[1:].view(8, 4)),
        Part(whole, eps=1e-5),
        Part(whole, name="k"),
        [Part(whole)],
    ):
        assert form_of(other) != form
    loop: list[object] = []
    loop.append(loop)
    assert form_of(loop) == form_of(loop)


def test_objects_of_libraries_are_compared_and_not_looked_into() -> None:
    class Foreign:
        """As a kernel of Triton: looking at its attributes fails."""

        __module__ = "library.kernels"

        def __iter__(self) -> object:
            raise TypeError("not iterable")

    kernel = Foreign()
    assert form_of([kernel]) == form_of([kernel])
    assert form_of([kernel]) != form_of([Foreign()])
    array = np.zeros(3)  # has no hash
    assert form_of([array]) == form_of([array])
    assert form_of([array]) != form_of([np.zeros(3)])
    assert form_of([torch.device("cpu")]) == form_of([torch.device("cpu")])
    assert form_of([torch.float16]) != form_of([torch.bfloat16])
