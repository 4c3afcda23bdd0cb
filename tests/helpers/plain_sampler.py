"""The sampler's rules written plainly, one row at a time, for tests to compare with.

Python's own numbers throughout. Tokens are ordered by logit, of equals the lower id first; top-k
keeps the first k of that order, top-p the shortest beginning of those that reaches its share, min-p
what is likely enough beside the likeliest. The token drawn is the first by id at which the running
sum of kept probabilities exceeds number x total.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from manyroots.kernels.sampling.exact import uniform
from manyroots.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PlainRow:
    """All that a row's token may depend on."""

    logits: list[float]
    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    mask: list[bool] | None = None
    """Of each token, whether a grammar allows it."""

    def order(self, logits: Sequence[float]) -> list[int]:
        return sorted(range(len(logits)), key=lambda token: (-logits[token], token))

    def edited(self) -> list[float]:
        """As float32, which is what logits are."""
        params, logits = self.params, np.array(self.logits, np.float32)
        for token, bias in params.logit_bias.items():
            logits[token] += np.float32(bias)
        if len(self.output) < params.min_tokens:
            logits[list(self.stop_ids)] = -np.inf
        if self.mask is not None:
            logits[~np.array(self.mask)] = -np.inf
        factor = np.float32(params.repetition_penalty)
        for token in {*self.prompt, *self.output}:
            is_up = logits[token] > 0
            logits[token] = logits[token] / factor if is_up else logits[token] * factor
        for token, count in Counter(self.output).items():
            frequency, presence = map(
                np.float32, (params.frequency_penalty, params.presence_penalty)
            )
            logits[token] -= frequency * np.float32(count) + presence
        return [float(logit) for logit in logits]

    def token(self) -> int:
        params, logits = self.params, self.edited()
        order = self.order(logits)
        if params.temperature < 1e-5:
            return order[0]
        best = logits[order[0]]
        weights = [math.exp((logit - best) / params.temperature) for logit in logits]
        kept = order[: params.top_k] if params.top_k > 0 else order
        total, before, nucleus = math.fsum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if params.top_p < 1.0 and before >= params.top_p * total and nucleus:
                break
            nucleus.append(token)
            before += weights[token]
        kept = sorted(token for token in nucleus if weights[token] >= params.min_p)
        target = self.number() * math.fsum(weights[token] for token in kept)
        running = 0.0
        for token in kept:
            running += weights[token]
            if running > target:
                return token
        return max(token for token in kept if weights[token] > 0)

    def number(self) -> float:
        return float(uniform(np.array([self.seed], np.uint64), np.array([len(self.output)]))[0])
