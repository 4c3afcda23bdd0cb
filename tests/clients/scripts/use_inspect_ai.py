"""inspect-ai: evaluations through its providers for OpenAI's, vLLM's and Anthropic's servers, with
logprobs, tools and typed answers."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ResponseSchema
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel
from reporting import KEY, MODEL, URL, V1, main

os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": V1, "VLLM_API_KEY": KEY}
os.environ |= {"VLLM_BASE_URL": V1, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": URL}


class Colour(BaseModel):
    is_warm: bool


@tool
def add() -> Any:
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: the first
            y: the second
        """
        return x + y

    return execute


def evaluated(provider: str, solver: Any = None, **options: Any) -> Any:
    samples = [Sample(input=f"Say {number}.", target=str(number)) for number in range(2)]
    task = Task(dataset=samples, solver=solver or [generate()], scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        [log] = inspect_ai.eval(
            task, model=f"{provider}/{MODEL}", display="none", log_dir=folder, max_tokens=40,
            **options,
        )  # fmt: skip
        assert log.status == "success", log.error
        return log.samples[0].output


def every_provider() -> None:
    for responses in (False, True):
        assert evaluated("openai", model_args={"responses_api": responses}).completion
    for provider in ("vllm", "anthropic"):
        assert evaluated(provider).completion


def choices_with_logprobs() -> None:
    output = evaluated("vllm", num_choices=2, logprobs=True, top_logprobs=3, temperature=1.0)
    assert len(output.choices) == 2
    assert len(output.choices[1].logprobs.content[0].top_logprobs) == 3


def tools() -> None:
    for provider in ("vllm", "anthropic"):
        solver = [use_tools(add(), tool_choice="any"), generate(tool_calls="none")]
        assert evaluated(provider, solver).message.tool_calls[0].function == "add"


def typed_answers() -> None:
    schema = ResponseSchema(name="colour", json_schema=json_schema(Colour))
    Colour.model_validate_json(evaluated("vllm", response_schema=schema).completion)


CHECKS = [every_provider, choices_with_logprobs, tools, typed_answers]

if __name__ == "__main__":
    main(CHECKS)
