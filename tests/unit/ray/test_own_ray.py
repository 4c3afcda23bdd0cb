"""A Ray of this machine that is too slow to start is started once more."""

from __future__ import annotations

from typing import Any

import pytest

from manyroots.ray.replicas import start_own_ray

ray = pytest.importorskip("ray")


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_m01_a_second_try_is_made_and_no_third(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def init(*, num_cpus: int, **rest: Any) -> None:
        tries.append(num_cpus)
        if len(tries) <= num_failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    if num_failures == 2:
        with pytest.raises(Exception, match="timed out"):
            start_own_ray(3)
    else:
        start_own_ray(3)
    assert tries == [3] * min(num_failures + 1, 2)
