"""Structured output on a real model: `python -m tests.soaks.structured [--schemas 500]`.

Each of many schemas (`tests/helpers/schemas.py`, by seed) is asked of SmolLM2 twice, greedy and
drawn, side
by side with free completions. Every answer that comes to an end must be valid by `jsonschema`, and
what can't be honoured must be refused. Says how many ended, and how long a token took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import jsonschema

from manyroots import LLM, SamplingParams, StructuredOutputsParams
from manyroots.errors import RequestError
from tests.helpers.schemas import REFUSED, schema
from tests.helpers.seeded import Draw

PROMPT = "<|im_start|>user\nDescribe something as JSON.<|im_end|>\n<|im_start|>assistant\n"
"""The same for all, so that it is computed once: what counts is the answer."""


def fault(text: str, wanted: Any) -> str | None:
    """Why an answer does not follow its schema; None if it does."""
    checker = jsonschema.FormatChecker()
    try:
        jsonschema.Draft202012Validator(wanted, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def params(wanted: Any, *, temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(json=wanted),
    )


def run(llm: LLM, seeds: range, max_tokens: int) -> Counter[str]:
    """Ask for each schema greedily and drawn; counts how the answers ended."""
    wanted = {seed: schema(Draw(seed)) for seed in seeds}
    asked = [(seed, temperature) for seed in seeds for temperature in (0.0, 1.0)]
    sampling = [
        params(wanted[seed], temperature=temperature, seed=seed, max_tokens=max_tokens)
        for seed, temperature in asked
    ]
    counts: Counter[str] = Counter()
    for (seed, temperature), result in zip(
        asked, llm.generate([PROMPT] * len(asked), sampling), strict=True
    ):
        [answer] = result.outputs
        counts["tokens"] += len(answer.token_ids)
        if answer.finish_reason != "stop":
            counts["cut short"] += 1
            continue
        why = fault(answer.text, wanted[seed])
        counts["valid" if why is None else "invalid"] += 1
        if why is not None:
            print(f"schema {seed} at temperature {temperature}: {why}: {answer.text!r}")
    return counts


def refused(llm: LLM) -> int:
    """How many of those that can't be honoured were refused."""
    count = 0
    for one in REFUSED:
        wanted = {"type": "object", "properties": {"a": one}, "required": ["a"]}
        try:
            llm.generate(["x"], params(wanted, temperature=0, seed=0, max_tokens=1))
            print(f"not refused: {one}")
        except RequestError:
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--batch", type=int, default=50, help="schemas asked for at a time")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    begin = time.monotonic()
    with LLM(options.model, max_model_len=1024, max_num_seqs=100) as llm:
        last = options.first + options.schemas
        for first in range(options.first, last, options.batch):
            total += run(llm, range(first, min(first + options.batch, last)), options.max_tokens)
            print(f"{first + options.batch - options.first} schemas: {dict(total)}", flush=True)
        total["refused"] = refused(llm)
    seconds = time.monotonic() - begin
    print(f"{dict(total)} in {seconds:.0f} s; {len(REFUSED)} had to be refused")
    return 0 if total["invalid"] == 0 and total["refused"] == len(REFUSED) else 1


if __name__ == "__main__":
    sys.exit(main())
