"""Pairs of mixture-of-experts layers, from each format in which adapters have them.

The format is seen from names and shapes, never told by a flag. Either factor may have one matrix
for all experts: its first dimension is 1 then, here as in the file.

A parameter that PEFT wrapped is flat: A [experts * rank, in], B [out, rank * experts], where B
counts experts fastest. Which parameter it is, and whether PEFT read the parameter's dimensions as
[in, out] or [out, in] (its releases differ), follows from the sizes. Where a parameter is square
(2 * moe_intermediate_size == hidden_size), PEFT read it as it read the layer's other one; alone, it
is refused. Parameters that are [in, out] themselves (gpt-oss) have been read as such by all
releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NoReturn

from manyroots.errors import AdapterError
from manyroots.lora.files.config import AdapterConfig, is_named
from manyroots.lora.files.modules import Home, Place, with_expert
from manyroots.lora.files.pairs import Factor, PairLayout, Piece, check_shape, named
from manyroots.lora.files.tensors import TensorEntry
from manyroots.lora.targets import Target, Targets


def expert_pairs(
    home: Home,
    factors: Mapping[Home, dict[str, Factor]],
    tensors: Sequence[TensorEntry],
    config: AdapterConfig,
    targets: Targets,
) -> list[PairLayout]:
    """`factors`: of the whole file."""
    sides = factors[home]
    if home.place is Place.TARGET:
        return [_projection(home.name, sides, tensors, config, targets[home.name])]
    if home.place is Place.GATE_UP:
        return list(_gate_up(home.name, sides, tensors, config, targets))
    other = Place.PARAMETER if home.place is Place.INNER_PARAMETER else Place.INNER_PARAMETER
    others = factors.get(Home(other, home.name))
    return list(_parameter(home.name, sides, others, tensors, config, targets))


def _projection(
    name: str,
    sides: dict[str, Factor],
    tensors: Sequence[TensorEntry],
    config: AdapterConfig,
    target: Target,
) -> PairLayout:
    rank, scaling = _rank_and_scaling(name, sides["A"], config)
    a = _stacked(name, sides["A"], tensors, (rank, target.in_features), target)
    b = _stacked(name, sides["B"], tensors, (target.out_features, rank), target)
    return PairLayout(name, rank, scaling, a, b, a.shape, b.shape)


def _rank_and_scaling(name: str, factor: Factor, config: AdapterConfig) -> tuple[int, float]:
    """Of all experts: one matrix product serves them all."""
    modules = [factor.spelled]
    if config.has_patterns:
        numbers = [expert for expert in factor.tensors if expert is not None]
        modules += [with_expert(factor.spelled, expert) for expert in numbers]
    found = {(config.rank_of(module), config.scaling_of(module)) for module in modules}
    if len(found) > 1:
        raise AdapterError(
            f"the experts of {name} have different ranks or scalings ({sorted(found)[:4]}); give "
            "them the same in rank_pattern and alpha_pattern."
        )
    return found.pop()


def _stacked(
    name: str,
    factor: Factor,
    tensors: Sequence[TensorEntry],
    wanted: tuple[int, int],
    target: Target,
) -> Piece:
    num_experts = target.num_experts or 1
    if None in factor.tensors:
        if len(factor.tensors) > 1:
            raise AdapterError(f"{name} has weights in two formats; keep one of them.")
        index = factor.tensors[None]
        return Piece((index,), _stack_shape(tensors[index], name, wanted, num_experts))
    if factor.tensors.keys() != _all(num_experts):
        _refuse_other_experts(name, factor, num_experts)
    indexes = tuple(factor.tensors[expert] for expert in range(num_experts))
    for index in indexes:
        if tensors[index].shape != wanted:
            check_shape(tensors[index], wanted, name)
    return Piece(indexes, (num_experts, *wanted))


@cache
def _all(num_experts: int) -> frozenset[int]:
    return frozenset(range(num_experts))


def _refuse_other_experts(name: str, factor: Factor, num_experts: int) -> NoReturn:
    highest = max(expert for expert in factor.tensors if expert is not None)
    if highest >= num_experts:
        raise _too_many(name, highest + 1, num_experts)
    missing = [str(expert) for expert in range(num_experts) if expert not in factor.tensors]
    raise AdapterError(
        f"{name} has no weights for the experts {named(missing)} of {num_experts}; the file "
        "is incomplete. Save the adapter again, with zeros for experts that were not trained."
    )


def _stack_shape(
    entry: TensorEntry, name: str, wanted: tuple[int, int], num_experts: int
) -> tuple[int, ...]:
    """The shape of a stacked factor, which may be shared by all experts."""
    if len(entry.shape) == 3 and entry.shape[1:] == wanted and entry.shape[0] > num_experts:
        raise _too_many(name, entry.shape[0], num_experts)
    num_matrices = 1 if entry.shape[:1] == (1,) else num_experts
    check_shape(entry, (num_matrices, *wanted), name)
    return entry.shape


def _too_many(name: str, count: int, num_experts: int) -> AdapterError:
    return AdapterError(
        f"{name} has weights for {count} experts; this model has {num_experts}. Use an adapter "
        "that was trained for this model."
    )


def _gate_up(
    experts: str,
    sides: dict[str, Factor],
    tensors: Sequence[TensorEntry],
    config: AdapterConfig,
    targets: Targets,
) -> Iterator[PairLayout]:
    gate = targets[f"{experts}.gate_proj"]
    name = f"{experts}.gate_up_proj"
    spelled = sides["A"].spelled
    rank, scaling = config.rank_of(spelled), config.scaling_of(spelled)
    both = replace(gate, out_features=2 * gate.out_features)
    a = _stacked(name, sides["A"], tensors, (rank, both.in_features), both)
    b = _stacked(name, sides["B"], tensors, (both.out_features, rank), both)
    for part, rows in _halves_of_gate_up(gate):
        yield PairLayout(
            f"{experts}.{part}",
            rank,
            scaling,
            a,
            Piece(b.tensors, b.shape, None, rows),
            a.shape,
            (b.shape[0], gate.out_features, rank),
        )


def _halves_of_gate_up(gate: Target) -> tuple[tuple[str, slice], ...]:
    size = gate.out_features
    if gate.is_interleaved:
        return ("gate_proj", slice(0, 2 * size, 2)), ("up_proj", slice(1, 2 * size, 2))
    return ("gate_proj", slice(0, size)), ("up_proj", slice(size, 2 * size))


def _parameter(
    experts: str,
    sides: dict[str, Factor],
    others: dict[str, Factor] | None,
    tensors: Sequence[TensorEntry],
    config: AdapterConfig,
    targets: Targets,
) -> Iterator[PairLayout]:
    """`others`: the pair of the layer's other parameter, if PEFT wrapped both."""
    [a_index] = sides["A"].tensors.values()
    [b_index] = sides["B"].tensors.values()
    a, b = tensors[a_index], tensors[b_index]
    spelled = sides["A"].spelled.removesuffix(".base_layer")
    found = _readings(experts, spelled, a, b, config, targets)
    if len(found) > 1 and others is not None:
        [other_a], [other_b] = (others[side].tensors.values() for side in "AB")
        beside = _readings(experts, spelled, tensors[other_a], tensors[other_b], config, targets)
        found = [one for one in found if any(_go_together(one, other) for other in beside)]
    parameter, is_swapped = _only(found, experts, a, b, config, targets)
    gate, down = targets[f"{experts}.gate_proj"], targets[f"{experts}.down_proj"]
    name = f"{experts}.{parameter}"
    rank = config.rank_of(f"{spelled}.{parameter}")
    scaling = config.scaling_of(f"{spelled}.{parameter}")
    num_experts = gate.num_experts or 1
    a_seen = (num_experts, rank, a.shape[1])
    b_seen = (b.shape[0], rank, num_experts)
    # y = W x with W [out, in]: A^T B^T where PEFT read W as [in, out], and B A where as [out, in].
    if is_swapped:
        into, into_shape = Piece((b_index,), b_seen, (2, 1, 0)), (num_experts, rank, b.shape[0])
        out = Piece((a_index,), a_seen, (0, 2, 1))
    else:
        into, into_shape = Piece((a_index,), a_seen), a_seen
        out = Piece((b_index,), b_seen, (2, 0, 1))
    if parameter == "down_proj":
        out_shape = (num_experts, down.out_features, rank)
        yield PairLayout(name, rank, scaling, into, out, into_shape, out_shape)
        return
    for part, rows in _halves_of_gate_up(gate):
        yield PairLayout(
            f"{experts}.{part}",
            rank,
            scaling,
            into,
            Piece(out.tensors, out.shape, out.axes, rows),
            into_shape,
            (num_experts, gate.out_features, rank),
        )


