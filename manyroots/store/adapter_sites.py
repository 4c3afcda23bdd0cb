"""Where adapters attach to a model: its products, and the checkpoint's names for their parts.

Made by layers, once; read by whoever puts weights on the device. Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from manyroots.lora.targets import OutputPiece, Target, TargetKind


class LoraSite:
    """One product that adapters may change; two sites are never equal.

    The projections of a fused product are its parts, one after the other in the output. A product
    of one projection has one part, named "".
    """

    def __init__(
        self,
        kind: TargetKind,
        in_features: int,
        parts: Mapping[str, int],
        *,
        num_experts: int | None = None,
        factor: float = 1.0,
        is_interleaved: bool = False,
        pieces: Mapping[str, tuple[OutputPiece, ...]] | None = None,
    ) -> None:
        """`parts`: the width of each in the output, by name. `factor`: what the model multiplies
        the output with, where an adapter's is multiplied, too (a scaled embedding).
        `is_interleaved`, and `pieces` by part: see `Target`."""
        self.kind = kind
        self.factor = factor
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.num_experts = num_experts
        self.is_interleaved = is_interleaved
        self._parts = dict(parts)
        self._pieces = dict(pieces or {})

    def targets(self, folder: str) -> Iterator[tuple[str, SitePart]]:
        """Its parts by their names in the checkpoint's `folder`."""
        start = 0
        for part, size in self._parts.items():
            target = Target(
                self.kind, self.in_features, size, self.num_experts, self.is_interleaved,
                self._pieces.get(part, ()),
            )  # fmt: skip
            name = f"{folder}.{part}" if part else folder
            yield name, SitePart(self, slice(start, start + size), target)
            start += size


@dataclass(frozen=True, slots=True)
class SitePart:
    """One weight that adapters may change, and where its product is."""

    site: LoraSite
    columns: slice
    """Of the site's output."""
    target: Target


SiteParts = Mapping[str, SitePart]
"""By target name, in the order of the model."""
