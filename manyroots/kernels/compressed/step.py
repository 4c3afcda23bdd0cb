"""One step as layers that keep rows of tokens, or of groups of tokens, see it.

Made once per step and family by the memory; read by all of its layers. Says where rows of tokens
lie, which groups of tokens end in this step, and which tokens each sequence has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.latent.step import Int64s, LatentStep, PromptLens
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """A sequence's tokens of this step."""

    seq: int
    tokens: slice
    """Among all of the step's."""
    context_len: int
    """Up to and including the last of them."""

    def blocks(self, most: int) -> list[SequenceTokens]:
        """The same in order, at most so many tokens each."""
        first, last = self.tokens.start, self.tokens.stop
        ends = [min(last, begin + most) for begin in range(first, last, most)]
        return [
            SequenceTokens(self.seq, slice(begin, end), self.context_len - (last - end))
            for begin, end in zip(range(first, last, most), ends, strict=True)
        ]

    @property
    def num_before(self) -> int:
        """Tokens before the first of these."""
        count: int = self.tokens.stop - self.tokens.start
        return self.context_len - count


@dataclass(frozen=True, slots=True)
class ClosedGroups:
    """Groups whose last token is one of this step's."""

    tokens: Tensor
    """int64 [groups]: that token, among the step's."""
    sources: Tensor
    """int64 [groups, span]: where the rows of the tokens lie that an entry is made of, -1 for those
    before the sequence begins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsStep:
    """What the layers of one family read of a step. The tensors are those of `StepRows`; decoding
    sequences come first."""

    page_table: Tensor
    context_lens: Tensor
    num_decodes: int
    slot_mapping: SlotMapping
    page_size: int
    group: int
    """Tokens that a row stands for."""
    prompts: PromptLens | None

    @cached_property
    def sequences(self) -> tuple[SequenceTokens, ...]:
        """In order; asks the device for the lengths of those that decode."""
        lens = self._host_lens.tolist()
        ends = np.cumsum(self._counts).tolist()
        begins = [0, *ends[:-1]]
        return tuple(
            SequenceTokens(seq, slice(begin, end), length)
            for seq, (begin, end, length) in enumerate(zip(begins, ends, lens, strict=True))
        )

    @cached_property
    def _host_lens(self) -> Int64s:
        decodes = self.context_lens[: self.num_decodes].cpu().numpy().astype(np.int64)
        prompts = self.prompts
        return decodes if prompts is None else np.concatenate((decodes, prompts.context_lens))

    @cached_property
    def _counts(self) -> Int64s:
        ones = np.ones(self.num_decodes, np.int64)
        prompts = self.prompts
        return ones if prompts is None else np.concatenate((ones, prompts.num_queries))

    @cached_property
    def _host_seqs(self) -> Int64s:
        """Each token's sequence."""
        return np.arange(len(self._counts)).repeat(self._counts)

    @cached_property
    def _host_positions(self) -> Int64s:
        last = np.cumsum(self._counts).repeat(self._counts)
        before_last = last - 1 - np.arange(len(last))
        positions: Int64s = self._host_lens.repeat(self._counts) - 1 - before_last
        return positions

    def slots(self, seqs: Tensor, positions: Tensor) -> Tensor:
        """int64: where rows lie, counted over all pages: of the tokens at `positions`, or of their
        groups."""
        size = self.page_size
        pages = self.page_table[seqs, positions // size].long()
        return pages * (size // self.group) + positions % size // self.group

    def rows_of(self, seq: int, first: int, last: int) -> Tensor:
        """int64: where the rows lie that a sequence has from one number to another."""
        positions = torch.arange(first, last, device=self.page_table.device) * self.group
        return self.slots(torch.full_like(positions, seq), positions)

    def may_exceed(self, count: int) -> bool:
        """Whether a token may see more tokens than these. A GPU is not asked for the lengths of
        sequences that decode: what their pages could hold counts."""
        prompts = self.prompts
        if prompts is not None and bool((prompts.context_lens > count).any()):
            return True
        if not self.num_decodes:
            return False
        if self.page_table.is_cuda:
            return self.page_table.shape[1] * self.page_size > count
        return bool((self.context_lens[: self.num_decodes] > count).any())

    @cached_property
    def token_seqs(self) -> Tensor:
        """int64 [tokens]: each token's sequence."""
        device = self.page_table.device
        if self.prompts is None:
            return torch.arange(self.num_decodes, device=device)
        return _on(device, self._host_seqs)

    def query_blocks(self, most: int) -> Tensor:
        """int32 [blocks, 2]: the first token, and the one after the last, of blocks of at most
        `most` tokens, none of two sequences. Made on the host."""
        found = self._query_blocks.get(most)
        if found is None:
            ends = np.cumsum(self._counts)
            begins = [
                np.arange(end - count, end, most)
                for end, count in zip(ends.tolist(), self._counts.tolist(), strict=True)
            ]
            first = np.concatenate(begins)
            last = np.minimum(first + most, ends.repeat([len(one) for one in begins]))
            blocks = np.stack((first, last), axis=1).astype(np.int32)
            found = _on(self.page_table.device, blocks)
            self._query_blocks[most] = found
        return found

    @cached_property
    def _query_blocks(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def token_lens(self) -> Tensor:
        """int32 [tokens]: how many tokens each token sees, itself included."""
        lens, prompts = self.context_lens, self.prompts
        if prompts is None:
            return lens[: self.num_decodes]
        before_last = np.cumsum(self._counts).repeat(self._counts) - 1
        before_last = (before_last - np.arange(len(before_last))).astype(np.int32)
        return lens[self.token_seqs] - _on(lens.device, before_last)

    @cached_property
    def most_rows(self) -> int:
        """Rows that a sequence has at most. A GPU is not asked for the lengths of sequences that
        decode: what their pages could hold counts."""
        if self.num_decodes and self.page_table.is_cuda:
            return self.page_table.shape[1] * self.page_size // self.group
        return int(self._host_lens.max(initial=0)) // self.group

    def slots_chosen(self, numbers: Tensor) -> Tensor:
        """int64 [tokens, most]: where the rows lie that each token chose by number; -1 for none."""
        seqs = self.token_seqs[:, None].expand_as(numbers)
        slots = self.slots(seqs, numbers.clamp(min=0) * self.group)
        return torch.where(numbers < 0, -1, slots)

    def closed(self, size: int, span: int) -> ClosedGroups:
        """Groups of `size` tokens that end in this step, each entry made of `span` tokens. Of a
        family that has a row for each token."""
        key = (size, span)
        if key not in self._closed:
            tokens = np.flatnonzero((self._host_positions + 1) % size == 0)
            device = self.page_table.device
            places = self._host_positions[tokens, None] + np.arange(1 - span, 1)
            at = torch.from_numpy(places).to(device)
            seqs = torch.from_numpy(self._host_seqs[tokens, None]).to(device).expand_as(at)
            slots = self.slots(seqs, at.clamp(min=0))
            sources = torch.where(at < 0, -1, slots)
            self._closed[key] = ClosedGroups(torch.from_numpy(tokens).to(device), sources)
        return self._closed[key]

    @cached_property
    def _closed(self) -> dict[tuple[int, int], ClosedGroups]:
        return {}


def _on(device: torch.device, numbers: npt.NDArray[np.integer[Any]]) -> Tensor:
    """A copy that the host does not wait for: it would wait for all kernels before it."""
    made = torch.from_numpy(numbers)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """What layers of latent attention read of a step if queries choose the tokens that they see."""

    latents: LatentStep
    rows: RowsStep
