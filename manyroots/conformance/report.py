"""What the kit found: findings, rows of them, and the report as JSON.

A row is one check of one pair. A leak by any measure makes the row a leak; else one measure that
judged suffices to say that the two are kept apart; else the row is not judged, with the reasons.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.Enum):
    """Of a finding or a row."""

    LEAK = "LEAK"
    APART = "kept apart"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one measure says."""

    by: str
    """`outputs`, `cached_tokens`, `usage`, `times`, `names` or `events`; "" for a row that can't
    be run."""
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check of one pair."""

    check: str
    pair: str
    findings: Sequence[Finding] = field(default_factory=tuple)

    @property
    def verdict(self) -> Verdict:
        found = {finding.verdict for finding in self.findings}
        return next((v for v in (Verdict.LEAK, Verdict.APART) if v in found), Verdict.NOT_JUDGED)

    @property
    def why(self) -> str:
        """Of the findings that decide the row."""
        deciding = [one for one in self.findings if one.verdict is self.verdict]
        texts = (f"{one.by}: {one.why}" if one.by else one.why for one in deciding)
        return "; ".join(dict.fromkeys(texts))


def not_judged(why: str, by: str = "") -> Finding:
    return Finding(by, Verdict.NOT_JUDGED, why)


def exit_code(rows: Sequence[CheckRow]) -> int:
    """0: something was judged and nothing leaks; 1: a leak; 2: nothing could be judged."""
    verdicts = {row.verdict for row in rows}
    if Verdict.LEAK in verdicts:
        return 1
    return 0 if Verdict.APART in verdicts else 2


def rows_as_json(rows: Sequence[CheckRow]) -> list[dict[str, Any]]:
    return [
        {
            "check": row.check,
            "pair": row.pair,
            "verdict": row.verdict.value,
            "findings": [
                {"by": one.by, "verdict": one.verdict.value, "why": one.why} for one in row.findings
            ],
        }
        for row in rows
    ]
