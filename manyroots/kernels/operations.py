"""The operations of every set of kernels: one Protocol each, which a module of the set implements.

Layers call kernels through these, so that the type checker sees each call. An operation's
`reference.py` defines what it computes; `tests/unit/kernels/test_operations.py` compares the
signatures of all sets with these. Data that a set prepares for itself is `Any`: other code does not
look inside.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.attention.paged import AttentionMetadata
from manyroots.kernels.blocks import BlockMatrix
from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm
from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows
from manyroots.kernels.fused_moe.adapters import ExpertAdapters
from manyroots.kernels.fused_moe.routing import ExpertGroups, Routing, Scoring
from manyroots.kernels.fused_moe.weights import ExpertWeights
from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights, ReadNorm
from manyroots.kernels.latent.inputs import (
    IndexNorm,
    KeyPiece,
    LatentAdapters,
    LatentNorm,
    SplitKeys,
)
from manyroots.kernels.lora_ops.batch import AdapterMemory, Slots
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite, LoraRows, LoraTerm
from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.norm.deferred import DeferredRMSNorm, NormedRows
from manyroots.kernels.packed import PackedMatrix
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm, RopeTable, SlotMapping
from manyroots.kernels.recurrent.rows import StateRows
from manyroots.kernels.sampling.rows import Sampled, SamplingRows
from manyroots.kernels.scaled import Matrix, ScaledMatrix

Operand = Matrix | PackedMatrix | BlockMatrix
"""The weight of a product."""


class NormOps(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def sum_rms_norm(
        self, sums: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor: ...
    def add_rms_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        lora: LoraTerm | None = None,
        post: Tensor | None = None,
        factor: float = 1.0,
        form: Fp8Form | None = None,
        also: Tensor | None = None,
    ) -> Tensor | Fp8Rows: ...
    def add_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        lora: LoraTerm,
        form: Fp8Form | None = None,
        also: Tensor | None = None,
    ) -> DeferredRMSNorm: ...


class QkRopeKvWriteOps(Protocol):
    def look_up(self, table: RopeTable, positions: Tensor, dtype: torch.dtype) -> Any: ...
    def qk_rope_kv_write(
        self,
        qkv: Tensor,
        angles: Any,
        norm: QkNorm | None,
        layer_kv: Tensor,
        slot_mapping: SlotMapping,
        lora: LoraTerm | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...


class AttentionOps(Protocol):
    __name__: str

    def prepare(self, rows: AttentionMetadata, page_size: int, dtype: torch.dtype) -> Any: ...
    def attend(
        self,
        q: Tensor,
        layer_kv: Tensor,
        metadata: Any,
        scale: float,
        sinks: Tensor | None = None,
        cap: float = 0.0,
    ) -> Tensor: ...


class CompressedOps(Protocol):
    def write_rows(self, rows: Tensor, pages: Tensor, slot_mapping: SlotMapping) -> None: ...
    def rotate_last(self, x: Tensor, angles: Any, *, back: bool) -> Tensor: ...
    def normed_write(
        self,
        q: Tensor,
        kv: Tensor,
        angles: Any,
        norm: RowNorm,
        pages: Tensor,
        slot_mapping: SlotMapping,
    ) -> Tensor: ...
    def compress(
        self,
        pages: Tensor,
        entries: Tensor,
        parts: tuple[GroupPart, ...],
        of_tokens: RowsStep,
        of_entries: RowsStep,
        angles: Any,
    ) -> None: ...
    def choose_entries(
        self, q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, num_chosen: int
    ) -> Tensor: ...
    def attend_rows(
        self,
        q: Tensor,
        keys: KeyRows,
        entries: KeyRows | None,
        chosen: Tensor | None,
        sinks: Tensor,
        scale: float,
        angles: Any,
    ) -> Tensor: ...


class HyperOps(Protocol):
    def read_streams(
        self, streams: Tensor, weights: HyperWeights, norm: ReadNorm | None = None
    ) -> HyperRead: ...
    def write_streams(
        self, streams: Tensor, output: Tensor, read: HyperRead, also: Tensor | None = None
    ) -> Tensor: ...
    def join_streams(self, streams: Tensor, weights: HyperWeights) -> Tensor: ...


class LatentOps(Protocol):
    def latent_write(
        self,
        q: Tensor,
        kv: Tensor,
        angles: Any,
        norm: LatentNorm,
        pages: Tensor,
        slot_mapping: SlotMapping,
        dtype: torch.dtype | None = None,
        *,
        is_interleaved: bool,
    ) -> Tensor: ...
    def absorb_queries(
        self, q: Tensor, weight: Tensor, nope: int, adapters: LatentAdapters | None
    ) -> Tensor: ...
    def latent_decode(
        self,
        queries: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
        latent: int,
    ) -> Tensor: ...
    def attend_chosen(
        self, queries: Tensor, pages: Tensor, slots: Tensor, scale: float, latent: int
    ) -> Tensor: ...
    def index_write(
        self,
        q: Tensor,
        k: Tensor,
        angles: Any,
        norm: IndexNorm,
        pages: Tensor,
        slot_mapping: SlotMapping,
        *,
        is_interleaved: bool,
    ) -> Tensor: ...
    def expand_values(
        self,
        attended: Tensor,
        weight: Tensor,
        nope: int,
        adapters: LatentAdapters | None,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def latent_read(
        self, pages: Tensor, slots: Tensor, latent: int, rope: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...
    def attend_piece(
        self,
        q: Tensor,
        keys: SplitKeys,
        v: Tensor,
        piece: KeyPiece,
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def merge(
        self, out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class GatedActivationOps(Protocol):
    def gated(
        self,
        gate_up: Tensor,
        activation: Activation,
        dtype: torch.dtype,
        lora: LoraTerm | None = None,
        gate_factor: float = 1.0,
        form: Fp8Form | None = None,
    ) -> Tensor | Fp8Rows: ...


class GemmOps(Protocol):
    ROWS_AT_ONCE: int | None

    def is_for(self, num_rows: int, weight: Operand, *, has_adapters: bool = False) -> bool: ...
    def form_for(
        self, num_rows: int, weight: ScaledMatrix, keeps_values: bool
    ) -> Fp8Form | None: ...
    def linear(
        self,
        x: NormedRows,
        weight: Operand,
        site: LinearSite | None = None,
        rows: LoraRows | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, LoraTerm | None]: ...


class ScaledGemmOps(Protocol):
    def is_for(self, weight: ScaledMatrix, dtype: torch.dtype) -> bool: ...
    def form_for(self, weight: ScaledMatrix, keeps_values: bool) -> Fp8Form | None: ...
    def linear(
        self, x: Tensor | Fp8Rows, weight: ScaledMatrix, bias: Tensor | None = None
    ) -> Tensor: ...


class LoraOps(Protocol):
    def prepare(
        self,
        token_slots: Slots,
        pool: AdapterMemory,
        device: torch.device,
        *,
        all_layers: bool = True,
    ) -> LoraRows | None: ...
    def shrink(self, x: Tensor, site: LinearSite, rows: LoraRows) -> LoraTerm: ...
    def expand(self, y: Tensor, term: LoraTerm) -> None: ...
    def complete(self, sums: Tensor, term: LoraTerm) -> Tensor: ...
    def add_embedding(
        self, y: Tensor, tokens: Tensor, site: EmbeddingSite, rows: LoraRows
    ) -> None: ...


class FusedMoeOps(Protocol):
    MOST_JOINED_TOKENS: int

    def route(
        self,
        scores: Tensor,
        top_k: int,
        lora: LoraTerm | None = None,
        *,
        scoring: Scoring,
        bias: Tensor | None = None,
        factor: float = 1.0,
        groups: ExpertGroups | None = None,
        chosen: Tensor | None = None,
    ) -> Routing: ...
    def experts(
        self,
        x: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        adapters: ExpertAdapters | None = None,
        shared: ExpertWeights | None = None,
    ) -> Tensor: ...


class SamplingOps(Protocol):
    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled: ...


class DecodeRowsOps(Protocol):
    def begin(
        self,
        known: Tensor,
        token_rows: Tensor,
        newest: Tensor,
        page_tables: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]: ...
    def end(self, tokens: Tensor, rows: Tensor, newest: Tensor) -> None: ...


class RecurrentOps(Protocol):
    def prepare(
        self,
        units: Tensor,
        context_lens: Tensor,
        prompt_starts: Tensor | None,
        num_decodes: int,
        max_len: int,
    ) -> StateRows: ...


class CausalConvOps(Protocol):
    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        rows: StateRows,
        activation: str | None,
    ) -> Tensor: ...


class DeltaRuleOps(Protocol):
    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
    ) -> Tensor: ...
    def channel_delta(
        self, q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows
    ) -> Tensor: ...


class MambaOps(Protocol):
    def scan(
        self, x: Tensor, b: Tensor, c: Tensor, steps: MambaSteps, state: Tensor, rows: StateRows
    ) -> Tensor: ...


class GatedNormOps(Protocol):
    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool
    ) -> Tensor: ...
    def gated(self, x: Tensor, gate: Tensor) -> Tensor: ...
    def sigmoid_gated(self, x: Tensor, gate: Tensor) -> Tensor: ...
    def add_gated(self, sums: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...
