"""From logits to tokens.

Each row's choice depends on its own logits, parameters and draw alone, never on its neighbours.
Rows that only want the likeliest token cost one pass; the vocabulary is sorted only for rows that
ask for top-p without top-k.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.draws import uniform
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Int32s


class Sampler:
    """Chooses one token per row of logits."""

    def __init__(self, batch: PersistentBatch, state: SamplingState) -> None:
        self._batch = batch
        self._state = state

    def sample(self, logits: Tensor, rows: Int32s) -> tuple[Int32s, Int32s]:
        """Tokens for `rows`, given float32 logits [len(rows), vocabulary].

        Also the indices (into `rows`) whose logits were not finite, so that their tokens mean
        nothing. Changes `logits` where rows ask for it.
        """
        for index in np.flatnonzero(self._state.edits_logits[rows]).tolist():
            self._edit(logits[index], int(rows[index]))
        best, greedy = logits.max(dim=-1)
        tokens = greedy.cpu().numpy().astype(np.int32)
        broken = np.flatnonzero(~torch.isfinite(best).cpu().numpy()).astype(np.int32)
        random = np.flatnonzero(self._state.temperature[rows] > 0.0)
        if len(random):
            tokens[random] = self._draw(logits[torch.from_numpy(random)], rows[random])
        return tokens, broken

    def _edit(self, logits: Tensor, row: int) -> None:
        """Bias, minimum length and penalties of one row, in place."""
        params = self._state.params[row]
        known = self._batch.known(row)
        num_prompt = int(self._batch.num_prompt_tokens[row])
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if len(known) - num_prompt < params.min_tokens and self._state.stop_ids[row]:
            logits[torch.tensor(self._state.stop_ids[row], device=logits.device)] = -torch.inf
        if params.repetition_penalty != 1.0:
            ids = torch.from_numpy(np.unique(known).astype(np.int64)).to(logits.device)
            seen = logits[ids]
            factor = params.repetition_penalty
            logits[ids] = torch.where(seen > 0, seen / factor, seen * factor)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            said, counts = np.unique(known[num_prompt:], return_counts=True)
            cost = params.frequency_penalty * counts + params.presence_penalty
            ids = torch.from_numpy(said.astype(np.int64)).to(logits.device)
            logits[ids] -= torch.from_numpy(cost.astype(np.float32)).to(logits.device)

    def _draw(self, logits: Tensor, rows: Int32s) -> Int32s:
        state = self._state
        draws = uniform(state.seed[rows], self._batch.num_output_tokens(rows))
        temperature = torch.from_numpy(state.temperature[rows]).to(logits.device)
        scaled = logits / temperature[:, None]
        tokens = np.empty(len(rows), np.int32)
        # Two ways to the same distribution; which one a row takes is its own parameters' affair.
        is_cut = (state.top_k[rows] > 0) | (state.top_p[rows] < 1.0) | (state.min_p[rows] > 0.0)
        for chosen, pick in ((~is_cut, self._pick_any), (is_cut, self._pick_cut)):
            index = np.flatnonzero(chosen)
            if len(index):
                u = torch.from_numpy(draws[index]).to(logits.device)
                picked = pick(scaled[torch.from_numpy(index)], rows[index], u)
                tokens[index] = picked.cpu().numpy()
        return tokens

    def _pick_any(self, logits: Tensor, rows: Int32s, draws: Tensor) -> Tensor:
        return _invert(torch.softmax(logits, dim=-1), draws)

    def _pick_cut(self, logits: Tensor, rows: Int32s, draws: Tensor) -> Tensor:
        """Top-k, then top-p and min-p among what is left, likeliest first."""
        state, vocab = self._state, logits.shape[-1]
        top_k = np.where(state.top_k[rows] > 0, np.minimum(state.top_k[rows], vocab), vocab)
        widest = int(top_k.max())
        if widest < vocab:
            ordered, ids = logits.topk(widest, dim=-1)
        else:
            ordered, ids = logits.sort(dim=-1, descending=True)
        k = torch.from_numpy(top_k).to(logits.device)
        rank = torch.arange(widest, device=logits.device)
        ordered = ordered.masked_fill(rank[None, :] >= k[:, None], -torch.inf)
        probs = torch.softmax(ordered, dim=-1)
        top_p = torch.from_numpy(state.top_p[rows]).to(logits.device)
        min_p = torch.from_numpy(state.min_p[rows]).to(logits.device)
        before = probs.cumsum(-1) - probs
        dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
        dropped |= probs < min_p[:, None] * probs[:, :1]
        dropped[:, 0] = False
        picked = _invert(probs.masked_fill(dropped, 0.0), draws)
        return ids.gather(-1, picked[:, None])[:, 0]


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """For each row, the first index whose running sum of weights exceeds draw x total."""
    sums = weights.to(torch.float64).cumsum(-1)
    targets = draws[:, None] * sums[:, -1:]
    picked = torch.searchsorted(sums, targets, right=True)[:, 0]
    # A target rounded up to the total lies past the end; the last index with weight is meant.
    last = (sums < sums[:, -1:]).sum(-1)
    return torch.minimum(picked, last)
