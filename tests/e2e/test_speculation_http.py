"""Drafts over HTTP: usage and metrics count them, and tenants get none of each other's text."""

from __future__ import annotations

import pytest
from openai.types import CompletionUsage

from tests.e2e.conftest import Server
from tests.helpers.tiny_server import MODEL, tiny_server

CONFIG = '{"method": "suffix", "num_speculative_tokens": 4, "adaptive": false}'


def ask(server: Server, salt: str, *, stream: bool = False) -> tuple[str, int, int]:
    """The text of a drawn answer; how many of its tokens were guessed, and how many wrong guesses
    there were."""
    asked = {
        "model": MODEL, "prompt": [5, 6, 7, 8, 9], "max_tokens": 40, "temperature": 1.0, "seed": 3,
        "extra_body": {"cache_salt": salt, "ignore_eos": True},
    }  # fmt: skip
    create = server.client().completions.create
    if stream:
        chunks = list(create(stream=True, stream_options={"include_usage": True}, **asked))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        return text, *counts(chunks[-1].usage)
    made = create(**asked)
    return made.choices[0].text, *counts(made.usage)


def counts(usage: CompletionUsage | None) -> tuple[int, int]:
    assert usage is not None
    details = usage.completion_tokens_details
    if details is None:
        return 0, 0
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None
    assert rejected is not None
    assert accepted < usage.completion_tokens
    return accepted, rejected


@pytest.mark.slow
def test_v02_usage_and_metrics_count_drafts_of_the_own_tenant_alone() -> None:
    """V02: a tenant's repeated answer is guessed from its own output. The first answer of another
    tenant is drafted as if nothing had been said before. A stream reports the same counts."""
    with tiny_server("--speculative-config", CONFIG) as server:
        first, again = ask(server, "a"), ask(server, "a")
        other, streamed = ask(server, "b"), ask(server, "b", stream=True)
        assert again[0] == first[0]
        assert (other, streamed) == (first, again)
        assert again[1] > first[1] + 10
        accepted = sum(one[1] for one in (first, again, other, streamed))
        rejected = sum(one[2] for one in (first, again, other, streamed))
        name = "vllm:spec_decode_num_{}_tokens_total"
        server.wait_for(name.format("accepted"), lambda value: value == accepted)
        server.wait_for(name.format("draft"), lambda value: value == accepted + rejected)
        server.wait_until_idle()
