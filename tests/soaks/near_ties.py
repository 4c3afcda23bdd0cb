"""Whether rounding explains that two answers to one request differ.

In: an engine that answers one request at a time, the request, and the first place where its answers
differ. Out: the near tie that explains the difference, with its measured gap, or None.

There are two kinds. Each is shown by computing the request again, with a nudge as large as the gap:

- *Tokens*: the same logits, nudged, give the other token. A nudge raises one side of a draw, raises
  or lowers one token (at the border of top-k and min-p), or raises the likeliest ones (top-p).
- *Experts*: at some layer, at or before that position, a nudge to one score of the router makes a
  token choose other experts. With that choice, the logits give the other token and its
  log-probabilities.

A near tie that does not lead to the other answer explains nothing. Only one choice of experts is
changed at a time. Top-k choices of indexers (sparse attention) are not judged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from manyroots.kernels.fused_moe import torch_ops as moe_ops
from manyroots.kernels.sampling import torch_ops as sampling_ops
from manyroots.kernels.sampling.rows import ROW_FIELDS, Sampled, SamplingRows, SamplingTables
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs

CLOSE = 2 * TOLERANCES["logits", torch.float32].atol
"""Two logits may each be off by the tolerance."""
CLOSE_SCORES = 2 * TOLERANCES["router", torch.float32].atol
HALVINGS = 12
"""The smallest gap that is told apart is the largest one, halved as often."""

route, sample = moe_ops.route, sampling_ops.sample


@dataclass(frozen=True, slots=True)
class NearTie:
    """What rounding may choose."""

    kind: str
    gap: float
    """A nudge of this size changes the choice; half of it does not."""
    where: str

    def __str__(self) -> str:
        return f"near tie of {self.kind}, {self.where}, gap {self.gap:.1e}"


@dataclass(frozen=True, slots=True)
class Nudge:
    """A change to one score of a router."""

    call: int
    """Counts the routers of a step."""
    row: int
    expert: int
    by: float


@dataclass(slots=True)
class Watch:
    """What routers and the sampler are given while it is installed."""

    nudge: Nudge | None = None
    routed: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """By call of a router: scores, and its other arguments."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """[1, vocabulary], of the newest sample."""
    rows: SamplingRows | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[Watch]:
        with (
            mock.patch.object(moe_ops, "route", self._route),
            mock.patch.object(sampling_ops, "sample", self._sample),
        ):
            yield self

    def _route(self, scores: Tensor, *rest: Any, **named: Any) -> Any:
        scores = scores.float().clone()
        if self.nudge is not None and self.nudge.call == len(self.routed):
            scores[self.nudge.row, self.nudge.expert] += self.nudge.by
        self.routed.append((scores, rest, named))
        return route(scores, *rest, **named)

    def _sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        assert len(logits) == 1, "one request alone, without drafts"
        self.logits, self.rows = logits.float().clone(), repeated(rows, 1)
        return sample(logits, rows)


def repeated(rows: SamplingRows, count: int) -> SamplingRows:
    """The first row, so many times, with tables of its own."""
    views = {name: getattr(rows, name)[:1].repeat(count) for name in ROW_FIELDS}
    tables = {f.name: getattr(rows.tables, f.name).clone() for f in fields(SamplingTables)}
    return SamplingRows.of(views, SamplingTables(**tables))


# Tokens


def token_gaps(logits: Tensor, rows: SamplingRows) -> dict[int, float]:
    """The tokens that the sampler chooses from logits [1, vocabulary] with a nudge, and the
    smallest nudge for each."""
    nudges = torch.cat(list(_nudges(logits[0])))
    gaps: dict[int, float] = {}
    for size in _sizes(CLOSE):
        found = sample(logits + size * nudges, repeated(rows, len(nudges)))
        for token in found.tokens.unique().tolist():
            gaps.setdefault(token, size)
    return gaps


def _nudges(logits: Tensor) -> Iterator[Tensor]:
    """Rows of directions. A draw is a place in the sum by id."""
    vocab = len(logits)
    one, up_to = torch.eye(vocab), torch.ones(vocab, vocab).tril()
    likeliest = torch.zeros(vocab, vocab)
    likeliest[:, logits.argsort(descending=True, stable=True)] = up_to
    for directions in (one, up_to, likeliest):
        yield directions
        yield -directions


def _sizes(most: float) -> Iterator[float]:
    yield from (most / 2**halvings for halvings in range(HALVINGS, -1, -1))


# Experts


def expert_nudges(watch: Watch) -> Iterator[Nudge]:
    """For each near tie of a watched step's routers: the smallest nudge that changes the choice."""
    for call, (scores, rest, named) in enumerate(watch.routed):
        chosen = _chosen(scores, rest, named)
        smallest: dict[tuple[int, tuple[int, ...]], Nudge] = {}
        for expert, sign in itertools.product(range(scores.shape[1]), (1, -1)):
            for size in _sizes(CLOSE_SCORES):
                nudged = scores.clone()
                nudged[:, expert] += sign * size
                others = _chosen(nudged, rest, named)
                for row in (others != chosen).any(1).nonzero()[:, 0].tolist():
                    found = Nudge(call, row, expert, sign * size)
                    known = smallest.setdefault((row, tuple(others[row].tolist())), found)
                    if size < abs(known.by):
                        smallest[row, tuple(others[row].tolist())] = found
        yield from smallest.values()


