"""One step for layers of latent attention: which tokens attend to latents, and which to expanded
keys.

A prompt's tokens have two options. They attend to latents as separate rows, like decoding tokens,
or to keys and values that are expanded from latents in bounded pieces. A layer chooses. The inputs
of either are made once per step, by the first layer that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from manyroots.kernels.host_copy import copied_together
from manyroots.kernels.latent.inputs import KeyPiece
from manyroots.kernels.lora_ops.sites import LoraRows
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping

MAX_KEYS = 10_240
"""Most tokens with expanded keys and values at once: with 128 heads of 192 and 128, 800 MiB. More
than a step has by default, because prompts that began in the step before have more keys than
queries."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptLens:
    """Sequences that do not decode, on the host."""

    num_queries: Int64s
    context_lens: Int64s
    """Tokens that the last query sees, itself included."""

    @property
    def num_seen(self) -> int:
        """Pairs of a query and a key, ignoring the causal order."""
        return int((self.num_queries * self.context_lens).sum())


@dataclass(frozen=True, slots=True)
class ExpandedPiece:
    """Keys of some prompts, and the queries that attend to them."""

    tokens: slice
    """Indexes into the tokens of prompts."""
    slots: Tensor
    """int64 [keys]: addresses of the latents, page * page_size + offset."""
    piece: KeyPiece
    key_tokens: Int64s
    """[keys]: index of a token of the same sequence in the step."""


class LatentStep:
    """The inputs of one family's layers in a step."""

    def __init__(
        self,
        *,
        page_table: Tensor,
        context_lens: Tensor,
        num_decodes: int,
        slot_mapping: SlotMapping,
        page_size: int,
        prompts: PromptLens | None,
    ) -> None:
        """The tensors are those of `StepRows`; decoding sequences come first."""
        self.slot_mapping, self.prompts = slot_mapping, prompts
        self._table, self._lens = page_table, context_lens
        self._num_decodes, self._page_size = num_decodes, page_size
        self._lora: LoraRows | None = None
        self._decode_lora: LoraRows | None = None
        self._key_lora: list[LoraRows | None] = []

    @property
    def decodes(self) -> tuple[Tensor, Tensor]:
        """The page table and lengths of decoding rows."""
        return self._table[: self._num_decodes], self._lens[: self._num_decodes]

    @property
    def num_decodes(self) -> int:
        return self._num_decodes

    @cached_property
    def every_row(self) -> tuple[Tensor, Tensor]:
        """The same with a row for each token."""
        if self.prompts is None:
            return self.decodes
        counts = np.concatenate((np.ones(self._num_decodes, np.int64), self.prompts.num_queries))
        last = np.cumsum(counts).repeat(counts)
        seqs = np.arange(len(counts)).repeat(counts)
        rows, after = self._copied(seqs, last - 1 - np.arange(len(last)))
        return self._table[rows], self._lens[rows] - after

    @cached_property
    def pieces(self) -> tuple[ExpandedPiece, ...]:
        """All keys that prompts see, in pieces of at most MAX_KEYS. Only sequences with more keys
        are divided; each piece of one has the keys of no other sequence. So the pieces that some
        token attends to are neighbours, and all are of the same tokens."""
        return tuple(self._pieces())

    def _pieces(self) -> Iterator[ExpandedPiece]:
        assert self.prompts is not None
        queries, contexts = self.prompts.num_queries, self.prompts.context_lens
        parts: list[tuple[int, int, int]] = []
        room = MAX_KEYS
        for seq, length in enumerate(contexts.tolist()):
            if parts and length > room:
                yield self._piece(parts, queries, contexts)
                parts, room = [], MAX_KEYS
            if length <= room:
                parts.append((seq, 0, length))
                room -= length
                continue
            for first in range(0, length, MAX_KEYS):
                last = min(length, first + MAX_KEYS)
                yield self._piece([(seq, first, last)], queries, contexts)
        if parts:
            yield self._piece(parts, queries, contexts)

    def _piece(
        self, parts: list[tuple[int, int, int]], queries: Int64s, contexts: Int64s
    ) -> ExpandedPiece:
        """A piece of keys between two positions of neighbouring sequences."""
        seqs, firsts, lasts = (np.array(numbers) for numbers in zip(*parts, strict=True))
        starts = np.concatenate(([0], np.cumsum(queries)))
        counts, own = lasts - firsts, queries[seqs]
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
        size = self._page_size
        query_starts, key_starts, first_seen, rows, columns, offsets = self._copied(
            np.concatenate(([0], np.cumsum(own))),
            np.concatenate(([0], np.cumsum(counts))),
            contexts[seqs] - own - firsts,
            np.repeat(self._num_decodes + seqs, counts),
            places // size,
            places % size,
        )
        slots = self._table[rows, columns].long() * size + offsets
        return ExpandedPiece(
            tokens=slice(int(starts[seqs[0]]), int(starts[seqs[-1] + 1])),
            slots=slots,
            piece=KeyPiece(query_starts, key_starts, first_seen, int(own.max())),
            key_tokens=np.repeat(self._num_decodes + starts[seqs], counts),
        )

    def _copied(self, *arrays: Int64s) -> list[Tensor]:
        return copied_together([array.astype(np.int32) for array in arrays], self._table.device)

    def lora_of_decodes(self, lora: LoraRows | None) -> LoraRows | None:
        """The adapters of decoding rows, taken from those of all tokens."""
        return None if lora is None else self._adapters(lora)[0]

    def lora_of_keys(self, lora: LoraRows | None, place: int) -> LoraRows | None:
        """The adapters of a piece's keys: those of the sequences that see them."""
        return None if lora is None else self._adapters(lora)[1][place]

    def _adapters(self, lora: LoraRows) -> tuple[LoraRows | None, list[LoraRows | None]]:
        if self._lora is not lora:
            self._lora = lora
            self._decode_lora = lora.of(np.arange(self._num_decodes)) if self._num_decodes else None
            self._key_lora = [lora.of(piece.key_tokens) for piece in self.pieces]
        return self._decode_lora, self._key_lora
