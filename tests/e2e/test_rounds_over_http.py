"""Clients in rounds over HTTP, in half of the memory: part of `python -m
tests.soaks.served_rounds`."""

from __future__ import annotations

import pytest

from tests.soaks.served_rounds import Plan, run


@pytest.mark.slow
def test_s07_every_token_that_is_not_found_has_a_reason_in_the_response_and_the_metrics() -> None:
    """S07, H12: and nearly all is found that the best policy finds in as much memory. In turn:
    clients that begin together don't find each other's head, and how many do is up to the
    machine."""
    told = run("qwen3.5", Plan.draw(6, 4, seed=1), share=0.5, is_in_turn=True)
    assert told["requests"] == 24
    assert told["lost_by_response"] == told["lost_by_metrics"]
    assert set(told["lost_by_response"]) <= {"cold", "checkpoint"}
    assert told["hit_rate"] >= 0.9 * told["best_offline"]