def _chosen(scores: Tensor, rest: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """[tokens, top_k], by id."""
    experts: Tensor = route(scores, *rest, **named).experts
    return experts.sort(dim=1).values


# One difference


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers differ."""

    before: Sequence[int]
    """All tokens before it, the prompt's too."""
    num_answered: int | None
    """Tokens of the answer before it; None: it is in the prompt."""
    ours: int
    theirs: int
    """Tokens there; the same if only log-probabilities differ."""
    our_scores: TokenLogprobs | None = None
    their_scores: TokenLogprobs | None = None


def near_tie(ask: Callable[[Submit], object], submit: Submit, found: Difference) -> NearTie | None:
    """Why rounding may give both. `ask` computes a request alone, without drafts and reuse."""
    rows = theirs = None
    if found.num_answered is not None:
        again = _upto(submit, found.num_answered)
        with Watch().installed() as watch:
            ask(again)
        assert watch.rows is not None, "a request samples"
        rows, theirs = watch.rows, watch.logits
        if found.ours != found.theirs and _same_tops(found):
            gap = token_gaps(theirs, rows).get(found.ours)
            if gap is not None:
                return NearTie("tokens", gap, f"{found.ours} or {found.theirs}")
    return _near_tie_of_experts(ask, submit, found, rows, theirs)


def _upto(submit: Submit, num_answered: int) -> Submit:
    """The same request, which ends with the token after these."""
    most, sampling = num_answered + 1, submit.sampling
    least = min(sampling.min_tokens, most)
    return replace(submit, sampling=replace(sampling, max_tokens=most, min_tokens=least))


def _same_tops(found: Difference) -> bool:
    """Whether both had the same likeliest tokens, as far as they were asked for."""
    if found.our_scores is None or found.their_scores is None:
        return True
    ours, theirs = found.our_scores.top_logprobs, found.their_scores.top_logprobs
    return all(is_close(a, b) for a, b in zip(ours, theirs, strict=True))


def is_close(ours: float, theirs: float) -> bool:
    """Log-probabilities, up to rounding."""
    return abs(ours - theirs) <= CLOSE * max(1.0, abs(theirs))


def _near_tie_of_experts(
    ask: Callable[[Submit], object], submit: Submit, found: Difference,
    rows: SamplingRows | None, theirs: Tensor | None,
) -> NearTie | None:  # fmt: skip
    """All tokens before the difference are given, in one step: a position whose state was rolled
    back, or that was preempted, was computed twice, and only the second may have chosen others."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    given = replace(submit, prompt=list(found.before), sampling=sampling)

    def logits(nudge: Nudge | None) -> tuple[Tensor, Watch]:
        with Watch(nudge).installed() as watch:
            ask(given)
        return watch.logits, watch

    def is_ours(computed: Tensor) -> bool:
        if (
            rows is not None
            and int(sample(computed.clone(), repeated(rows, 1)).tokens) != found.ours
        ):
            return False
        return _has_scores(computed, found.our_scores)

    def is_theirs(computed: Tensor) -> bool:
        if theirs is not None:
            return bool(((computed - theirs).abs() <= CLOSE).all())
        return _has_scores(computed, found.their_scores)

    plain, watch = logits(None)
    # So many tokens at once may themselves choose as the other answer did.
    wanted = is_ours if is_theirs(plain) else is_theirs if is_ours(plain) else None
    if wanted is None:
        return None
    nudges = sorted(expert_nudges(watch), key=lambda nudge: abs(nudge.by))
    for nudge in nudges:
        if wanted(logits(nudge)[0]):
            where = f"router {nudge.call}, token {nudge.row} of {len(watch.routed[nudge.call][0])}"
            return NearTie("experts", abs(nudge.by), where)
    return None


def _has_scores(logits: Tensor, scores: TokenLogprobs | None) -> bool:
    if scores is None:
        return True
    logprobs = logits[0].log_softmax(-1)
    tops = logprobs.sort(descending=True).values[: len(scores.top_logprobs)].tolist()
    return is_close(logprobs[scores.token].item(), scores.logprob) and all(
        is_close(ours, theirs) for ours, theirs in zip(tops, scores.top_logprobs, strict=True)
    )
