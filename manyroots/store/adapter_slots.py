"""Adapter weights on the device: a number of slots, each holding one adapter or nothing.

Takes an adapter's host copy and a slot; gives each step its `AdapterBatch`. A slot's memory is
what its adapter needs: its own ranks, only the products it changes, one allocation. A load builds
new memory and then puts it in the slot's place whole, so that nothing of the last owner can show.
Which adapter gets which slot, and when, is decided elsewhere (`lora`).

One thread computes steps while another loads; a lock keeps the two apart.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.ids import AdapterSlot
from manyroots.kernels.lora_sites.batch import AdapterBatch, Slots
from manyroots.kernels.lora_sites.stacks import Stacks, default_stack_bytes
from manyroots.kernels.lora_sites.weights import LowRank, Part, Site, SlotWeights
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart, SiteParts
from manyroots.store.adapter_weights import AdapterWeights, LoraPair

_ALIGNMENT_BYTES = 64
"""Where a tensor may begin in a slot's memory: a cache line, and enough for wide loads."""

_Found = list[tuple[SitePart, LoraPair]]
"""What an adapter has for the parts of one site."""


class AdapterSlots:
    """The adapters that steps may use now."""

    def __init__(
        self,
        parts: SiteParts,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_stack_bytes: int | None = None,
    ) -> None:
        """`parts` are the model's; see `Stacks` for the last, which has a default by device."""
        self._parts = parts
        self._dtype = dtype
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._weights: dict[int, SlotWeights] = {}
        limit = default_stack_bytes(device) if max_stack_bytes is None else max_stack_bytes
        self._stacks = Stacks(limit)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots now, without stacks."""
        with self._lock:
            return sum(weights.num_bytes for weights in self._weights.values())

    def load(self, slot: AdapterSlot, weights: AdapterWeights) -> None:
        """Put an adapter into a slot; when this returns, steps may use it."""
        self.clear(slot)
        if self._stream is None:
            loaded = self._build(weights)
        else:
            with torch.cuda.stream(self._stream):
                loaded = self._build(weights)
            self._stream.synchronize()
            # Made on this stream, used on the others: not to be reused before they are done.
            loaded.buffer.record_stream(torch.cuda.default_stream(self._device))
        with self._lock:
            self._weights[slot] = loaded

    def clear(self, slot: AdapterSlot) -> None:
        """Take what is in a slot off the device; nothing to do if it is empty."""
        with self._lock:
            weights = self._weights.pop(slot, None)
            if weights is not None:
                self._stacks.forget(weights)

    def batch(self, token_slots: Slots, *, all_layers: bool) -> AdapterBatch | None:
        """The adapters of tokens in these slots; None if all are the base model's.

        `all_layers`: whether these tokens pass the whole model, or its head alone.
        """
        stacks = self._stacks if all_layers else None
        with self._lock:
            try:
                return AdapterBatch.build(token_slots, self._weights, stacks, self._device)
            except KeyError as error:
                raise RuntimeError(f"a step uses adapter slot {error}, which is empty") from None

    def _build(self, weights: AdapterWeights) -> SlotWeights:
        unknown = sorted(set(weights.pairs) - set(self._parts))
        if unknown:
            raise RuntimeError(f"the adapter changes {unknown[0]}, which this model does not have")
        pairs = _on_device(weights, self._device)
        by_site: dict[LoraSite, _Found] = {}
        for name, part in self._parts.items():
            if name in pairs:
                by_site.setdefault(part.site, []).append((part, pairs[name]))
        memory = _Memory(pairs.values(), self._dtype, self._device)
        placed = {
            site: tuple(_place(alike, memory) for alike in _with_stackable_halves(found))
            for site, found in by_site.items()
        }
        # A masked or padded product with an infinite weight would spoil its neighbours.
        if not bool(torch.isfinite(memory.buffer).all()):
            raise AdapterError(
                f"the adapter's weights, scaled, are not all finite as {self._dtype}; use a "
                "--dtype with a wider range."
            )

        def of(kind: TargetKind) -> dict[Site, LowRank]:
            return {site: lows[0] for site, lows in placed.items() if site.kind is kind}

        return SlotWeights(
            linears=of(TargetKind.LINEAR),
            lookups=of(TargetKind.EMBEDDING),
            experts={s: lows for s, lows in placed.items() if s.kind is TargetKind.EXPERTS},
            rank=max((low.rank for lows in placed.values() for low in lows), default=0),
            buffer=memory.buffer,
        )


def _with_stackable_halves(found: _Found) -> list[_Found]:
    """All of a site together, but apart what experts share from what each has of its own."""
    if found[0][0].site.kind is not TargetKind.EXPERTS:
        return [found]
    by_count: dict[int, _Found] = {}
    for part, pair in found:
        by_count.setdefault(pair.a.shape[0], []).append((part, pair))
    return list(by_count.values())


def _place(found: _Found, memory: _Memory) -> LowRank:
    """Parts of one site, first halves stacked, second halves scaled."""
    site = found[0][0].site
    a = torch.cat([pair.a for _, pair in found], dim=-2) if len(found) > 1 else found[0][1].a
    parts, start = [], 0
    for part, pair in found:
        ranks = slice(start, start + pair.rank)
        parts.append(Part(ranks, part.columns, memory.take_b(pair)))
        start = ranks.stop
    return LowRank(memory.take(a), tuple(parts), site.out_features)


class _Memory:
    """One allocation for everything that an adapter has, handed out piece by piece."""

    def __init__(self, pairs: Iterable[LoraPair], dtype: torch.dtype, device: torch.device) -> None:
        self._step = _ALIGNMENT_BYTES // dtype.itemsize
        size = sum(self._round(half.numel()) for pair in pairs for half in (pair.a, pair.b))
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self._used = 0

    def take(self, tensor: Tensor) -> Tensor:
        """A copy, in the shape it has."""
        return self._cut(tuple(tensor.shape)).copy_(tensor)

    def take_b(self, pair: LoraPair) -> Tensor:
        """A second half [..., out, rank], scaled, as [..., rank, out]."""
        if self.buffer.device.type != "cpu":
            out_major = self._cut(tuple(pair.b.shape))
            return torch.mul(pair.b, pair.scaling, out=out_major).transpose(-1, -2)
        # A CPU's products are a third faster with it this way around.
        turned = pair.b.transpose(-1, -2)
        return torch.mul(turned, pair.scaling, out=self._cut(tuple(turned.shape)))

    def _cut(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        piece = self.buffer[self._used : self._used + size].view(shape)
        self._used += self._round(size)
        return piece

    def _round(self, size: int) -> int:
        return -(-size // self._step) * self._step


def _on_device(weights: AdapterWeights, device: torch.device) -> Mapping[str, LoraPair]:
    """The pairs where the device can read them; one copy of the flat buffer."""
    if weights.buffer.device == device:
        return weights.pairs
    moved = weights.buffer.to(device, non_blocking=True)
    origin = weights.buffer.storage_offset()

    def there(half: Tensor) -> Tensor:
        return moved.as_strided(half.shape, half.stride(), half.storage_offset() - origin)

    return {
        name: LoraPair(there(pair.a), there(pair.b), pair.scaling)
        for name, pair in weights.pairs.items()
    }


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none here
