"""lm-eval: texts scored by echoed prompts, generated, and with the server's own tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reporting import KEY, MODEL, TOKENIZER, V1, main

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": KEY}

ROWS = [
    {"text": "The capital of France is", "choices": ["Paris", "Berlin"], "gold": 0},
    {"text": "Two plus two equals", "choices": ["nine", "four"], "gold": 1},
]
KINDS = {
    "choose": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": "gold",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}],
    },
    "score": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "complete": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@contextmanager
def tasks() -> Iterator[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "rows.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
        yield [{"task": name, "test_split": "test", **data, **kind} for name, kind in KINDS.items()]


def evaluated(kind: str, route: str, only: tuple[str, ...], **more: Any) -> dict[str, Any]:
    import lm_eval

    arguments = {"model": MODEL, "base_url": f"{V1}/{route}", **more}
    with tasks() as made:
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=[task for task in made if task["task"] in only],
            apply_chat_template=kind.endswith("chat-completions"),
            bootstrap_iters=0,
        )
    return found["results"]


def bits(found: dict[str, Any]) -> float:
    return float(found["score"]["bits_per_byte,none"])


def by_tokens() -> None:
    every = tuple(KINDS)
    kind = "local-completions"
    ids = evaluated(kind, "completions", every, tokenizer=TOKENIZER, num_concurrent=2)
    texts = evaluated(kind, "completions", every, tokenizer=TOKENIZER, tokenized_requests=False)
    assert ids["choose"]["acc,none"] == texts["choose"]["acc,none"] == 1.0
    assert abs(bits(ids) - bits(texts)) < 1e-3


def by_the_servers_tokenizer() -> None:
    found = evaluated(
        "local-completions", "completions", ("choose", "score"), tokenizer_backend="remote"
    )
    assert found["choose"]["acc,none"] == 1.0
    assert 0 < bits(found) < 5


def chats() -> None:
    found = evaluated("local-chat-completions", "chat/completions", ("complete",))
    assert "exact_match,none" in found["complete"]


CHECKS = [by_tokens, by_the_servers_tokenizer, chats]

if __name__ == "__main__":
    main(CHECKS)
