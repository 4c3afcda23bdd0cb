"""Models that several tests of a file build engines of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.helpers.real_engine import RealWorld


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One of each mix of layers that is asked for."""
    made: list[RealWorld] = []

    @cache
    def world(mix: str) -> RealWorld:
        made.append(RealWorld(tmp_path_factory.mktemp("world"), mix))
        return made[-1]

    yield world
    for each in made:
        each.close()
