"""The mixers, by which a layer combines a token with earlier ones, and the class of each.

All have the same constructor and call: the normalised residual stream, their memory and the step. A
new mixer is a spec in `spec.py`, a file here and a line below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.attention import Attention
from manyroots.layers.channel_delta import ChannelDeltaNet
from manyroots.layers.compressed_attention import CompressedAttention
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.delta_net import GatedDeltaNet
from manyroots.layers.latent_attention import LatentAttention
from manyroots.layers.linear import Linear
from manyroots.layers.mamba import Mamba2
from manyroots.layers.short_conv import ShortConv
from manyroots.layers.spec import (
    AttentionSpec,
    ChannelDeltaSpec,
    CompressedSpec,
    DeltaSpec,
    LatentSpec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
)
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fills
from manyroots.store.adapter_sites import SitePart


class Mixer(Protocol):
    """The interface that the decoder uses."""

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input; None if there are several."""

    def __call__(self, x: NormedRows, memory: Any, step: Step) -> DeferredOutput:
        """`memory`: this layer's part of its family's arena, or a tuple of one for each family."""

    def weights(self, name: str) -> Fills: ...
    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]: ...
    def products(self) -> Iterator[Linear]: ...


_CLASSES: dict[type[MixerSpec], Any] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    ShortConvSpec: ShortConv,
    DeltaSpec: GatedDeltaNet,
    ChannelDeltaSpec: ChannelDeltaNet,
    MambaSpec: Mamba2,
}


def make_mixer(spec: MixerSpec, families: Sequence[int], context: LayerContext) -> Mixer:
    """`families`: the indices of its memories in the step's `memories`."""
    if isinstance(spec, CompressedSpec):
        return CompressedAttention(spec, tuple(families), context)
    [family] = families
    mixer: Mixer = _CLASSES[type(spec)](spec, family, context)
    return mixer
