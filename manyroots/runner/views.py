"""A step's arrays on the device, by field: what the model reads of a packet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import Tensor

from manyroots.kernels.attention.paged import TokenRuns
from manyroots.kernels.lora_ops.sites import LoraRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepViews:
    """What `step_arrays.py` and `mixed.py` name; None: the step has no such array."""

    tokens: Tensor
    """int64 [num_tokens]; PENDING where the newest token of the row is meant."""
    token_rows: Tensor
    positions: Tensor
    pages: Tensor
    """int32 [families of pages, num_tokens]"""
    offsets: Tensor
    lens: Tensor
    """int32 [num_seqs]: tokens that a sequence's last token sees, itself included."""
    units: Tensor | None = None
    """int32 [families of states, num_seqs]"""
    rows: Tensor | None = None
    """int64 [num_seqs]; None: each token is a sequence of its own, in the same order."""
    starts: Tensor | None = None
    blocks: Tensor | None = None
    order: Tensor | None = None
    """As in `AttentionMetadata`."""
    shared_lens: Tensor | None = None
    shared_members: Tensor | None = None
    shared_blocks: Tensor | None = None
    """The fields of `SharedPrefixes`, by family of pages."""
    run_starts: Tensor | None = None
    num_runs: Tensor | None = None
    """The fields of `TokenRuns`."""
    sampled_at: Tensor | None = None
    """Tokens after which something is sampled; None: after all."""
    adapter_slots: Tensor | None = None
    adapter_blocks: Tensor | None = None
    num_adapter_blocks: Tensor | None = None
    head_adapter_slots: Tensor | None = None
    head_adapter_blocks: Tensor | None = None
    head_num_adapter_blocks: Tensor | None = None
    """Of all tokens, and of those that are sampled."""

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> StepViews:
        """From a packet's views; those of the sampler are among them."""
        return cls(**{name: named[name] for name in _FIELDS if name in named})

    @property
    def shared(self) -> tuple[Tensor, Tensor, Tensor] | None:
        lens, members, blocks = self.shared_lens, self.shared_members, self.shared_blocks
        if lens is None or members is None or blocks is None:
            return None
        return lens, members, blocks

    @property
    def runs(self) -> TokenRuns | None:
        starts, count = self.run_starts, self.num_runs
        return None if starts is None or count is None else TokenRuns(starts, count)

    @property
    def lora(self) -> LoraRows | None:
        """The adapters of all tokens, if any has one."""
        return _lora(self.adapter_slots, self.adapter_blocks, self.num_adapter_blocks)

    @property
    def head_lora(self) -> LoraRows | None:
        """The same of the sampled tokens."""
        return _lora(
            self.head_adapter_slots, self.head_adapter_blocks, self.head_num_adapter_blocks
        )


_FIELDS = tuple(field.name for field in fields(StepViews))


def _lora(slots: Tensor | None, blocks: Tensor | None, count: Tensor | None) -> LoraRows | None:
    if slots is None or blocks is None or count is None:
        return None
    return LoraRows(slots, blocks, count, max_blocks=blocks.shape[0])
