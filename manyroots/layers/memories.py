"""The kinds of memory that mixers have of earlier tokens, with everything that depends on the kind.

A kind defines the bytes of a unit, makes the arena that holds units, and prepares a step for its
layers. Mixers with equal memories are one family: their units are allocated and freed together.
There are two sorts of units: a page holds some tokens of a sequence, a state summarises all of
them. A new kind is a class here, with kernels that read its prepared step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from manyroots.errors import ConfigError
from manyroots.kernels.attention.paged import AttentionMetadata, SharedPrefixes, TokenRuns
from manyroots.kernels.choice import Kernels
from manyroots.kernels.compressed.step import ChosenStep, RowsStep
from manyroots.kernels.latent.inputs import row_bytes
from manyroots.kernels.latent.step import LatentStep, PromptLens
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.store.arena import (
    Arena,
    PageArena,
    PagePartsArena,
    PartShape,
    StateArena,
    state_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One step's sequences for memories: tensors on the device, decoding sequences first. A first
    dimension of families counts only families of one sort, pages or states."""

    page_tables: Tensor
    """int32 [families of pages, num_seqs, max_pages]"""
    pages: Tensor
    """int32 [families of pages, num_tokens]: the page of each token."""
    offsets: Tensor
    """int32 [num_tokens]: the token's offset in the page."""
    units: Tensor | None
    """int32 [families of states, num_seqs]; None if there are none."""
    context_lens: Tensor
    num_decodes: int
    query_starts: Tensor | None
    blocks: Tensor | None
    order: Tensor | None
    """These five as in `AttentionMetadata`."""
    shared: tuple[Tensor, Tensor, Tensor] | None
    """Prefixes that decoding rows share: the fields of `SharedPrefixes`, by family of pages."""
    runs: TokenRuns | None
    """As in `AttentionMetadata`."""
    max_chunk: int
    """The most tokens of one sequence."""
    page_size: int
    is_padded: bool
    prompt_lens: PromptLens | None
    """Lengths of sequences that do not decode, on the host; None if there are none, or in a
    captured step."""


