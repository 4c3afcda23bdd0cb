"""Sequences that live in pages: the smallest thing that can drive a model step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.attention.paged import query_blocks
from manyroots.kernels.latent.step import PromptLens
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.layers.memories import StepRows
from manyroots.layers.step import LogitsIndices, Step
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_pool import AdapterPool

MAX_LEN = 4096


class PagedModel:
    """A model with an arena for each family. Sequences take pages in shuffled order as they grow,
    and give back those that a window has left. Pages given back become NaN, so that a late read is
    noticed."""

    def __init__(
        self,
        model: Decoder,
        pool: AdapterPool | None = None,
        *,
        num_pages: int = 200,
        page_size: int = 4,
        only_last: bool = False,
    ) -> None:
        """`only_last`: steps give the logits of each sequence's last token alone."""
        self._only_last = only_last
        self.model = model
        self.page_size = page_size
        self.arenas = [
            family.make_arena(num_pages, page_size, model.dtype, model.device)
            for family in model.families
        ]
        for arena in self.arenas[model.num_paged :]:
            arena.data.fill_(255)  # NaN: a row without earlier tokens must not read it
        model.attach(self.arenas, pool, max_len=MAX_LEN)
        order = np.random.default_rng(0).permutation(num_pages).tolist()
        self._free = [list(order) for _ in self.arenas]
        self._tables: list[dict[str, list[int]]] = [{} for _ in self.arenas]
        self._lengths: dict[str, int] = {}
        self.pool = pool
        self.slot_of: dict[str, int] = {}
        """The adapter of each sequence that has one."""
        self.adapter_from: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, new_tokens: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of some sequences together; logits [num_tokens, vocab] each."""
        order = sorted(
            new_tokens,
            key=lambda name: (len(new_tokens[name]) != 1, self.slot_of.get(name, NO_ADAPTER)),
        )
        begins = [self._lengths.get(name, 0) for name in order]
        counts = [len(new_tokens[name]) for name in order]
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        positions = [p for begin, end in zip(begins, ends, strict=True) for p in range(begin, end)]
        owners = [name for name, count in zip(order, counts, strict=True) for _ in range(count)]
        self._lengths.update(zip(order, ends, strict=True))
        model, device = self.model, self.model.device
        lora, slots = None, [NO_ADAPTER] * len(positions)
        if self.pool is not None:
            slots = [
                self.slot_of.get(name, NO_ADAPTER)
                if position >= self.adapter_from.get(name, 0)
                else NO_ADAPTER
                for name, position in zip(owners, positions, strict=True)
            ]
            lora = self._lora(np.array(slots, np.int64))
        at = torch.tensor(positions, device=device)
        logits_indices = None
        if self._only_last:
            last = np.cumsum(counts) - 1
            own = np.array(slots, np.int64)[last]
            lora_of_last = None if lora is None else self._lora(own)
            logits_indices = LogitsIndices(torch.tensor(last, device=device), lora_of_last)
            counts = [1] * len(order)
        step = Step(
            ropes=tuple(
                model.kernels.qk_rope_kv_write.look_up(rope, at, model.dtype)
                for rope in model.ropes
            ),
            memories=self._prepared(order, begins, ends, owners, positions),
            lora=lora,
            logits_indices=logits_indices,
        )
        tokens = torch.tensor([t for name in order for t in new_tokens[name]], device=device)
        of_head = lora if logits_indices is None else logits_indices.lora
        logits = model.logits(model.hidden(tokens, step), of_head).float()
        self._give_back(order)
        pieces = torch.split(logits.cpu(), counts)
        return dict(zip(order, pieces, strict=True))

    def _lora(self, slots: np.ndarray) -> LoraRows | None:
        rows: LoraRows | None = self.model.kernels.lora_ops.prepare(
            slots, self.pool, self.model.device
        )
        return rows

    def _prepared(
        self,
        order: list[str],
        begins: list[int],
        ends: list[int],
        owners: list[str],
        positions: list[int],
    ) -> tuple[Any, ...]:
        """What each family's memory prepares of the step."""
        model, size = self.model, self.page_size
        lens = np.array(ends, np.int64)
        counts = lens - np.array(begins, np.int64)
        num_decodes = int((counts == 1).sum())
        starts = num_decodes + np.concatenate(([0], np.cumsum(counts[num_decodes:])))
        has_prompts = num_decodes < len(order)
        blocks = query_blocks(starts.tolist(), lens[num_decodes:].tolist())
        tables = [self._table(family, order, ends) for family in range(model.num_paged)]
        pages = [
            [own[name][p // size] for name, p in zip(owners, positions, strict=True)]
            for own in self._tables[: model.num_paged]
        ]
        units = [
            [own.setdefault(name, [free.pop()])[0] for name in order]
            for own, free in zip(
                self._tables[model.num_paged :], self._free[model.num_paged :], strict=True
            )
        ]

        def there(values: object) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=model.device)

        rows = StepRows(
            page_tables=there(tables),
            pages=there(pages),
            offsets=there([p % size for p in positions]),
            units=there(units) if units else None,
            context_lens=there(lens),
            num_decodes=num_decodes,
            query_starts=there(starts) if has_prompts else None,
            blocks=there(blocks) if has_prompts else None,
            order=None,
            shared=None,
            runs=None,
            max_chunk=int(counts.max()),
            page_size=size,
            is_padded=False,
            prompt_lens=(
                PromptLens(counts[num_decodes:], lens[num_decodes:]) if has_prompts else None
            ),
        )
        return tuple(
            family.memory.prepare(
                rows, place - model.num_paged * family.is_state, model.kernels, model.dtype
            )
            for place, family in enumerate(model.families)
        )

    def _table(self, family: int, order: list[str], ends: list[int]) -> np.ndarray:
        """The pages of sequences that have grown so long; as wide as the longest."""
        tables, free, size = self._tables[family], self._free[family], self.page_size
        for name, end in zip(order, ends, strict=True):
            table = tables.setdefault(name, [])
            while len(table) * size < end:
                table.append(free.pop())
        width = max(len(tables[name]) for name in order)
        found = np.zeros((len(order), width), np.int32)
        for row, name in enumerate(order):
            found[row, : len(tables[name])] = tables[name]
        return found

    def _give_back(self, order: list[str]) -> None:
        for family, arena in zip(self.model.families, self.arenas, strict=True):
            window = family.window
            if window is None:
                continue
            number = self.model.families.index(family)
            for name in order:
                table = self._tables[number][name]
                # The next token sees the last window - 1 of those that there are.
                first = max(0, self._lengths[name] - (window - 1)) // self.page_size
                arena.data[table[:first]] = torch.nan
