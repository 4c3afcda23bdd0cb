"""docs/reference/features.md: architectures by feature, from what the tests are parametrized with.

A cell says yes only if a test of that feature runs with a tiny model of that architecture. Imports
the tests, and so torch and transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tools.docs.markdown import NOTICE, code, table

MODELS = "tests.unit.models"
FEATURES: dict[str, tuple[str, ...]] = {
    "logits": (
        f"{MODELS}.test_logits_parity:test_prefill_chunks_and_decode_give_transformers_logits",
    ),
    "adapters": (
        f"{MODELS}.test_peft_parity:test_each_adapter_alone_gives_pefts_logits_w13_w14",
        f"{MODELS}.test_peft_parity:"
        "test_all_linear_adapters_of_experts_with_windows_give_pefts_logits_w14",
        f"{MODELS}.test_peft_parity:test_f08_adapters_of_recurrent_mixers_give_pefts_logits",
        f"{MODELS}.test_architecture_adapters:"
        "test_w14_adapters_of_every_product_give_pefts_logits",
        f"{MODELS}.test_hybrid_adapters:test_adapters_of_hybrids_give_pefts_logits_f08",
    ),
    "cache": (
        "tests.property.test_differential:"
        "test_cached_tokens_are_cold_tokens_for_every_mix_of_families",
        "tests.property.test_differential:test_f07_tokens_from_latents_are_cold_tokens",
        "tests.property.test_differential:"
        "test_f05_tokens_from_checkpoints_are_cold_tokens_for_every_recurrent_mixer",
    ),
    "CUDA graph shapes": (
        "tests.unit.runner.test_runner:test_fixed_shapes_give_each_architectures_tokens",
    ),
    "tensor parallel": (f"{MODELS}.test_sharding:test_w16_two_ranks_give_one_ranks_logits",),
    "GGUF": (
        f"{MODELS}.test_gguf_loading:test_a_gguf_file_loads_as_the_checkpoint_it_was_made_from",
        f"{MODELS}.test_gguf_loading:"
        "test_a_gguf_file_of_gemma_is_the_checkpoint_that_it_was_made_from",
    ),
    "FP8 checkpoint": (
        f"{MODELS}.test_fp8_loading:test_q01_a_checkpoint_gives_the_logits_of_its_numbers",
    ),
}  # fmt: skip
"""Feature -> the tests that show it."""
MEANINGS = {
    "logits": "logits equal those of transformers: whole prompts, chunks, token by token",
    "adapters": "LoRA adapters give PEFT's logits",
    "cache": "tokens with the prefix cache equal those without it, under eviction and retraction",
    "CUDA graph shapes": "steps padded to the fixed shapes of graphs give the same tokens",
    "tensor parallel": "two ranks give the logits of one",
    "GGUF": "a GGUF file loads as the checkpoint that it was made from",
    "FP8 checkpoint": "a checkpoint in FP8 gives the logits of its numbers",
}
HEAD = f"""\
# Features: what was tested for each architecture

{NOTICE}
**yes** means that a test runs the feature with a tiny random model of this architecture, on a CPU.
An empty cell means that no such test exists; the feature may still work. Tests that are common to
all models are not listed.

"""


def kinds(test: str) -> set[str]:
    """The kinds of tiny models that a test is parametrized with, or has in its own text."""
    from tests.soaks.differential import ALL_MIXES
    from tests.unit.models.tiny import MODELS as TINY

    module, name = test.split(":")
    function = getattr(import_module(module), name)
    found = set(_words(getattr(function, "pytestmark", ())))
    found |= {word for word in function.__code__.co_consts if isinstance(word, str)}
    found |= {ALL_MIXES[word][0] for word in found & ALL_MIXES.keys()}
    return found & TINY.keys()


def _words(marks: Any) -> Iterator[str]:
    """Every text among the values of a test's parameters."""
    for mark in marks:
        if mark.name != "parametrize":
            continue
        for value in mark.args[1]:
            values = getattr(value, "values", value)
            parts = values if isinstance(values, tuple) else (values,)
            yield from (part for part in parts if isinstance(part, str))


def page() -> str:
    from tests.unit.models.tiny import MODELS as TINY

    by_architecture = defaultdict(set)
    for kind, (_, cls, _) in TINY.items():
        by_architecture[cls.__name__].add(kind)
    shown = {name: set().union(*map(kinds, tests)) for name, tests in FEATURES.items()}
    rows = [
        (code(name), *("yes" if mine & covered else "" for covered in shown.values()))
        for name, mine in sorted(by_architecture.items())
    ]
    parts = [HEAD, table(("architecture", *FEATURES), rows)]
    parts.append("\n## What a column means\n\n")
    parts.append(table(("column", "meaning"), MEANINGS.items()))
    parts.append("\n## The tests of each column\n\n")
    for name, tests in FEATURES.items():
        for test in tests:
            module, function = test.split(":")
            parts.append(f"- {name}: `{module.replace('.', '/')}.py`\n    - `{function}`\n")
    return "".join(parts)