def _readings(
    experts: str,
    spelled: str,
    a: TensorEntry,
    b: TensorEntry,
    config: AdapterConfig,
    targets: Targets,
) -> list[tuple[str, bool]]:
    """What a pair's sizes allow: the parameter's name, and whether PEFT read it as [in, out].
    `spelled`: the experts, as the file calls them."""
    gate, down = targets[f"{experts}.gate_proj"], targets[f"{experts}.down_proj"]
    sizes = {
        "gate_up_proj": (gate.in_features, 2 * gate.out_features),
        "down_proj": (down.in_features, down.out_features),
    }
    found = []
    for parameter, (num_in, num_out) in sizes.items():
        wide_rank = (gate.num_experts or 1) * config.rank_of(f"{spelled}.{parameter}")
        if not is_named(f"{spelled}.{parameter}", config.target_parameters):
            continue
        for is_swapped, (first, last) in ((False, (num_in, num_out)), (True, (num_out, num_in))):
            if is_swapped and gate.is_interleaved:
                continue
            if a.shape == (wide_rank, first) and b.shape == (last, wide_rank):
                found.append((parameter, is_swapped))
    return found


def _go_together(one: tuple[str, bool], other: tuple[str, bool]) -> bool:
    """Whether these can be a layer's two parameters: one release of PEFT read both."""
    return one[0] != other[0] and one[1] == other[1]


def _only(
    found: list[tuple[str, bool]],
    experts: str,
    a: TensorEntry,
    b: TensorEntry,
    config: AdapterConfig,
    targets: Targets,
) -> tuple[str, bool]:
    if len(found) == 1:
        return found[0]
    gate = targets[f"{experts}.gate_proj"]
    what = "fit more than one reading" if found else "fit no reading"
    raise AdapterError(
        f"{a.name!r} {list(a.shape)} and {b.name!r} {list(b.shape)} {what} of the expert "
        f"parameters that target_parameters names ({named(config.target_parameters) or 'none'}), "
        f"with {gate.num_experts} experts. Save the adapter with one pair per expert."
    )
