"""`manyroots generate`: complete prompts and print what comes."""

from __future__ import annotations

from typing import Any

from manyroots.adapter_names import LoRARequest
from manyroots.llm.llm import LLM
from manyroots.sampling import SamplingParams


def generate(
    prompts: list[str], engine: dict[str, Any], sampling: dict[str, Any], lora: str | None
) -> int:
    """`lora`: the name of an adapter among the engine's `lora_modules`."""
    request = None if lora is None else LoRARequest(lora)
    with LLM(**engine) as llm:
        results = llm.generate(prompts, SamplingParams(**sampling), lora_request=request)
    for result in results:
        if len(results) > 1:
            print(f"--- {result.prompt}")
        print(result.outputs[0].text)
    return 0
