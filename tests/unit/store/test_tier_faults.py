"""A slice of `python -m tests.soaks.tier_faults`, which has at least 200 faults of each kind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.soaks.tier_faults import KINDS
from tests.unit.store.tiers import server_program


@pytest.mark.slow
def test_t03_t08_no_fault_of_a_tier_gives_a_wrong_token_a_crash_or_a_leak() -> None:
    """T03, T08, T12, T14: every kind; those of Redis only where there is a server."""
    kinds = [kind for kind in KINDS if server_program() or "redis" not in kind]
    flags = [flag for kind in kinds for flag in ("--kind", kind)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soaks.tier_faults", "--count", "1", *flags],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, dict[str, int]] = {}
    for line in done.stdout.splitlines():
        told |= json.loads(line)
    assert list(told) == kinds
    if not server_program():
        pytest.skip("no redis-server on this machine: its faults were left out")
