"""How the tensors of an adapter's file become low-rank pairs of a model.

Takes the header, the config and the model's targets; gives an `AdapterLayout`, in which every
tensor of the file has its place, or an `AdapterError` that names the tensor, what it is and what
the model has. Nothing is cut, padded or left out. Touches no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyroots.errors import AdapterError
from manyroots.lora.files.config import AdapterConfig
from manyroots.lora.files.experts import expert_pairs
from manyroots.lora.files.header import Header
from manyroots.lora.files.keys import base_copy_of, parse_key, refuse_key, spelling_of
from manyroots.lora.files.modules import Place, module_names, place_of
from manyroots.lora.files.pairs import (
    AdapterLayout,
    ExpertFactors,
    Factor,
    Factors,
    PairLayout,
    Piece,
    check_shape,
    named,
)
from manyroots.lora.files.tensors import TensorEntry
from manyroots.lora.files.trained import check_trained
from manyroots.lora.targets import Target, TargetKind, Targets


def lay_out(
    header: Header, config: AdapterConfig, targets: Targets, max_rank: int
) -> AdapterLayout:
    factors, base_copies = _sorted_by_home(header, targets)
    if not factors:
        raise AdapterError("the file has no LoRA pair; save the adapter again.")
    _check_whole(factors)
    pairs: dict[str, PairLayout] = {}
    for home, sides in factors.items():
        made = (
            expert_pairs(home, factors, header.tensors, config, targets)
            if home.place is not Place.TARGET or targets[home.name].kind is TargetKind.EXPERTS
            else [_plain_pair(home.name, sides, header.tensors, config, targets)]
        )
        for pair in made:
            if pair.target in pairs:
                raise AdapterError(
                    f"the file has weights for {pair.target} in two spellings; keep one of them."
                )
            _check_rank(pair, max_rank)
            pairs[pair.target] = pair
    spelling = spelling_of(one.spelled for sides in factors.values() for one in sides.values())
    check_trained(config, targets, factors, pairs, spelling)
    if not spelling.has_images:
        # Else they may be meant for the part that sees, whose modules are not known here.
        names = (one for name in module_names(targets) for one in spelling.names(name))
        config.refuse_unused_patterns(names)
    ordered = tuple(pairs[name] for name in targets if name in pairs)
    return AdapterLayout(ordered, tuple(base_copies))


def _plain_pair(
    name: str,
    sides: dict[str, Factor],
    tensors: Sequence[TensorEntry],
    config: AdapterConfig,
    targets: Targets,
) -> PairLayout:
    target = targets[name]
    [a_index] = sides["A"].tensors.values()
    [b_index] = sides["B"].tensors.values()
    module = config.pattern_name(sides["A"].spelled)
    rank = config.rank_of(module)
    a_wanted, b_wanted = (rank, target.in_features), (target.out_features, rank)
    check_shape(tensors[a_index], a_wanted, name)
    check_shape(tensors[b_index], b_wanted, name)
    is_embedding = target.kind is TargetKind.EMBEDDING
    return PairLayout(
        name,
        rank,
        config.scaling_of(module),
        Piece((a_index,), a_wanted, (1, 0) if is_embedding else None),
        Piece((b_index,), b_wanted),
        a_wanted[::-1] if is_embedding else a_wanted,
        b_wanted,
    )


def _sorted_by_home(header: Header, targets: Targets) -> tuple[Factors, list[tuple[str, int]]]:
    """Every tensor of the file is placed, or refused by name."""
    factors: Factors = {}
    of_experts = ExpertFactors()
    base_copies: list[tuple[str, int]] = []
    adapters: set[str | None] = set()
    unknown: list[str] = []
    for index, entry in enumerate(header.tensors):
        if of_experts.put(entry.name, index):
            continue
        key = parse_key(entry.name)
        if key is None:
            base_copies.append((_base_copy(entry, targets), index))
            continue
        adapters.add(key.adapter)
        home, expert = place_of(key.module, targets)
        if home is None:
            unknown.append(key.module)
            continue
        factor = factors.setdefault(home, {}).setdefault(key.side, Factor(key.module, key.spelled))
        factor.put(expert, index, entry.name)
        if expert is not None:
            of_experts.learn(entry.name, factor)
    if unknown:
        raise AdapterError(
            f"the adapter changes {named(unknown)}, which this model does not let adapters "
            "change. Use an adapter that was trained for this model."
        )
    if len(adapters) > 1:
        raise AdapterError(
            f"the file has tensors of several adapters ({named(str(a) for a in adapters)}); save "
            "each in a folder of its own."
        )
    return factors, base_copies


def _base_copy(entry: TensorEntry, targets: Targets) -> str:
    """PEFT saves the base weight of an embedding that is adapted; it must be this model's."""
    module = base_copy_of(entry.name)
    target = None if module is None else targets.get(module)
    if module is None or target is None:
        raise refuse_key(entry.name)
    wanted = _base_shape(target)
    if entry.shape != wanted:
        raise AdapterError(
            f"{entry.name!r} has shape {list(entry.shape)} and the model's own is {list(wanted)}: "
            "the adapter was trained with another vocabulary, which is not served."
        )
    return module


def _base_shape(target: Target) -> tuple[int, ...]:
    shape = (target.out_features, target.in_features)
    return shape[::-1] if target.kind is TargetKind.EMBEDDING else shape


def _check_whole(factors: Factors) -> None:
    for sides in factors.values():
        for here, missing in (("A", "B"), ("B", "A")):
            if here in sides and missing not in sides:
                raise AdapterError(
                    f"{sides[here].module} has lora_{here} without lora_{missing}; the file is "
                    "incomplete. Save the adapter again."
                )


def _check_rank(pair: PairLayout, max_rank: int) -> None:
    if pair.rank > max_rank:
        raise AdapterError(
            f"{pair.target} has rank {pair.rank}, above --max-lora-rank {max_rank}; start the "
            f"server with --max-lora-rank {pair.rank}."
        )
