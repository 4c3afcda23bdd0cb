"""Steps of windows and of capped scores in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.paged_cases import PAGE, SCALE, step_of
from tests.unit.kernels.triton_cases import DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1, 15, 0, 16, 17, 31, 33, 66], []),
    ([], [(1, 1), (33, 33), (16, 47), (1, 64)]),
    ([40, 9], [(17, 50), (3, 3)]),
]
"""Decodes alone, one of which only pads; prompts alone; and both."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [(0, False), (0, True), (1, True), (7, False), (8, True), (9, False), (15, True), (17, False),
     (32, True)],
)  # fmt: skip
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "prompts", "both"])
def test_a_window_reads_nothing_in_front_of_it(
    step: tuple[list[int], list[tuple[int, int]]],
    window: int,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    """Windows of pages and of tiles, and one more and less; what lies in front of them is
    another's by now."""
    q, layer_kv, rows = step_of(*step, window, (4, 2, 16), dtype)
    sinks = randn(4, seed=8) if has_sinks else None
    metadata = fast.prepare(rows, PAGE, q.dtype)
    out = fast.attend(q, layer_kv, metadata, SCALE, sinks)
    expected = reference.attend(q, layer_kv, reference.prepare(rows, PAGE, q.dtype), SCALE, sinks)
    live = torch.ones(len(q), dtype=torch.bool)
    live[: len(step[0])] = torch.tensor(step[0]) > 0
    assert expected[live].isfinite().all()
    assert_close("attention", out[live], expected[live], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("window", [0, 9])
def test_capped_scores_equal_the_reference(window: int, cap: float, dtype: torch.dtype) -> None:
    """A cap that most scores are beyond, near and far from; of decodes and of prompts."""
    q, layer_kv, rows = step_of([40, 9], [(17, 50), (3, 3)], window, (4, 2, 16), dtype)
    out = fast.attend(q, layer_kv, fast.prepare(rows, PAGE, q.dtype), SCALE, None, cap)
    naive = reference.prepare(rows, PAGE, q.dtype)
    expected = reference.attend(q, layer_kv, naive, SCALE, None, cap)
    assert_close("attention", out, expected, dtype)
    uncapped = reference.attend(q, layer_kv, naive, SCALE)
    assert cap > 2.0 or (expected - uncapped).abs().max() > 1e-2, "it changes something"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 1, 256), (8, 1, 64), (2, 2, 128)])
@pytest.mark.parametrize("windows", [(0, 5), (9, 24)])
def test_families_of_one_step_have_windows_of_their_own(
    windows: tuple[int, int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Wide heads of one group, and groups of eight."""
    families = [step_of([21, 5], [(6, 30)], window, shape, dtype) for window in windows]
    sinks = randn(shape[0], dtype=dtype, seed=8)
    given = [
        (q, layer_kv, fast.prepare(rows, PAGE, q.dtype), SCALE, sinks)
        for q, layer_kv, rows in families
    ]
    outs = [fast.attend(*family) for family in given]
    for family, out in zip(given, outs, strict=True):
        assert_close("attention", out, reference.attend(*family), dtype)
