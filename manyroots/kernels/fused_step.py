"""One step as the fused layers see it: made once, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.kernels.attention.paged import DecodeRows, PrefillSegments
from manyroots.kernels.lora_sites.sites import LoraRows
from manyroots.kernels.rope_write.inputs import KvPlaces, RopeTable


@dataclass(frozen=True, slots=True)
class FusedStep:
    """What all layers share of one step. Decoding sequences come first."""

    angles: RopeTable
    slots: KvPlaces
    decodes: DecodeRows | None
    num_decodes: int
    prefills: PrefillSegments | None
    """`query_starts` count from the first token that is not a decode's."""
    lora: LoraRows | None
    """Which adapter each token wants; None if none wants any."""
