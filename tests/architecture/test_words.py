"""One word, one meaning: a class name has one definition, and words given up do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes, tree_of

PACKAGE = Path(__file__).parents[2] / "manyroots"
SOURCES = sorted(PACKAGE.rglob("*.py"))

GIVEN_UP = {
    "LoadedPart": "Worker",
    "ExecuteHalf": "Executor",
    "AdapterHalf": "AdapterRuntime",
    "adapter_half": "adapter_runtime",
    "Door": "InputProcessor",
    "AdapterDesk": "AdapterDirectory",
    "_desk": "_directory",
    "Draft": "PlanBuilder; a draft is guessed tokens",
    "Endings": "Departures",
    "_next_stay": "_next_tenancy",
    "weight_slots": "weights; a slot is an adapter's place on the device",
    "News": "StepOutputs",
    "Storage": "StorageHealth",
    "Room": "Allocator",
    "Half": "Factor; the halves are decide and execute",
    "has_news": "has_outcomes",
    "Layout": "CacheLayout, AdapterLayout",
    "Limits": "AdapterLimits, SchedulerLimits",
    "Transfers": "UnitTransfers, AdapterTransfers",
    "Angles": "RopeTable",
    "Normed": "DeferredRMSNorm",
    "their_flags": "flag_aliases",
    "our_side": "manyroots_driver",
    "PagedRows": "AttentionMetadata",
    "Attending": "PreparedAttention",
    "KvPlaces": "SlotMapping",
    "Wanted": "LogitsIndices",
    "Product": "DeferredOutput",
    "UndividedNorm": "DeferredRMSNorm",
    "rope_write": "qk_rope_kv_write",
    "moe_pairs": "fused_moe",
    "lora_sites": "lora_ops",
    "Rehearsal": "Warmup",
    "Intake": "InputProcessor",
    "intake": "input_processor",
    "Farewells": "CloseOnDrain",
    "collector": "gc_tuning",
    "told_tools": "tools_as_text",
    "turn_pages": "next_pages",
    "TurnedRegion": "TransposedRegion",
    "is_turned": "is_transposed, is_rotated",
    "Talk": "Conversation",
}
"""Old names, and what to say instead."""


def classes(path: Path) -> list[str]:
    """The public classes that a file defines, at any depth."""
    found = [n.name for n in nodes(tree_of(path)) if isinstance(n, ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


def aliases(path: Path) -> dict[str, str]:
    """The public names for types at the top of a file (`Rows = Tensor | Fp8Rows`), with what they
    stand for. Type variables mean nothing outside of a signature."""
    found = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            is_camel = re.fullmatch(r"[A-Z]+[A-Za-z0-9]*[a-z][A-Za-z0-9]*", target.id)
            value = ast.unparse(node.value)
            if is_camel and not value.startswith("TypeVar("):
                found[target.id] = value
    return found


@cache
def names(path: Path) -> frozenset[str]:
    """Every identifier in a file's code, which is read once for all words."""
    found = set()
    for node in nodes(tree_of(path)):
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.update(re.split(r"\.", value))
    return frozenset(found)


def definitions(sources: list[Path]) -> dict[str, set[str]]:
    """What each name stands for. Rooms may say the same thing twice (`Int64s`), not two things."""
    found = defaultdict(set)
    for path in sources:
        for name in classes(path):
            found[name].add(f"a class of {path}")
        for name, value in aliases(path).items():
            found[name].add(value)
    return found


def test_a_class_or_alias_has_one_definition() -> None:
    found = definitions(SOURCES)
    assert len(found) > 100
    assert not {name: what for name, what in found.items() if len(what) > 1}


def test_two_meanings_of_a_name_are_found(tmp_path: Path) -> None:
    texts = ("class Run:\n    pass\nInts = list[int]\nPair = A\n", "Run = int\nInts = list[int]\n",
             "Pair = B\n")  # fmt: skip
    files = [tmp_path / f"{number}.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    assert {n for n, what in definitions(files).items() if len(what) > 1} == {"Run", "Pair"}


@pytest.mark.parametrize("word", GIVEN_UP)
def test_words_given_up_do_not_come_back(word: str) -> None:
    users = [str(path.relative_to(PACKAGE)) for path in SOURCES if word in names(path)]
    assert not users, f"say {GIVEN_UP[word]}"


def test_names_are_found_wherever_code_has_them(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "from a.door import B as C\nclass D:\n    def e(self, f: G) -> None:\n        self.h(i)\n"
        "Keys = list[D]\nLIMIT = 3\nT = TypeVar('T')\n"
    )
    assert names(file) >= {"a", "door", "B", "C", "D", "e", "f", "G", "h", "i"}
    assert classes(file) == ["D"]
    assert aliases(file) == {"Keys": "list[D]"}
