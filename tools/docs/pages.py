"""Every generated file below docs/, by the function that gives its text.

`python -m tools.docs` writes them. `tests/architecture/test_generated.py` and
`tests/unit/docs` compare them with the code, so that a page never says what it no longer does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import charts, errors, flags, http, ledger, matrix, metrics, python_api

ROOT = Path(__file__).parents[2]
Pages = dict[str, Callable[[], str]]
QUICK: Pages = {
    "docs/images/decode-beside-vllm.svg": charts.decode,
    "docs/images/traffic-beside-vllm.svg": charts.traffic,
    "docs/reference/errors.md": errors.page,
    "docs/reference/flags.md": flags.page,
    "docs/reference/http.md": http.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/python.md": python_api.page,
    "docs/requirement-tests.md": ledger.page,
}
SLOW: Pages = {"docs/reference/features.md": matrix.page}
"""Those that import torch."""


def stale(pages: Pages) -> list[str]:
    """Paths whose file is not what the code gives now."""
    return [path for path, make in pages.items() if _read(path) != make()]


def write(pages: Pages) -> list[str]:
    """Write what is stale; give its paths."""
    changed = stale(pages)
    for path in changed:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(pages[path]())
    return changed


def _read(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.exists() else None
