"""Rows for the samplers of all kinds, made the way that the runner makes them, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import RequestId, Row
from manyroots.kernels.sampling.rows import (
    NO_FAULT,
    NO_LOGPROBS,
    Sampled,
    SamplingRows,
    SamplingTables,
)
from manyroots.kernels.tolerances import assert_close
from manyroots.runner.sampling_state import SamplingState
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival
from tests.helpers.plain_sampler import PlainRow

Sampler = Callable[[Tensor, SamplingRows], Sampled]
CPU = torch.device("cpu")


class Rows:
    """Some rows of a batch. Each call of `sample` begins with the same tables."""

    def __init__(
        self,
        rows: Sequence[PlainRow],
        *,
        device: torch.device = CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.plain = rows
        self.logits = torch.tensor([row.logits for row in rows], dtype=dtype or torch.float32).to(
            device
        )
        self.device = device
        tables = SamplingTables.zeros(len(rows), self.logits.shape[1], device)
        self.state = SamplingState(len(rows), tables)
        self.state.apply([self._arrival(Row(place), row) for place, row in enumerate(rows)])
        assert not self.state.failures
        self.has_mask = np.array([row.mask is not None for row in rows])
        for place, row in enumerate(rows):
            if row.mask is not None:
                tables.masks[place] = torch.from_numpy(mask_words(row.mask)).to(device)
        self.tables = tables

    def _arrival(self, place: Row, row: PlainRow) -> Arrival:
        return Arrival(
            row=place, request_id=RequestId(place),
            tokens=np.array(row.prompt + row.output, np.int32),
            num_prompt_tokens=len(row.prompt), num_computed_tokens=0,
            page_tables=(np.array([place], np.int32),), sampling=row.params, seed=row.seed,
            stop_ids=row.stop_ids, adapter_slot=None, adapter_from=0,
        )  # fmt: skip

    def rows(self, places: Sequence[int]) -> SamplingRows:
        """What these ask for, with tables of their own."""
        at = np.array(places, np.int32)
        indices = np.array([len(self.plain[place].output) for place in places], np.int64)
        arrays = self.state.arrays(at, indices)
        arrays["has_mask"] = self.has_mask[at].astype(np.int32)
        views = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        tables = SamplingTables(
            **{f.name: getattr(self.tables, f.name).clone() for f in fields(SamplingTables)}
        )
        return SamplingRows.of(views, tables)

    def sample(self, sampler: Sampler, places: Sequence[int]) -> tuple[Sampled, SamplingRows]:
        rows = self.rows(places)
        return sampler(self.logits[list(places)].clone(), rows), rows


def outcomes(sampled: Sampled, rows: SamplingRows) -> list[tuple[object, ...]]:
    """All that each row was given, but for its logprobs' values; what is counted, too."""
    tables = rows.tables.counts.cpu()
    packed, asked, counted = sampled.packed.cpu(), rows.num_top.tolist(), rows.table_rows.tolist()
    here = Sampled(packed)
    given: list[tuple[object, ...]] = []
    for index, fault in enumerate(here.faults.tolist()):
        if fault != NO_FAULT:
            given.append((fault,))
            continue
        counts = tables[counted[index]]
        one: tuple[object, ...] = (int(here.tokens[index]), counts.sum().item())
        one = (*one, counts[one[0]].item())
        num_top = min(asked[index], counts.shape[0])
        if num_top != NO_LOGPROBS:
            one = (*one, int(here.ranks[index]), here.top_ids[index, :num_top].tolist())
        given.append(one)
    return given


def assert_logprobs_close(ours: Sampled, theirs: Sampled, rows: SamplingRows) -> None:
    vocab = rows.tables.counts.shape[1]
    scored = (rows.num_top != NO_LOGPROBS) & (ours.faults == NO_FAULT)
    for index in scored.nonzero()[:, 0].tolist():
        top = slice(0, min(int(rows.num_top[index]), vocab))
        pairs = (
            (ours.logprobs[index], theirs.logprobs[index]),
            (ours.top_logprobs[index, top], theirs.top_logprobs[index, top]),
        )
        for mine, right in pairs:
            assert_close("logprobs", mine.cpu(), right.cpu(), torch.float32)


def mask_words(allowed: Sequence[bool]) -> np.ndarray:
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def random_row(rng: random.Random, vocab: int) -> PlainRow:
    """Logits of half precision, so that nearly every cut falls among equals."""
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
        many = rng.choice([1, 1, 5, min(vocab // 2, 1024)])
        ids = rng.sample(range(vocab), many)
        params["logit_bias"] = {token: rng.choice([-100.0, 0.5, 4.0]) for token in ids}
    if rng.random() < 0.2:
        params["min_tokens"], stop_ids = 12, tuple({rng.randrange(vocab) for _ in range(3)})
    if rng.random() < 0.3:
        params["logprobs"] = rng.choice([0, 1, 5, 20])
    mask = None
    if rng.random() < 0.1:
        mask = [rng.random() < 0.5 for _ in range(vocab)]
        mask[next(token for token in range(vocab) if token not in stop_ids)] = True
    return PlainRow(
        _logits(rng, vocab), SamplingParams(**params), rng.getrandbits(64), known[:4],
        known[4 : rng.randrange(4, 12)], stop_ids, mask,
    )  # fmt: skip


def _logits(rng: random.Random, vocab: int) -> list[float]:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    exact = torch.randn(vocab, generator=generator) * rng.choice([0.0, 0.5, 2.0, 6.0])
    logits = exact.round() if rng.random() < 0.3 else exact.to(torch.bfloat16).float()
    # Few tokens far above the rest, beside each other or a part of the vocabulary that can't be.
    odd = rng.random()
    if odd < 0.1:
        begin = rng.randrange(vocab)
        logits[begin : begin + 70] += 8.0
    elif odd < 0.2:
        begin = rng.randrange(vocab)
        logits[:begin] = -torch.inf
    listed: list[float] = logits.tolist()
    return listed
