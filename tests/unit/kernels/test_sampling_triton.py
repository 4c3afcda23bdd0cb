"""Tokens from logits in Triton: the reference's, bit by bit, whatever rows ask for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip
from manyroots.kernels.sampling import cuts, reference  # isort: skip
from manyroots.kernels.sampling import triton as fast  # isort: skip
from manyroots.kernels.sampling.exact import LOG2_E, scale_bits, weights  # isort: skip
from manyroots.kernels.sampling.rows import NO_FAULT, NOT_FINITE  # isort: skip
from manyroots.kernels.sampling.triton_rows import RowCuts, weight_of  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from manyroots.sampling import SamplingParams  # isort: skip
from tests.helpers.plain_sampler import PlainRow  # isort: skip
from tests.helpers.sampled_rows import Rows, assert_logprobs_close, outcomes, random_row  # isort: skip

IS_GPU = DEVICE.type == "cuda"
SMALL = {"SPAN": 256, "SHORT_LIST": 16, "LONG_LIST": 64, "MAX_PARTS": 32, "SEARCH_BLOCK": 512}
"""So that a small vocabulary has many spans, and lists are too short for many rows."""
SEEDS, COUNT = (range(50), 40) if IS_GPU else (range(1), 24)
"""A GPU tries 2,000 rows of each kind; the interpreter a few of them."""


def row(logits: list[float], seed: int = 0, **params: Any) -> PlainRow:
    return PlainRow(logits, SamplingParams(**params), seed, [1, 2], [3, 3])


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(fast, name, size)


def check(rows: Rows) -> None:
    """Everything is the reference's; logprobs but for rounding."""
    places = range(len(rows.plain))
    with np.errstate(all="ignore"):
        ours, asked = rows.sample(fast.sample, places)
    theirs, also = rows.sample(reference.sample, places)
    assert outcomes(ours, asked) == outcomes(theirs, also)
    assert_logprobs_close(ours, theirs, asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_rows_get_what_the_reference_gives(seed: int) -> None:
    rng = random.Random(f"whole {seed}")
    check(Rows([random_row(rng, 300) for _ in range(COUNT)], device=DEVICE))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_keep_more_than_a_list_holds_get_what_the_reference_gives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    rng = random.Random(f"small {seed}")
    check(Rows([random_row(rng, 1031) for _ in range(COUNT // 2)], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if IS_GPU else [torch.float16])
def test_half_precision_logits_get_what_the_reference_gives(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    rng = random.Random("half")
    count = 400 if IS_GPU else 8
    check(Rows([random_row(rng, 1031) for _ in range(count)], device=DEVICE, dtype=dtype))


def test_the_sizes_of_a_real_vocabulary_get_what_the_reference_gives() -> None:
    vocab, count = (151_936, 60) if IS_GPU else (9_001, 6)
    rng = random.Random("large")
    check(Rows([random_row(rng, vocab) for _ in range(count)], device=DEVICE))


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_k": 300, "top_p": 0.5},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"min_p": 0.5, "top_p": 0.99},
        {"temperature": 100.0, "top_p": 0.999},
        {"temperature": 1e-5, "top_k": 50},
        {"temperature": 0.0, "logprobs": 20},
    ],
    ids=str,
)
def test_odd_logits_get_what_the_reference_gives(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All equal, hardly any, far apart, hardly apart, next to each other, both zeros."""
    shrink(monkeypatch)
    vocab = 700
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(vocab, generator=generator)
    few = torch.full((vocab,), -torch.inf)
    few[[3, 256, 699]] = torch.tensor([1.0, 2.0, 1.0])
    peak = torch.full((vocab,), -3.0)
    peak[100:140] = 5.0
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    kinds = [torch.full((vocab,), -7.0), few, noise * 1e38, noise * 1e-41, peak, zeros, noise]
    rows = [
        row(logits.tolist(), seed, **{"temperature": 1.0, "logprobs": 3, **params})
        for logits in kinds
        for seed in range(40 if IS_GPU else 1)
    ]
    check(Rows(rows, device=DEVICE))


def test_rows_that_are_not_finite_are_told_and_the_others_are_not_touched() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 300, generator=generator)
    logits[0, 77], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    asked = {"temperature": 1.0, "top_k": 9, "logprobs": 2, "presence_penalty": 0.5}
    rows = Rows([row(values, seed=7, **asked) for values in logits.tolist()], device=DEVICE)
    sampled, after = rows.sample(fast.sample, range(4))
    assert sampled.faults.tolist() == [NOT_FINITE] * 3 + [NO_FAULT]
    assert sampled.tokens[3] == reference.sample(rows.logits[3:], rows.rows([3])).tokens[0]
    changed = (after.tables.counts != rows.tables.counts).sum(-1)
    assert changed.tolist() == [0, 0, 0, 1, 0]


@triton.jit
def _weigh(x, out, per_logit, count, BITS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < count, other=0.0)
    cuts = RowCuts(0, 0.0, 0, 0.0, tl.load(per_logit))
    tl.store(out + i, weight_of(values, cuts, BITS), mask=i < count)


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 0.7, 1.0, 3.3, 100.0])
def test_weights_are_the_same_on_every_device(temperature: float) -> None:
    """In Triton, with torch's operators and with numpy's, of distances of all sizes."""
    generator = torch.Generator().manual_seed(3)
    count = 1 << (22 if IS_GPU else 14)
    far = torch.rand(count, generator=generator) ** 4 * 120 * temperature
    below = -torch.cat((far, far.bfloat16().float(), far * 1e-30, torch.tensor([0.0, 3e38])))
    below[7] = -torch.inf
    heat, bits = np.float32(temperature), scale_bits(151_936)
    values = below.to(DEVICE)
    per_logit = torch.tensor([np.float32(LOG2_E) / heat], device=DEVICE)
    out = torch.empty(len(below), dtype=torch.int64, device=DEVICE)
    _weigh[(triton.cdiv(len(below), 1024),)](
        values, out, per_logit, len(below), BITS=bits, BLOCK=1024, enable_fp_fusion=False
    )
    padded = np.full((1, 151_936), -np.inf, np.float32)
    expected = []
    for begin in range(0, len(below), padded.shape[1]):
        part = below[begin : begin + padded.shape[1]].numpy()
        padded[0, : len(part)] = part
        exact = weights(padded[0], np.float32(0), heat)
        zero = torch.zeros(1, 1)
        with_torch = cuts._weights(torch.from_numpy(padded), zero, np.array([heat]), 2.0**bits)
        assert (with_torch.numpy()[0] == exact).all()
        expected.append(exact[: len(part)])
    assert (out.cpu().numpy() == np.concatenate(expected)).all()


def test_weights_are_powers_of_e() -> None:
    far = np.linspace(0.0, 25.0, 100_001, dtype=np.float32)
    heavy = weights(-far, np.float32(0), np.float32(1))
    true = np.exp(-far.astype(np.float64)) * 2.0 ** scale_bits(len(far))
    assert heavy[0] == 2 ** scale_bits(len(far))
    assert_close("weights", torch.from_numpy(heavy), torch.from_numpy(true), torch.float32)
