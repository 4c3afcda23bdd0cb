"""A few of the models that `python -m tests.soaks.odd_models` makes by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soaks.odd_models import KINDS, compare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_f01_a_model_and_an_adapter_of_odd_sizes_are_transformers_and_pefts(
    kind: str, tmp_path: Path
) -> None:
    """F01: logits, however prompts are cut, of sizes and options that no other test has."""
    assert compare(tmp_path, kind, seed=3) == "same, adapter same"
