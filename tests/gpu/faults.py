"""Faults planted in the GPU's path, each of which the comparison with the CPU must find.

Bookkeeping (`FAULTS`): a few numbers that the runner gives to right kernels are wrong, and the
scores of whole sequences show it: one row's, one page's, one product's, one column's. Kernels
(`BentKernels`): one of them computes something else, and the comparison of its calls shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from manyroots.kernels.attention import paged
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fp8_rows import Fp8Rows
from manyroots.kernels.lora_ops import reference
from manyroots.kernels.norm.deferred import DeferredRMSNorm, NormedRows
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable
from manyroots.layers.linear import Linear
from manyroots.runner import mixed, step_arrays, step_packets
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.inputs import NOWHERE
from manyroots.runner.sampling_state import SamplingState
from manyroots.store import adapter_region, adapter_tables
from tests.gpu import checked
from tests.gpu import requests as made
from tests.gpu.engines import run
from tests.gpu.models import VOCAB
from tests.gpu.parity import Batches, Parity

Fault = Callable[[], AbstractContextManager[None]]


class _Plant:
    """Whether planted faults act now. Both sides have the same runner: while the CPU scores what
    the other side gave, they don't."""

    acts = True


@contextmanager
def patched(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make` of what is there in its place."""
    kept = getattr(target, name)
    planted = make(kept)

    def chosen(*args: Any, **options: Any) -> Any:
        return (planted if _Plant.acts else kept)(*args, **options)

    setattr(target, name, chosen)
    try:
        yield
    finally:
        setattr(target, name, kept)


def _without_fault(scores: Callable[..., Any]) -> Callable[..., Any]:
    def scored(*args: Any) -> Any:
        _Plant.acts = False
        try:
            return scores(*args)
        finally:
            _Plant.acts = True

    return scored


def _wrong_slot() -> AbstractContextManager[None]:
    """The last sequence with an adapter is computed with another one."""

    def changed(slots: Any) -> Any:
        wrong = slots.copy()
        if (slots >= 0).any():
            last = slots[slots >= 0][-1]
            wrong[slots == last] = (last + 1) % 3
        return wrong

    def make(call: Any) -> Any:
        return lambda slots, *rest, **options: call(changed(slots), *rest, **options)

    graphs = _both(
        patched(step_arrays, "adapter_arrays", make), patched(mixed, "adapter_arrays", make)
    )
    return _both(graphs, patched(reference, "prepare", make))


@contextmanager
def _both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


def _foreign_page() -> AbstractContextManager[None]:
    """The second page of every new sequence is its neighbour in memory."""

    def make(apply: Any) -> Any:
        def wrong(rows: DeviceRows, plan: Any) -> None:
            apply(rows, plan)
            for arrival in plan.arrivals:
                if len(arrival.page_tables[0]) > 1:
                    rows.page_tables[0, arrival.row, 1] ^= 1

        return wrong

    def make_apart(init: Any) -> Any:
        return lambda rows, batch, device, **more: init(
            rows, batch, device, **(more | {"shares": False})
        )

    return _both(patched(DeviceRows, "__init__", make_apart), patched(DeviceRows, "apply", make))


def _lost_token() -> AbstractContextManager[None]:
    """The third token of a step of many keeps its keys and values nowhere."""

    def make(token_arrays: Any) -> Any:
        def wrong(inputs: Any) -> Any:
            arrays = token_arrays(inputs)
            if arrays["pages"].shape[1] > 80:
                arrays["pages"][:, 2] = NOWHERE
            return arrays

        return wrong

    return _both(patched(step_packets, "token_arrays", make), patched(mixed, "token_arrays", make))


def _late_position() -> AbstractContextManager[None]:
    """In decode steps, the first row is turned as if it were one token further."""

    def make(decode_arrays: Any) -> Any:
        def wrong(*args: Any, **options: Any) -> Any:
            arrays = decode_arrays(*args, **options)
            arrays["positions"][0] += 1
            return arrays

        return wrong

    return patched(step_packets, "decode_arrays", make)


def _short_context() -> AbstractContextManager[None]:
    """In steps of any kind, decoding rows do not see their own token."""

    def make(decode_rows: Any) -> Any:
        return lambda table, lens, *rest: decode_rows(table, (lens - 1).clamp(min=1), *rest)

    return patched(paged, "DecodeRows", make)


def _wrong_scaling() -> AbstractContextManager[None]:
    """The second part of every product (k, up) is scaled by half of its scaling."""

    def make(rows: Any) -> Any:
        def wrong(tables: Any, pairs: Any, place: Any) -> Any:
            second = {names[1] for names in tables.names.values() if len(names) > 1}
            halved = {
                name: replace(pair, scaling=pair.scaling / 2) if name in second else pair
                for name, pair in pairs.items()
            }
            return rows(tables, halved, place)

        return wrong

    return patched(adapter_tables.SiteTables, "rows", make)


def _wrong_column() -> AbstractContextManager[None]:
    """What adapters add to a product's columns is one column late."""

    def make(place: Any) -> Any:
        def wrong(region: Any, site: Any, found: Any) -> Any:
            late = [pair and replace(pair, b=pair.b.roll(1, 0)) for pair in found]
            return place(region, site, late)

        return wrong

    return patched(adapter_region.Region, "place", make)


def _missing_adapter() -> AbstractContextManager[None]:
    """One product in twelve has no adapters."""

    def make(call: Any) -> Any:
        count = 0

        def wrong(linear: Any, x: Any, step: Any) -> Any:
            nonlocal count
            count += 1
            return call(linear, x, replace(step, lora=None) if count % 12 == 2 else step)

        return wrong

    return patched(Linear, "__call__", make)


def _wrong_draw() -> AbstractContextManager[None]:
    """Each token is drawn with its successor's number."""

    def make(arrays: Any) -> Any:
        return lambda state, rows, indices, *more: arrays(state, rows, indices + 1, *more)

    return patched(SamplingState, "arrays", make)


FAULTS: dict[str, Fault] = {
    "wrong slot": _wrong_slot,
    "foreign page": _foreign_page,
    "lost token": _lost_token,
    "late position": _late_position,
    "short context": _short_context,
    "wrong scaling": _wrong_scaling,
    "wrong column": _wrong_column,
    "missing adapter": _missing_adapter,
    "wrong draw": _wrong_draw,
}
SHOWN_BY = {"late position": ("grown",), "wrong draw": ("heated",)}
"""Beside whole distributions, which the others show in."""
OF_PLAIN_STEPS = ("gated_norm.add_gated",)
"""Kernels for steps without adapters."""
BENT_ALONE = (*OF_PLAIN_STEPS, "sampling.sample")
"""Kernels whose fault does not show beside others: scores of bent kernels are so far apart that a
bent sampler chooses the same tokens from them."""


def batches(count: int = 7) -> Batches:
    """Enough for every fault to matter. References take longer for each request than a GPU."""
    return {
        "heated": made.few(count=count, temperature=0.9),
        "grown": made.grown(count),
        "scored": made.few(count=count, logprobs=VOCAB),
    }


@contextmanager
def patched_scores(parity: Parity) -> Iterator[None]:
    """The CPU's side computes without the fault."""
    scored = _without_fault(parity._cpu_scores)
    with mock.patch.object(parity, "_cpu_scores", scored):
        yield


def verdict(parity: Parity, name: str, count: int = 7) -> str | None:
    """What the comparison says of an engine with this fault; None if it finds nothing. What nearly
    every fault shows in is computed first, and all of it where that says nothing."""
    every = batches(count)
    for shown_by in (SHOWN_BY.get(name, ()), every):
        some = {each: every[each] for each in every if each in (*shown_by, "scored")}
        with FAULTS[name](), patched_scores(parity):
            try:
                parity.against_cpu(parity.compute(some, max_num_seqs=8))
            except AssertionError as error:
                return str(error)
    return None


class BentKernels:
    """Engines of which some kernels compute something else: those that are named at the time."""

    def __init__(self) -> None:
        self._ops: Collection[str] = ()

    @contextmanager
    def found(
        self, parity: Parity, longest: int | None = None
    ) -> Iterator[Callable[[Collection[str]], set[str]]]:
        """Which kernels the comparison finds wrong in an engine in which these are bent. One engine
        is built for all of them. It reuses no prefix, because an earlier kernel's fault is in its
        pages. Prompts are cut to the `longest`."""

        def wrong_with(ops: Collection[str]) -> set[str]:
            # Without adapters where a kernel is for steps that have none.
            owners = {"owners": (None,)} if set(ops) & set(OF_PLAIN_STEPS) else {}
            self._ops = ops
            record.forget()
            requests = made.few(**owners, count=3, max_tokens=2)
            run(loop, [replace(each, prompt=each.prompt[:longest]) for each in requests])
            return record.wrong_kernels()

        with (
            patched(checked, "checked_kernels", lambda make: lambda k, r: make(self._all(k), r)),
            parity.recorded(enable_prefix_caching=False, num_gpu_blocks_override=64) as (
                record,
                loop,
            ),
        ):
            yield wrong_with

    def _all(self, kernels: Kernels) -> Kernels:
        rooms: dict[str, dict[str, Any]] = {}
        for op in checked.RESULTS:
            room, _, name = op.partition(".")
            calls = rooms.setdefault(room, dict(vars(getattr(kernels, room))))
            calls[name] = self._either(op, calls[name])
        return replace(
            kernels,
            **{room: cast(ModuleType, SimpleNamespace(**calls)) for room, calls in rooms.items()},
        )

    def _either(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        wrong = bent(call)
        return lambda *args, **options: (wrong if op in self._ops else call)(*args, **options)


def bent(call: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that computes with a wrong first input: half of its last row is off, and half of
    some rows before it, since the last one may be padding."""

    def wrong(first: NormedRows | RopeTable, *rest: Any, **options: Any) -> Any:
        if isinstance(first, Fp8Rows):
            bent_values = None if first.values is None else first.values * 4
            scales = first.scales * 4
            return call(replace(first, scales=scales, values=bent_values), *rest, **options)
        if isinstance(first, DeferredRMSNorm):
            squares = first.squares.clone()
            squares[-1] *= 4
            return call(replace(first, squares=squares), *rest, **options)
        if isinstance(first, RopeTable):
            return call(replace(first, cos=first.cos + 4), *rest, **options)
        changed = first.clone(memory_format=torch.contiguous_format)
        rows = changed.view(-1, changed.shape[-1])
        for half in (rows[-1, ::2], rows[:-1:5, ::2]):
            # Tokens stay in the vocabulary, or the model would fail before it is compared.
            half.copy_(half + 4 if half.is_floating_point() else half.abs() // 2)
        given = call(changed, *rest, **options)
        if given is None:  # it changes its input in place
            first.copy_(changed)
        return given

    return wrong


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if a fault in the GPU's path is not found; else say how many were."""
    parity = Parity(folder, kind, dtype)
    said = {name: verdict(parity, name) for name in FAULTS}
    missed = [name for name, found in said.items() if found is None]
    assert not missed, f"not found: {', '.join(missed)}"
    return f"{len(said)} planted faults found"
