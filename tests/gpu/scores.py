"""Distributions over the next token, as an engine gives them, and how far two may be apart.

A sampled sequence leaves its twin for good where two tokens are almost equally likely, so outputs
are not compared token by token with another engine's. Instead the CPU scores each sequence that the
GPU gave. At every position, the CPU's distribution after the same tokens must give the token that
the GPU chose there, within rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.sampling.exact import uniform
from manyroots.messages import Submit
from manyroots.step import TokenLogprobs
from tests.gpu.engines import Outputs
from tests.gpu.models import VOCAB


def _distribution(entry: TokenLogprobs) -> Tensor:
    """Log-probabilities [VOCAB] in the order of tokens."""
    out = torch.full((VOCAB,), torch.nan)
    out[list(entry.top_tokens)] = torch.tensor(entry.top_logprobs)
    return out


def prompt_scores(outputs: Outputs) -> dict[int, Tensor]:
    """Of each request asked for them: [prompt tokens - 1, VOCAB], row i after token i."""
    return {
        number: torch.stack([_distribution(e) for o in news for e in o.prompt_logprobs])
        if any(o.prompt_logprobs for o in news)
        else torch.empty(0, VOCAB)
        for number, news in outputs.items()
    }


def output_scores(outputs: Outputs) -> dict[int, Tensor]:
    """The same of generated tokens: row i is what token i was chosen from."""
    return {
        number: torch.stack([_distribution(e) for o in news for e in o.logprobs])
        for number, news in outputs.items()
    }


def behind_prompts(requests: list[Submit], scores: dict[int, Tensor]) -> dict[int, Tensor]:
    """Of scores of prompts with their outputs: those that the outputs were chosen from."""
    return {int(r.request_id): scores[int(r.request_id)][len(r.prompt) - 1 :] for r in requests}


def flat(scores: dict[int, Tensor]) -> Tensor:
    return torch.cat([scores[number] for number in sorted(scores)])


@dataclass(frozen=True, slots=True)
class Slack:
    """How far distributions of the GPU may be from the exact ones."""

    each: float
    """Of every log-probability."""
    row: float
    """Root of the mean square over the tokens of one place."""
    mean: float
    """Of all places' roots, on average."""

    def check(self, what: str, actual: Tensor, exact: Tensor) -> str:
        """Raise AssertionError if one is too far, or all are on average; else give the worst."""
        assert actual.shape == exact.shape, f"{what}: {actual.shape} scores, {exact.shape} expected"
        error = actual - exact
        assert bool(torch.isfinite(error).all()), f"{what}: not finite"
        rows = roots(error)
        at, token = divmod(int(error.abs().argmax()), VOCAB)
        found = (
            (f"token {token} behind place {at}", float(error.abs().max()), self.each),
            (f"place {int(rows.argmax())}", float(rows.max()), self.row),
            ("all places", float(rows.mean()), self.mean),
        )
        for name, value, limit in found:
            assert value <= limit, f"{what}, {name}: {value:.3g} off, {limit:.3g} is allowed"
        used = max(value / limit for _, value, limit in found)
        return f"{len(error)} {what} within {found[0][1]:.1e} ({used:.0%} of what is allowed)"


def roots(error: Tensor) -> Tensor:
    """Of each row of errors, the root of the mean square."""
    return error.square().mean(-1).sqrt()


def check_choices(
    what: str, requests: list[Submit], tokens: dict[int, list[int]], exact: dict[int, Tensor],
    slack: float,
) -> int:  # fmt: skip
    """Raise AssertionError if a token is not the one that its exact distribution gives, where
    log-probabilities may be `slack` off. Give how many tokens were checked."""
    count = 0
    for request in requests:
        number = int(request.request_id)
        assert len(tokens[number]) == request.sampling.max_tokens, f"{what}: {number} ended early"
        for index, token in enumerate(tokens[number]):
            miss = _miss(request, index, token, exact[number][index], slack)
            assert miss <= 0.0, f"{what}: token {index} of request {number} misses by {miss:.3g}"
            count += 1
    return count


def _miss(request: Submit, index: int, token: int, logprobs: Tensor, slack: float) -> float:
    """By how much `token` is not the choice; not above 0 if it may be."""
    params = request.sampling
    if params.temperature == 0.0:
        return float(logprobs.max() - logprobs[token]) - 2 * slack
    draw = float(uniform(np.array([request.seed], np.uint64), np.array([index]))[0])
    heat = params.temperature
    is_kept, may_be_kept = torch.ones(VOCAB, dtype=torch.bool), torch.zeros(VOCAB, dtype=torch.bool)
    if params.top_k:
        # A token about as likely as the last one kept may be kept instead of it.
        last = logprobs.sort(descending=True).values[params.top_k - 1]
        is_kept, may_be_kept = logprobs > last + 2 * slack, (logprobs - last).abs() <= 2 * slack
        if not bool((is_kept | may_be_kept)[token]):
            return float(last - logprobs[token])
    weights = torch.exp((logprobs - logprobs.max()).double() / heat)
    ids, own = torch.arange(VOCAB), float(weights[token])
    before, after = (
        (float(weights[is_kept & side].sum()), float(weights[may_be_kept & side].sum()))
        for side in (ids < token, ids > token)
    )
    most_after, most_before = after[0] + after[1], before[0] + before[1]
    begin = before[0] / (before[0] + own + most_after)
    end = (most_before + own) / (most_before + own + after[0])
    # Logits that are each up to s off change the odds of any set of tokens by up to e^(2s).
    odds = math.exp(2 * slack / heat)
    low, high = _times_odds(begin, 1 / odds) - 1e-6, _times_odds(end, odds) + 1e-6
    return max(low - draw, draw - high, 0.0)


def _times_odds(probability: float, factor: float) -> float:
    return probability * factor / (probability * factor + (1.0 - probability))
