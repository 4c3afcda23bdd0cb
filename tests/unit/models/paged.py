"""Sequences that live in pages: the smallest thing that can drive a model step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.attention.paged import AttentionMetadata, query_blocks
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.kernels.recurrent.rows import StateRows
from manyroots.layers.step import LogitsIndices, Step
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_pool import AdapterPool

MAX_LEN = 4096


class PagedModel:
    """A model with an arena for each family. Sequences take pages in shuffled order as they grow,
    and give back those that lie behind a window; what is given back is made NaN, so that whoever
    reads it still is seen to do so."""

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
            arena.data.fill_(255)  # NaN: who has no tokens before has no state, whatever is there
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
            memories=tuple(
                model.kernels.attention.prepare(
                    self._rows(family, order, begins, ends, owners, positions),
                    self.page_size,
                    model.dtype,
                )
                for family in range(model.num_paged)
            )
            + tuple(
                self._states(family, order, begins, ends)
                for family in range(model.num_paged, len(self.arenas))
            ),
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

    def _states(
        self, family: int, order: list[str], begins: list[int], ends: list[int]
    ) -> StateRows:
        tables, free = self._tables[family], self._free[family]
        units = [tables.setdefault(name, [free.pop()])[0] for name in order]
        counts = np.array(ends) - np.array(begins)
        num_decodes = int((counts == 1).sum())
        starts = num_decodes + np.concatenate(([0], np.cumsum(counts[num_decodes:])))

        def there(values: object) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.model.device)

        rows: StateRows = self.model.kernels.recurrent.prepare(
            there(units), there(ends), there(starts) if num_decodes < len(order) else None,
            num_decodes, int(counts.max()),
        )  # fmt: skip
        return rows

    def _rows(
        self,
        family: int,
        order: list[str],
        begins: list[int],
        ends: list[int],
        owners: list[str],
        positions: list[int],
    ) -> AttentionMetadata:
        tables, free, size = self._tables[family], self._free[family], self.page_size
        for name, end in zip(order, ends, strict=True):
            table = tables.setdefault(name, [])
            while len(table) * size < end:
                table.append(free.pop())
        width = max(len(tables[name]) for name in order)
        table_array = np.zeros((len(order), width), np.int32)
        for row, name in enumerate(order):
            table_array[row, : len(tables[name])] = tables[name]
        pages = [tables[name][p // size] for name, p in zip(owners, positions, strict=True)]
        lens = np.array(ends, np.int32)
        counts = lens - np.array(begins, np.int32)
        num_decodes = int((counts == 1).sum())
        starts = num_decodes + np.concatenate(([0], np.cumsum(counts[num_decodes:])))
        starts = starts.astype(np.int32)
        has_prompts = num_decodes < len(order)
        blocks = query_blocks(starts.tolist(), lens[num_decodes:].tolist())

        def there(values: object) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.model.device)

        return AttentionMetadata(
            page_table=there(table_array),
            context_lens=there(lens),
            num_decodes=num_decodes,
            query_starts=there(starts) if has_prompts else None,
            blocks=there(blocks) if has_prompts else None,
            slot_mapping=SlotMapping(there(pages), there([p % size for p in positions])),
            window=self.model.families[family].window or 0,
        )

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
