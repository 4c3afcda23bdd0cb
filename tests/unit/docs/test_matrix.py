"""The matrix of features equals what the tests are parametrized with."""

from __future__ import annotations

import re

from tools.docs.matrix import FEATURES, MEANINGS, kinds
from tools.docs.pages import ROOT, SLOW, stale


def test_d02_the_matrix_is_what_the_tests_run() -> None:
    """D02."""
    assert stale(SLOW) == [], "run `make generated` and commit the result"


def test_every_column_has_models_and_a_meaning() -> None:
    assert FEATURES.keys() == MEANINGS.keys()
    for tests in FEATURES.values():
        for test in tests:
            assert kinds(test), test


def test_a_cell_is_empty_where_no_test_runs() -> None:
    page = (ROOT / "docs" / "reference" / "features.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    assert rows["LlamaForCausalLM"].split(" | ") == ["yes"] * len(FEATURES)
    assert rows["Lfm2ForCausalLM"].split(" | ")[list(FEATURES).index("GGUF")] == ""
