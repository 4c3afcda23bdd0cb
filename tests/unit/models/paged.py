"""Sequences that live in pages: the smallest thing that can drive a model step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.attention.batch import AttentionBatch
from manyroots.models.llama import Llama
from manyroots.store.adapter_slots import AdapterSlots
from manyroots.store.arena import PageArena


class PagedModel:
    """A model with an arena; sequences take pages in shuffled order as they grow."""

    def __init__(
        self,
        model: Llama,
        slots: AdapterSlots | None = None,
        *,
        num_pages: int = 200,
        page_size: int = 4,
    ) -> None:
        spec = model.spec
        weight = model.embedding.weight
        self.model = model
        self.page_size = page_size
        self.arena = PageArena(
            num_pages,
            page_size,
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            weight.dtype,
            weight.device,
        )
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self.slots = slots
        self.slot_of: dict[str, int] = {}
        """The adapter of each sequence that has one."""
        self.adapter_from: dict[str, int] = {}

    def step(self, new_tokens: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of some sequences together; logits [num_tokens, vocab] each."""
        order = sorted(
            new_tokens,
            key=lambda name: (len(new_tokens[name]) != 1, self.slot_of.get(name, NO_ADAPTER)),
        )
        token_slots = np.array(
            [
                slot if position >= self.adapter_from.get(name, 0) else NO_ADAPTER
                for name in order
                for slot in [self.slot_of.get(name, NO_ADAPTER)]
                for position in range(
                    self._lengths.get(name, 0), self._lengths.get(name, 0) + len(new_tokens[name])
                )
            ]
        )
        adapters = None if self.slots is None else self.slots.batch(token_slots, all_layers=True)
        starts, positions, pages, offsets = [0], [], [], []
        for name in order:
            begin = self._lengths.get(name, 0)
            end = begin + len(new_tokens[name])
            table = self._pages.setdefault(name, [])
            while len(table) * self.page_size < end:
                table.append(self._free.pop())
            self._lengths[name] = end
            starts.append(starts[-1] + end - begin)
            for position in range(begin, end):
                positions.append(position)
                pages.append(table[position // self.page_size])
                offsets.append(position % self.page_size)
        width = max(len(self._pages[name]) for name in order)
        table_array = np.zeros((len(order), width), dtype=np.int32)
        for row, name in enumerate(order):
            table_array[row, : len(self._pages[name])] = self._pages[name]
        batch = AttentionBatch.build(
            page_table=table_array,
            slot_pages=np.array(pages),
            slot_offsets=np.array(offsets),
            query_starts=starts,
            context_lens=[self._lengths[name] for name in order],
            num_decodes=sum(len(new_tokens[name]) == 1 for name in order),
            page_size=self.page_size,
            dtype=self.arena.data.dtype,
            device=self.arena.data.device,
        )
        device = self.arena.data.device
        tokens = torch.tensor([t for name in order for t in new_tokens[name]], device=device)
        hidden = self.model.forward(
            tokens, torch.tensor(positions, device=device), batch, self.arena, adapters
        )
        logits = self.model.logits(hidden, adapters)
        return {name: logits[starts[row] : starts[row + 1]].cpu() for row, name in enumerate(order)}
