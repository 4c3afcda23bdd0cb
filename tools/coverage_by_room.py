"""Which part of each room the tests run, as a table: `python -m tools.coverage_by_room`.

Takes the JSON report of coverage.py from standard input; prints Markdown. `make coverage` runs it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import PurePath
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Statements by room, files at the top of the package together, and all of them."""
    statements: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for name, file in report["files"].items():
        _, *folders, _ = PurePath(name).parts
        for room in (folders[0] if folders else "(top)", "all"):
            statements[room] += file["summary"]["num_statements"]
            covered[room] += file["summary"]["covered_lines"]
    lines = ["| room | statements | run by tests |", "|---|---:|---:|"]
    for room in sorted(statements, key=lambda room: (room == "all", room)):
        share = covered[room] / statements[room] if statements[room] else 1.0
        lines.append(f"| {room} | {statements[room]:,} | {share:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.load(sys.stdin)))
