"""The comparison of guesses where there is no GPU: its runner, with references as kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import StepInputs
from manyroots.runner.repeated import RepeatedSteps, StepLayout
from tests.gpu import guesses
from tests.gpu.engines import Side

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_steps")]
COUNT = 5


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3.5", "float32"),
        pytest.param("llama", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("glm4-moe-lite", "float32", marks=pytest.mark.nightly),
    ],
)
def test_guesses_change_no_token(kind: str, dtype: str, tmp_path: Path) -> None:
    said = guesses.check(tmp_path, kind, dtype, Side.REFERENCES, count=COUNT)
    assert said.count("guesses were right") == 2


def test_a_repeated_step_at_the_positions_before_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = RepeatedSteps.step

    def stale(self: RepeatedSteps, layout: StepLayout) -> StepInputs:
        kept = layout.arrays["positions"].copy()
        inputs = step(self, layout)
        layout.arrays["positions"][...] = kept
        return inputs

    monkeypatch.setattr(RepeatedSteps, "step", stale)
    with pytest.raises(AssertionError, match="answers as without"):
        guesses.check(tmp_path, "llama", "float32", Side.REFERENCES, count=COUNT)


def test_a_state_that_lacks_accepted_tokens_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PersistentBatch, "go_back", lambda *_: None)
    with pytest.raises(AssertionError, match="answers as without"):
        guesses.check(tmp_path, "qwen3.5", "float32", Side.REFERENCES, count=COUNT)