class Memory(Protocol):
    """The interface of every kind. Kinds are frozen and compared by value."""

    @property
    def is_paged(self) -> bool:
        """Whether units are pages, in which each token has its own slot. A prompt's tokens may then
        be computed as parallel rows. Otherwise a unit is the state of a sequence."""

    @property
    def may_pad_prompts(self) -> bool:
        """Whether layers can compute a step with prompts if the host knows only its size."""

    @property
    def window(self) -> int | None:
        """The most tokens that a query sees, including its own; None: all before it."""

    def in_dtype(self, dtype: str) -> Memory:
        """The same with tokens stored in torch's `dtype`, if it stores tokens."""

    def unit_bytes(self, page_size: int, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes of one unit in this many layers of a model of this dtype."""

    def units_read(self, context: float) -> float:
        """The units that a decode step with this context reads and writes: one per token, or
        states."""

    def make_arena(
        self,
        num_units: int,
        page_size: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Arena:
        """Memory for this many units."""

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        """The input of the family's layers in a step, made once; `place`: the family's index in its
        sort."""


class _Paged(ABC):
    """What kinds have in common whose units are pages."""

    __slots__ = ()
    is_paged: ClassVar[bool] = True

    @abstractmethod
    def parts(self, page_size: int, dtype: torch.dtype) -> tuple[PartShape, ...]:
        """The tensors of a layer's part of a page; layers see each as `[num_pages, *shape]`."""

    def unit_bytes(self, page_size: int, num_layers: int, dtype: torch.dtype) -> int:
        parts = self.parts(page_size, dtype)
        if len(parts) > 1:
            return state_bytes(parts, num_layers)
        return num_layers * math.prod(parts[0].shape) * parts[0].dtype.itemsize

    def make_arena(
        self,
        num_units: int,
        page_size: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Arena:
        parts = self.parts(page_size, dtype)
        if len(parts) > 1:
            return PagePartsArena(num_units, parts, num_layers, device)
        [part] = parts
        return PageArena(num_units, page_size, num_layers, part.shape, part.dtype, device)


@dataclass(frozen=True, slots=True)
class KV(_Paged):
    """Keys and values of the tokens that a query may see."""

    may_pad_prompts: ClassVar[bool] = True

    kv_heads: int
    head_dim: int
    window: int | None
    """The most tokens that a query sees, including its own; None: all before it."""
    dtype: str | None = None
    """Torch's name of the stored dtype; None: the model's own."""

    def in_dtype(self, dtype: str) -> KV:
        return KV(self.kv_heads, self.head_dim, self.window, dtype)

    def parts(self, page_size: int, dtype: torch.dtype) -> tuple[PartShape, ...]:
        """2 is keys, values."""
        shape = (2, page_size, self.kv_heads, self.head_dim)
        return (PartShape(shape, kept_in(self.dtype, dtype)),)

    def units_read(self, context: float) -> float:
        return min(context, self.window or context)

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        shared = None
        if rows.shared is not None and self.window is None:
            lens, members, blocks = rows.shared
            shared = SharedPrefixes(lens[place], members[place], blocks[place])
        metadata = AttentionMetadata(
            page_table=rows.page_tables[place],
            context_lens=rows.context_lens,
            num_decodes=rows.num_decodes,
            query_starts=rows.query_starts,
            blocks=rows.blocks,
            slot_mapping=SlotMapping(rows.pages[place], rows.offsets),
            window=self.window or 0,
            shared=shared,
            runs=rows.runs,
            order=rows.order,
            is_padded=rows.is_padded,
        )
        return kernels.attention.prepare(metadata, rows.page_size, dtype)


@dataclass(frozen=True, slots=True)
class Latent(_Paged):
    """One latent and one rotated part per token, which all heads share (MLA); and a key by which
    queries choose tokens, if there is an index."""

    may_pad_prompts: ClassVar[bool] = False
    """Prompts are split by their lengths."""
    window: ClassVar[None] = None

    latent: int
    rope: int
    """Sizes of the two parts."""
    dtype: str | None = None
    """Torch's name of the stored dtype; None: the model's own. The index's keys have the latter."""
    index: int = 0
    """Numbers of the index's key; 0: there is none."""
    num_chosen: int | None = None
    """Tokens that a query sees at most; None: all before it."""

    def in_dtype(self, dtype: str) -> Latent:
        return replace(self, dtype=dtype)

    def parts(self, page_size: int, dtype: torch.dtype) -> tuple[PartShape, ...]:
        """In FP8 bytes, including scales. With an index also its keys."""
        kept, width = kept_in(self.dtype, dtype), self.latent + self.rope
        width, kept = (row_bytes(width), torch.uint8) if kept.itemsize == 1 else (width, kept)
        latents = PartShape((page_size, width), kept)
        if not self.index:
            return (latents,)
        return latents, PartShape((page_size, self.index), dtype)

    def units_read(self, context: float) -> float:
        if self.num_chosen is None:
            return context
        index = self.index / (self.index + self.latent + self.rope)
        return context * index + min(context, self.num_chosen) * (1.0 - index)

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        given: dict[str, Any] = {
            "page_table": rows.page_tables[place],
            "context_lens": rows.context_lens,
            "num_decodes": rows.num_decodes,
            "slot_mapping": SlotMapping(rows.pages[place], rows.offsets),
            "page_size": rows.page_size,
            "prompts": rows.prompt_lens,
        }
        latents = LatentStep(**given)
        if self.num_chosen is None:
            return latents
        return ChosenStep(latents, RowsStep(**given, group=1))


@dataclass(frozen=True, slots=True)
class TokenRows(_Paged):
    """One row of numbers for each token, or for each group of tokens that was compressed.

    A row of a group lies in the page of the group's last token. Groups never cross pages."""

    may_pad_prompts: ClassVar[bool] = False
    """Groups end where positions say, which the host knows."""

    width: int
    """Numbers of a row."""
    window: int | None
    """How many tokens a query sees at most, itself included; None: all before it."""
    group: int = 1
    """Tokens that a row stands for."""
    index_width: int = 0
    """Numbers of a row by which queries choose rows."""
    num_chosen: int | None = None
    """Rows that a query chooses at most; None: all."""
    read_every: int = 1
    """Tokens of which one alone reads rows: the last one of a group."""

    def in_dtype(self, dtype: str) -> TokenRows:
        raise ConfigError(
            "--kv-cache-dtype is fp8, and this model's layers keep compressed groups of tokens, "
            "which this version keeps in the model's dtype alone. Leave it at auto."
        )

    def parts(self, page_size: int, dtype: torch.dtype) -> tuple[PartShape, ...]:
        return (PartShape((page_size // self.group, self.width), dtype),)

    def unit_bytes(self, page_size: int, num_layers: int, dtype: torch.dtype) -> int:
        """If a page is smaller than a group: a share of the group's row."""
        return num_layers * page_size * self.width * dtype.itemsize // self.group

    def units_read(self, context: float) -> float:
        seen = min(context, self.window or context)
        if self.num_chosen is None:
            return seen / self.read_every
        index = self.index_width / self.width
        return seen * index + min(seen, self.num_chosen * self.group) * (1.0 - index)

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        return RowsStep(
            page_table=rows.page_tables[place],
            context_lens=rows.context_lens,
            num_decodes=rows.num_decodes,
            slot_mapping=SlotMapping(rows.pages[place], rows.offsets),
            page_size=rows.page_size,
            group=self.group,
            prompts=rows.prompt_lens,
        )


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    """Torch's name of the dtype; None: the model's own."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """One state that summarises all tokens so far."""

    is_paged: ClassVar[bool] = False
    may_pad_prompts: ClassVar[bool] = False
    window: ClassVar[None] = None

    parts: tuple[StatePart, ...]

    def in_dtype(self, dtype: str) -> StateMemory:
        return self

    def unit_bytes(self, page_size: int, num_layers: int, dtype: torch.dtype) -> int:
        return state_bytes(self._shapes(dtype), num_layers)

    def units_read(self, context: float) -> float:
        return 2.0  # read and written

    def make_arena(
        self,
        num_units: int,
        page_size: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Arena:
        """Layers see a view `[num_units + 1, *shape]` of each part."""
        return StateArena(num_units, self._shapes(dtype), num_layers, device)

    def prepare(self, rows: StepRows, place: int, kernels: Kernels, dtype: torch.dtype) -> Any:
        assert rows.units is not None, "a plan has a state for each sequence"
        return kernels.recurrent.prepare(
            rows.units[place],
            rows.context_lens,
            rows.query_starts,
            rows.num_decodes,
            rows.max_chunk,
        )

    def _shapes(self, dtype: torch.dtype) -> tuple[PartShape, ...]:
        return tuple(PartShape(part.shape, kept_in(part.dtype, dtype)) for part in self.parts)


def kept_in(name: str | None, dtype: torch.dtype) -> torch.dtype:
    """Torch's dtype of that name; None: the model's own."""
    kept: torch.dtype = dtype if name is None else getattr(torch, name)
    return kept
