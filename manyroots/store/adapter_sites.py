"""Where adapters attach to a model: its products, and the checkpoint's names of their parts.

Made by layers, once; read when weights are put on the device. Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manyroots.config import EVERY_MODULE
from manyroots.errors import ConfigError
from manyroots.lora.targets import OutputPiece, Side, Target, TargetKind


class LoraSite:
    """One product that adapters may change; compared by identity.

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
        side: Side | None = None,
    ) -> None:
        """`parts`: the output width of each, by name. `factor`: the model's factor of the output,
        if an adapter's output is multiplied, too (a scaled embedding). `is_interleaved`, `side`,
        and `pieces` by part: see `Target`."""
        self.kind = kind
        self.factor = factor
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.num_experts = num_experts
        self.is_interleaved = is_interleaved
        self.is_recomputed = False
        """See `Target`."""
        self._side = side
        self._parts = dict(parts)
        self._pieces = dict(pieces or {})

    def targets(self, folder: str) -> Iterator[tuple[str, SitePart]]:
        """Its parts by their names in the checkpoint's `folder`."""
        start = 0
        for part, size in self._parts.items():
            target = Target(
                self.kind, self.in_features, size, self.num_experts, self.is_interleaved,
                self._pieces.get(part, ()), self._side, self.is_recomputed,
            )  # fmt: skip
            name = f"{folder}.{part}" if part else folder
            yield name, SitePart(self, slice(start, start + size), target)
            start += size


@dataclass(frozen=True, slots=True)
class SitePart:
    """One weight that adapters may change, and its product."""

    site: LoraSite
    columns: slice
    """Columns of the site's output."""
    target: Target


SiteParts = Mapping[str, SitePart]
"""By target name, in the order of the model."""

_EVERY = {*EVERY_MODULE, "all-linear"}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names that other engines use for fused products."""


def parts_named(parts: SiteParts, modules: Sequence[str]) -> SiteParts:
    """The parts that an operator allows adapters to change: each name is a suffix of a target's.
    Products are always taken whole, and so are a layer's experts, which share a kernel. Raises
    ConfigError if a name matches no target."""
    if not modules or _EVERY & set(modules):
        return parts
    sites: set[LoraSite | str] = set()
    for module in modules:
        ends = [f".{one}" for one in _FUSED.get(module, (module,))]
        found = {
            _together(name, part)
            for name, part in parts.items()
            if any(f".{name}".endswith(end) for end in ends)
        }
        if not found:
            known = dict.fromkeys(name.rpartition(".")[2] for name in parts)
            raise ConfigError(
                f"--lora-target-modules names {module!r}, which this model does not let adapters "
                f"change; it has {', '.join(known)}."
            )
        sites |= found
    return {name: part for name, part in parts.items() if _together(name, part) in sites}


def _together(name: str, part: SitePart) -> LoraSite | str:
    """The group that is served or left out together."""
    return name.rpartition(".")[0] if part.site.kind is TargetKind.EXPERTS else part.site


def targets_in(parts: SiteParts) -> dict[str, Target]:
    return {name: part.target for name, part in parts.items()}
