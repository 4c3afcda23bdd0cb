"""The fused kernels, each call of which is repeated by its reference on the CPU and compared.

For an engine's own steps: `checked_kernels` takes the kernels that a runner would use, and gives
others that compute the same and note how far every result was from the reference's, on the same
inputs. Whatever an early rounding changes later in the model, both see it, so half precision is
held to a rounding or two of each result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from manyroots.engine import worker
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.choice import Kernels, reference_kernels
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows
from manyroots.kernels.fused_moe.routing import Routing
from manyroots.kernels.fused_moe.weights import ExpertWeights
from manyroots.kernels.lora_ops.sites import LoraTerm, PoolSite
from manyroots.kernels.recurrent.rows import StateRows
from manyroots.kernels.sampling.rows import (
    MAX_TOP,
    NO_FAULT,
    NO_LOGPROBS,
    Sampled,
    SamplingRows,
)
from manyroots.kernels.scaled import ScaledMatrix
from manyroots.kernels.tolerances import TOLERANCES

CPU = torch.device("cpu")
IN_FP8 = "in_fp8"
"""Rows that were rounded to FP8."""
Pieces = dict[str, Tensor]
_CLAMPED = Activation.CLAMPED_SWIGLU
"""Whose values are up to 56, and those of others about 1."""


def _kind_of(name: str, args: tuple[Any, ...]) -> str:
    """Of a call, in the table of tolerances."""
    if any(isinstance(arg, ScaledMatrix) for arg in args):
        return "scaled"
    if any(isinstance(arg, ExpertWeights) and arg.has_fp8_tiles for arg in args):
        return "fp8_experts"
    if any(isinstance(arg, ExpertWeights) and arg.activation is _CLAMPED for arg in args):
        return "clamped_experts"
    if "experts" in name:
        return "expert_lora"  # between the two products of experts every activation is rounded
    is_recurrent = name.startswith(("causal_conv", "delta_rule", "mamba"))
    return "recurrent" if is_recurrent else "step"


class Record:
    """What was compared so far."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.is_on = False
        self.calls: dict[str, int] = {}
        self.worst: dict[str, float] = {}
        """Of each result, the largest error in units of what is allowed."""
        self._pools: dict[int, Tensor] = {}

    def compare(self, name: str, kind: str, actual: Pieces, expected: Pieces) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        for piece, right in expected.items():
            ours = actual[piece].to(CPU)
            key = f"{name}.{piece}"
            if ours.shape != right.shape:
                self.worst[key] = torch.inf
                continue
            if not right.is_floating_point():
                ratio = 0.0 if torch.equal(ours.long(), right.long()) else torch.inf
            else:
                right = right.float()
                row = TOLERANCES[kind, self._dtype]
                if piece == IN_FP8:
                    row = TOLERANCES["kept", torch.float8_e4m3fn]
                allowed = row.atol + row.rtol * right.abs()
                error = ((ours.float() - right).abs() / allowed).nan_to_num(torch.inf)
                ratio = float(error.max()) if error.numel() else 0.0
            self.worst[key] = max(self.worst.get(key, 0.0), ratio)

    def on_cpu(self, value: Any) -> Any:
        """A copy that the original's changes do not reach."""
        if isinstance(value, Tensor):
            return value.to(CPU, copy=True)
        if isinstance(value, PoolSite):
            # Large, and the same for all calls: adapters are loaded before anything is compared.
            pool = value.pool
            if pool.data_ptr() not in self._pools:
                self._pools[pool.data_ptr()] = pool.to(CPU, copy=True)
            rest = {
                f.name: self.on_cpu(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if f.name != "pool"
            }
            return type(value)(pool=self._pools[pool.data_ptr()], **rest)
        if isinstance(value, tuple):
            return tuple(self.on_cpu(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.on_cpu(getattr(value, f.name)) for f in dataclasses.fields(value)
            }
            return type(value)(**fields)
        if isinstance(value, tuple):
            return tuple(self.on_cpu(item) for item in value)
        return value

    def forget(self) -> None:
        """Begin again, as if nothing had been compared."""
        self.calls.clear()
        self.worst.clear()

    def _wrong(self) -> dict[str, float]:
        return {key: worst for key, worst in self.worst.items() if not worst <= 1.0}

    def wrong_kernels(self) -> set[str]:
        """Those of which a result was too far off."""
        return {key.rpartition(".")[0] for key in self._wrong()}

    def check(self) -> str:
        """Raise AssertionError if a result was too far off; else say how many were compared."""
        wrong = self._wrong()
        assert not wrong, f"kernels differ from their references: {wrong} times what is allowed"
        assert self.calls, "no kernel was called"
        far = max(self.worst, key=lambda key: self.worst[key])
        return f"{sum(self.calls.values())} kernel calls, worst {far} {self.worst[far]:.2f}"


def _rows(x: Tensor | Fp8Rows | None) -> Pieces:
    """Rows as they are, as they are in FP8, or as both."""
    if x is None or isinstance(x, Tensor):
        return {} if x is None else {"out": x}
    return {**_rows(x.values), IN_FP8: x.plain()}


def _shrunk(term: LoraTerm | None) -> Pieces:
    """The shrunk activations that mean anything: of rows with an adapter, up to its ranks."""
    if term is None:
        return {}
    hidden = term.hidden.sum(0).to(CPU)
    slots = term.rows.slots.tolist()
    totals = term.site.table[:, 1].tolist()
    rows = [hidden[row, : totals[slot]] for row, slot in enumerate(slots) if slot >= 0]
    return {"shrunk": torch.cat(rows) if rows else torch.empty(0)}


def _routing(routing: Routing) -> Pieces:
    """Which experts each token has, in the experts' order: of two that are equally likely, either
    may come first."""
    order = routing.experts.long().argsort(dim=1)
    pairs, groups = routing.pairs.tolist(), routing.groups.tolist()
    chosen, lists = routing.experts.flatten().tolist(), []
    for expert, begin, end in sorted(groups):
        mine = pairs[begin:end]
        # A list must be of its own expert's pairs, one of each token, in the order of tokens.
        assert all(chosen[pair] == expert for pair in mine)
        lists += [expert, end - begin, *(pair // order.shape[1] for pair in mine)]
    return {
        "weights": routing.weights.gather(1, order),
        "experts": routing.experts.long().gather(1, order),
        "lists": torch.tensor(lists),
    }


def _of_states(out: Tensor, state: Tensor, rows: StateRows) -> Pieces:
    """Without padding: the last unit belongs to no sequence, and a graph's padding rows read and
    write it in any order."""
    is_real = rows.units != len(state) - 1
    return {
        "out": out[torch.repeat_interleave(is_real, rows.starts.diff().long())],
        "state": state[:-1],
    }


def _piece(out: Tensor, sums: Tensor) -> Pieces:
    """Of queries that see nothing there is no sum."""
    is_seen = torch.isfinite(sums)
    return {"out": out, "seen": is_seen.long(), "sums": sums[is_seen]}


def _sampled(rows: SamplingRows, sampled: Sampled) -> Pieces:
    """What means anything of it, and what was counted."""
    is_good = sampled.faults == NO_FAULT
    is_scored = is_good & (rows.num_top != NO_LOGPROBS)
    vocab = rows.tables.counts.shape[1]
    is_top = torch.arange(MAX_TOP, device=is_good.device) < rows.num_top[:, None].clamp(max=vocab)
    is_top &= is_scored[:, None]
    return {
        "tokens": sampled.tokens[is_good],
        "faults": sampled.faults,
        "logprobs": sampled.logprobs[is_scored],
        "ranks": sampled.ranks[is_scored],
        "top_ids": sampled.top_ids[is_top],
        "top_logprobs": sampled.top_logprobs[is_top],
        "counts": rows.tables.counts,
    }


RESULTS: dict[str, Callable[[tuple[Any, ...], Any], Pieces]] = {
    "norm.rms_norm": lambda args, out: {"out": out},
    "norm.sum_rms_norm": lambda args, out: {"out": out},
    "norm.add_rms_norm": lambda args, out: {**_rows(out), "residual": args[0]},
    "norm.add_norm": lambda args, out: {
        **_rows(out.in_fp8),
        "out": out.values.float() * out.factors,
        "residual": args[0],
    },
    "qk_rope_kv_write.qk_rope_kv_write": lambda args, out: {"q": out, "pages": args[3]},
    "qk_rope_kv_write.look_up": lambda args, out: {"cos": out.cos, "sin": out.sin},
    "attention.attend": lambda args, out: {"out": out},
    "latent.latent_write": lambda args, out: {"q": out, "pages": args[4]},
    "latent.index_write": lambda args, out: {"q": out, "pages": args[4]},
    "latent.absorb_queries": lambda args, out: {"out": out},
    "latent.latent_decode": lambda args, out: {"out": out},
    "latent.expand_values": lambda args, out: {"out": out},
    "latent.latent_read": lambda args, out: {"latents": out[0], "rotated": out[1]},
    "latent.attend_piece": lambda args, out: _piece(*out),
    "compressed.write_rows": lambda args, out: {"pages": args[1]},
    "compressed.rotate_last": lambda args, out: {"out": out},
    "compressed.normed_write": lambda args, out: {"q": out, "pages": args[4]},
    "compressed.compress": lambda args, out: {"entries": args[1]},
    "compressed.attend_rows": lambda args, out: {"out": out},
    "hyper.read_streams": lambda args, out: {"rows": out.rows, "post": out.post, "mix": out.mix},
    "hyper.write_streams": lambda args, out: {"out": out},
    "hyper.join_streams": lambda args, out: {"out": out},
    "activation.gated": lambda args, out: _rows(out),
    "gemm.linear": lambda args, out: {"out": out[0].float().sum(0), **_shrunk(out[1])},
    "scaled_gemm.in_fp8": lambda args, out: _rows(out),
    "scaled_gemm.linear": lambda args, out: {"out": out},
    "lora_ops.shrink": lambda args, out: _shrunk(out),
    "lora_ops.expand": lambda args, out: {"y": args[0]},
    "lora_ops.complete": lambda args, out: {"out": out},
    "lora_ops.add_embedding": lambda args, out: {"y": args[0]},
    "fused_moe.route": lambda args, out: _routing(out),
    "fused_moe.experts": lambda args, out: {"out": out.float().sum(0)},
    "causal_conv.conv": lambda args, out: _of_states(out, args[3], args[4]),
    "delta_rule.gated_delta": lambda args, out: _of_states(out, args[4], args[5]),
    "delta_rule.channel_delta": lambda args, out: _of_states(out, args[4], args[5]),
    "mamba.scan": lambda args, out: _of_states(out, args[4], args[5]),
    "gated_norm.gated_norm": lambda args, out: {"out": out},
    "gated_norm.gated": lambda args, out: {"out": out},
    "gated_norm.sigmoid_gated": lambda args, out: {"out": out},
    "gated_norm.add_gated": lambda args, out: {"out": out},
    "sampling.sample": lambda args, out: _sampled(args[1], out),
    "decode_rows.begin": lambda args, out: {"tokens": out[0], "tables": out[1]},
    # The last row belongs to no sequence; padding rows write there in any order.
    "decode_rows.end": lambda args, out: {"newest": args[2][:-1]},
}
"""What a call gives and changes, as tensors to compare."""


def checked_kernels(fast: Kernels, record: Record) -> Kernels:
    """Kernels that do what `fast` does, and compare while `record` is on."""
    references = reference_kernels()
    rooms = {
        f.name: SimpleNamespace(**vars(getattr(fast, f.name))) for f in dataclasses.fields(Kernels)
    }
    for name, results in RESULTS.items():
        room, _, op = name.partition(".")
        reference = getattr(getattr(references, room), op)
        call = _checked(name, getattr(rooms[room], op), reference, results, record)
        setattr(rooms[room], op, call)
    rooms["scaled_gemm"].linear = _rounding_first(rooms["scaled_gemm"])
    return Kernels(**cast(dict[str, ModuleType], rooms))


def _rounding_first(room: SimpleNamespace) -> Callable[..., Any]:
    """The product of rows that come as they are, in the two steps that it has: rounding them, and
    multiplying what was rounded. Of two scales that leave the same error up to the order of a sum,
    kernel and reference may each take one, and every number of that row is then rounded otherwise.
    Compared as one, such a row was 1.69 times beyond the product's bound; given the same rounded
    row, the product is within 0.11 of it."""
    multiply = room.linear

    def linear(x: Any, weight: ScaledMatrix, bias: Tensor | None = None) -> Any:
        if isinstance(x, Tensor):
            x = room.in_fp8(x.contiguous(), Fp8Form(1, weight.group, False))
        return multiply(x, weight, bias)

    return linear


def _checked(
    name: str,
    fast: Callable[..., Any],
    reference: Callable[..., Any],
    results: Callable[[tuple[Any, ...], Any], Pieces],
    record: Record,
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if not record.is_on:
            return fast(*args, **options)
        copies = tuple(record.on_cpu(arg) for arg in args)
        copied_options = {name: record.on_cpu(option) for name, option in options.items()}
        out = fast(*args, **options)
        expected = reference(*copies, **copied_options)
        kind = _kind_of(name, args)
        record.compare(name, kind, results(args, out), results(copies, expected))
        return out

    return call


@contextmanager
def all_checked(record: Record) -> Iterator[None]:
    """Runners that are built in here compare all their kernels."""
    kept = worker.kernel_set
    make = lambda *args: checked_kernels(kept(*args), record)  # noqa: E731
    with mock.patch.object(worker, "kernel_set", make):
        yield
