"""The short form of `python -m tests.soaks.adapter_churn`."""

from __future__ import annotations

from pathlib import Path

from tests.soaks.adapter_churn import Churn


def test_a01_loads_replacements_and_unloads_under_streams(tmp_path: Path) -> None:
    """A01, W04, W06: each request has its own weights' tokens, and no byte is left at the end.
    Reads end beside steps, so a part has more or fewer evictions: there are parts until there were
    enough."""
    churn = Churn(tmp_path, seed=2)
    for part in range(10):
        churn.run(60, part)
        if churn.counts["evictions"] > 5:
            break
    churn.close()
    assert churn.counts["requests"] > 50
    assert churn.counts["evictions"] > 5
    assert min(churn.counts[kind] for kind in ("loads", "replacements", "unloads")) > 5
