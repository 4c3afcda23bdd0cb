from __future__ import annotations

from tools.coverage_by_room import table


def test_files_are_added_up_by_room() -> None:
    def of(statements: int, covered: int) -> dict[str, dict[str, int]]:
        return {"summary": {"num_statements": statements, "covered_lines": covered}}

    report = {
        "files": {
            "manyroots/cache/tree.py": of(100, 90),
            "manyroots/cache/families/full.py": of(100, 100),
            "manyroots/ids.py": of(10, 5),
            "manyroots/api/__init__.py": of(0, 0),
        }
    }
    assert table(report).splitlines()[2:] == [
        "| (top) | 10 | 50% |",
        "| api | 0 | 100% |",
        "| cache | 200 | 95% |",
        "| all | 210 | 93% |",
    ]
