"""The priority of a request over HTTP (L08): passed on, or refused where it would do nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from manyroots.engine.wire import SubmitReader, SubmitWriter
from tests.unit.api.fake_engine import INFO, FakeEngine
from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio


def harness(policy: str = "priority") -> Harness:
    return Harness(FakeEngine(info=dataclasses.replace(INFO, scheduling_policy=policy)))


@pytest.mark.parametrize("priority", [-7, 0, 3, 2**31 - 1, None])
async def test_l08_priority_reaches_the_engine(priority: int | None) -> None:
    """L08: of completions and of chats, every prompt and every choice, across the wire."""
    server = harness()
    assert (await server.complete(["a", "b"], n=2, priority=priority)).status_code == 200
    assert (await server.chat(priority=priority)).status_code == 200
    wanted = priority or 0
    assert [submit.priority for submit in server.engine.submitted] == [wanted] * 5
    for submit in server.engine.submitted:
        assert SubmitReader().decode(SubmitWriter().encode(submit)).priority == wanted


@pytest.mark.parametrize("policy", ["fcfs", "pack", "fair"])
async def test_l08_priority_is_refused_where_it_would_have_no_effect(policy: str) -> None:
    """L08: the answer names the value and what to do; 0 is what happens anyway."""
    server = harness(policy)
    for response in (await server.complete(priority=5), await server.chat(priority=5)):
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "priority"
        assert "priority is 5" in error["message"]
        assert "--scheduling-policy priority" in error["message"]
    assert (await server.complete(priority=0)).status_code == 200


@pytest.mark.parametrize("priority", [1.5, "high", True, [1], 2**31, -(2**70)])
async def test_l08_a_priority_that_is_none_is_refused(priority: Any) -> None:
    server = harness()
    response = await server.complete(priority=priority)
    assert response.status_code == 400
    assert error_of(response)["param"] == "priority"
    assert not server.engine.submitted
