"""Where an activated adapter (aLoRA) begins to act, and whose pages that makes (N22)."""

from __future__ import annotations

from manyroots.scheduler.request import NEVER, invoked_at


def test_an_alora_acts_from_the_last_whole_occurrence_of_its_invocation_n22() -> None:
    assert invoked_at([7, 8, 1, 7, 8, 2, 7], (7, 8)) == 3
    assert invoked_at([7, 8], (7, 8)) == 0


def test_a_prompt_without_the_invocation_is_the_base_models_n22() -> None:
    assert invoked_at([7, 1, 8], (7, 8)) == NEVER
    assert invoked_at([8], (7, 8)) == NEVER
