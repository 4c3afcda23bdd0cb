"""What the sampler gave, as the host answers it: tokens, reasons of rows without one, logprobs.

Takes a `Sampled` that has reached the host.
"""

from __future__ import annotations

import torch

from manyroots.kernels.sampling.rows import ALL_FORBIDDEN, FAILED, NO_FAULT, NOT_FINITE, Sampled
from manyroots.runner.inputs import Int64s
from manyroots.step import Int32s, TokenLogprobs

REASONS = {
    NOT_FINITE: "the model gave logits that are not finite",
    ALL_FORBIDDEN: (
        "no token is left to choose: min_tokens forbids those that end the text, and there are no "
        "others. Lower min_tokens or give fewer stop_token_ids"
    ),
}


def faults(codes: Int32s, told: dict[int, str], at: Int64s) -> dict[int, str]:
    """Of the rows at these indices, those that have no token: place in `at` -> why. `codes`: their
    faults; `told`: as in `Sampled`."""
    reasons = {}
    for place in (codes != NO_FAULT).nonzero()[0].tolist():
        code, index = int(codes[place]), int(at[place])
        reasons[place] = told[index] if code == FAILED else REASONS[code]
    return reasons


def logprobs(
    sampled: Sampled, at: Int64s, num_top: dict[int, int], vocab: int
) -> dict[int, TokenLogprobs]:
    """By place in `at`: of the samples at these indices, those that want so many of the likeliest
    beside their token, and have one."""
    if not num_top:
        return {}
    wanted = list(num_top)
    here = Sampled(sampled.packed[:, torch.from_numpy(at[wanted])])
    columns = zip(
        wanted, here.faults.tolist(), here.tokens.tolist(), here.logprobs.tolist(),
        here.ranks.tolist(), here.top_ids.tolist(), here.top_logprobs.tolist(), strict=True,
    )  # fmt: skip
    given = {}
    for place, fault, token, logprob, rank, ids, values in columns:
        if fault == NO_FAULT:
            count = min(num_top[place], vocab)
            entry = TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
            given[place] = entry
    return given
