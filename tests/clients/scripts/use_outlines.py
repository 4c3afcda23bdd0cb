"""outlines: types, choices, expressions and grammars, as OpenAI's, vLLM's and SGLang's server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import outlines
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main


class City(BaseModel):
    name: str = Field(max_length=20)
    size: int = Field(ge=0, le=999)


def model(kind: str) -> Any:
    client = OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
    return getattr(outlines, f"from_{kind}")(client, MODEL)


def typed(kind: str) -> None:
    City.model_validate_json(model(kind)("A city as JSON.", City, max_tokens=300, temperature=0))
    parts = model(kind).stream("A city as JSON.", City, max_tokens=300, temperature=0)
    assert json.loads("".join(parts))


def shaped(kind: str) -> None:
    ask = model(kind)
    assert ask("Yes or no?", Literal["yes", "no"], max_tokens=20) in ("yes", "no")
    assert len(ask("A number.", Regex("[0-9]{3}"), max_tokens=20)) == 3
    grammar = 'root ::= "a" | "b"' if kind == "sglang" else 'start: "a" | "b"'
    assert ask("A letter.", CFG(grammar), max_tokens=20) in ("a", "b")


def named(check: Callable[[str], None], kind: str) -> Callable[[], None]:
    def run() -> None:
        check(kind)

    run.__name__ = f"{check.__name__}_as_{kind}"
    return run


CHECKS = [
    *(named(typed, kind) for kind in ("openai", "vllm", "sglang")),
    *(named(shaped, kind) for kind in ("vllm", "sglang")),
]

if __name__ == "__main__":
    main(CHECKS)
