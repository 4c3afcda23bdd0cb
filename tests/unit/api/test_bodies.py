"""A slice of `python -m tests.soaks.bodies`."""

from __future__ import annotations

import pytest

from tests.soaks.bodies import run

pytestmark = pytest.mark.anyio
SEEDS = 2_000


async def test_g11_no_route_answers_generated_bodies_with_5xx() -> None:
    """G11: of the server's own OpenAPI document; enough of them are good ones to get further than
    the checks."""
    faults, statuses = await run(0, SEEDS)
    assert not faults, faults[0]
    assert statuses[200] > SEEDS // 8
    assert statuses[400] > SEEDS // 8
