"""The requests that both sides compute: over base and adapters, short and long, few and many."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import manyroots.sampling
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from tests.gpu.models import NAMES, VOCAB

_LAYERS_ALONE = (*NAMES[:-1], None)
"""Adapters whose decode steps are graphs: the last one changes the embedding and the head."""


def request(number: int, prompt: list[int], adapter: str | None, **sampling: Any) -> Submit:
    # Whole distributions are compared; callers of a server get no more than a few.
    with mock.patch.object(manyroots.sampling, "MAX_LOGPROBS", VOCAB):
        params = SamplingParams(**{"temperature": 0.0, **sampling})
    name = None if adapter is None else AdapterName(adapter)
    return Submit(RequestId(number), prompt, None, params, number, (), adapter=name)


def loads() -> list[list[Submit]]:
    """One request of each adapter, alone: afterwards all are loaded, and nothing depends on when
    a load ends."""
    return [[request(1, [5], name, max_tokens=1)] for name in NAMES]


def few(
    owners: tuple[str | None, ...] = _LAYERS_ALONE, *, count: int = 12, **sampling: Any
) -> list[Submit]:
    """Prompts of one token to many pages and several chunks, some beginning alike."""
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(3, VOCAB, (40,), generator=generator).tolist()
    made = []
    for number in range(count):
        tail = torch.randint(3, VOCAB, (1 + 33 * number,), generator=generator).tolist()
        owner = owners[number % len(owners)]
        prompt = [*shared, *tail] if number % 3 == 0 else tail
        made.append(request(number + 1, prompt, owner, **{"max_tokens": 10, **sampling}))
    return made


def odd() -> list[Submit]:
    """With an adapter of the embedding and the head among them."""
    return few((NAMES[-1], None, NAMES[0]), count=6, max_tokens=3)


def many() -> list[Submit]:
    """As many as run at once at most, ending one after the other: decode steps of every size."""
    generator = torch.Generator().manual_seed(12)
    made = []
    for number in range(80):
        prompt = torch.randint(3, VOCAB, (1 + number % 7,), generator=generator).tolist()
        owner = _LAYERS_ALONE[number * len(_LAYERS_ALONE) // 80]
        made.append(request(number + 1, prompt, owner, max_tokens=2 + number // 5))
    return made


def grown(count: int = 7) -> list[Submit]:
    """So much generated that whole pages hold nothing else."""
    return few(count=count, max_tokens=40)


def resumed(requests: list[Submit], tokens: dict[int, list[int]]) -> list[Submit]:
    """Prompts of what was generated: found in the cache, where decode steps put it."""
    return [
        request(
            int(r.request_id),
            [*r.prompt, *tokens[int(r.request_id)]],
            r.adapter,
            max_tokens=2,
            logprobs=VOCAB,
        )
        for r in requests
    ]


def continued(requests: list[Submit], tokens: dict[int, list[int]]) -> list[Submit]:
    """The same prompts, each followed by its generated tokens, to be scored."""
    return [
        request(
            int(r.request_id),
            [*r.prompt, *tokens[int(r.request_id)]],
            r.adapter,
            max_tokens=1,
            prompt_logprobs=VOCAB,
        )
        for r in requests
    ]
