"""Makes `captured/NAME.jsonl` of what an agent sent, as its script wrote it to MANYROOTS_CAPTURE.

    python -m tests.clients.shorten NAME FILE

Every field stays, with its type. Texts become short ones of our own, paths and ids are taken out,
and of tools a few of each type stay, the forced one among them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CAPTURED = Path(__file__).parent / "captured"
MAX_TEXT = 24
MAX_TOOLS = 3
_KEPT = frozenset(
    {"type", "role", "name", "effort", "keep", "model", "include", "tool_choice", "id", "call_id",
     "tool_use_id", "tool_call_id", "$schema", "$ref", "pattern", "format", "enum"}
)  # fmt: skip
"""Words of the API, ids of calls, and what a schema means; never texts."""


def shortened(value: Any, name: str = "") -> Any:
    if name == "arguments" and isinstance(value, str):
        return json.dumps(shortened(json.loads(value)))
    if isinstance(value, str):
        is_text = name not in _KEPT and (len(value) > MAX_TEXT or "/" in value)
        return f"a text of {len(value)} characters" if is_text else value
    if isinstance(value, list):
        return [shortened(item, name) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item, key) for key, item in value.items()}
    return value


def shortened_body(body: dict[str, Any], forced: set[str]) -> dict[str, Any]:
    short = dict(shortened({key: item for key, item in body.items() if key != "tools"}))
    if "tools" in body:
        short["tools"] = shortened(_some(body["tools"], forced))
    return short


def _some(tools: list[Any], forced: set[str]) -> list[Any]:
    """The forced ones, and the first few of each type."""
    counts: dict[Any, int] = {}
    kept = []
    for tool in tools:
        kind = tool.get("type")
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= MAX_TOOLS or tool.get("function", tool).get("name") in forced:
            kept.append(tool)
    return kept


def main() -> int:
    name, file = sys.argv[1:]
    exchanges = [json.loads(line) for line in Path(file).read_text().splitlines()]
    forced = {
        choice.get("function", choice).get("name")
        for item in exchanges
        if isinstance(choice := (item["body"] or {}).get("tool_choice"), dict)
    }
    short = [
        {
            "method": item["method"],
            "path": item["path"],
            "body": None if item["body"] is None else shortened_body(item["body"], forced),
        }
        for item in exchanges
    ]
    CAPTURED.mkdir(exist_ok=True)
    lines = [json.dumps(item, ensure_ascii=False) for item in short]
    (CAPTURED / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
