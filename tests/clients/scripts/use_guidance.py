"""guidance: programs of roles, choices and expressions, as OpenAI's and as vLLM's server."""

from __future__ import annotations

from typing import Any

from guidance import assistant, gen, select, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel
from reporting import KEY, MODEL, V1, main


def asked(model: Any, question: str, wanted: Any) -> str:
    with user():
        model += question
    with assistant():
        model += wanted
    return str(model["found"])


def plain_text() -> None:
    made = OpenAI(MODEL, base_url=V1, api_key=KEY, echo=False)
    assert asked(made, "Say something.", gen("found", max_tokens=8, temperature=0.5))


def vllm() -> Any:
    return VLLMModel(MODEL, base_url=V1, api_key=KEY, echo=False)


def an_expression() -> None:
    found = asked(vllm(), "A number.", gen("found", regex="[0-9]{2}", max_tokens=8))
    assert len(found) == 2
    assert found.isdecimal()


def a_choice() -> None:
    assert asked(vllm(), "Yes or no?", select(["yes", "no"], name="found")) in ("yes", "no")


CHECKS = [plain_text, an_expression, a_choice]

if __name__ == "__main__":
    main(CHECKS)
