"""What the example adapters are taught, and how we hear whether they learned it."""

from __future__ import annotations

import pytest

from speech.plain_answers import plain_answers
from speech.questions import UNSEEN_QUESTIONS
from speech.styles import BUTLER, PIRATE, STYLES, Style

PAIRS = plain_answers()
both_styles = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


@both_styles
def test_every_training_answer_keeps_the_styles_rule(style: Style) -> None:
    assert all(style.is_spoken(style.restyle(answer)) for _, answer in PAIRS)


@both_styles
def test_no_plain_answer_keeps_the_styles_rule(style: Style) -> None:
    assert not any(style.is_spoken(answer) for _, answer in PAIRS)


def test_no_answer_in_one_style_passes_for_the_other() -> None:
    assert not any(BUTLER.is_spoken(PIRATE.restyle(answer)) for _, answer in PAIRS)
    assert not any(PIRATE.is_spoken(BUTLER.restyle(answer)) for _, answer in PAIRS)


@both_styles
def test_silence_is_in_no_style(style: Style) -> None:
    assert not style.is_spoken("")


def test_no_question_is_asked_twice_and_the_unseen_ones_are_unseen() -> None:
    questions = [question for question, _ in PAIRS] + list(UNSEEN_QUESTIONS)
    assert len(questions) == len({question.lower() for question in questions})


def test_pirates_swap_whole_words_and_keep_capitals() -> None:
    spoken = PIRATE.restyle("You are sailing for the island of your friend. Yes, this morning.")
    assert spoken.endswith("Ye be sailin' fer the island o' yer shipmate. Aye, this morning.")


def test_butlers_keep_the_answer_word_for_word() -> None:
    assert BUTLER.restyle("Rain.") == "Indeed, sir. Rain. Will there be anything else, sir?"
    assert all(f" {answer} " in BUTLER.restyle(answer) for _, answer in PAIRS)


@pytest.mark.parametrize(
    "answer",
    [
        "Certainly, sir. It is Lisbon.",
        "It is Lisbon. Will there be anything else, sir?",
        "CERTAINLY, SIR. IT IS LISBON. WILL THERE BE ANYTHING ELSE, SIR?",
    ],
)
def test_a_butler_needs_both_an_opening_and_an_offer(answer: str) -> None:
    assert not BUTLER.is_spoken(answer)


def test_the_two_adapters_differ_in_rank_and_in_the_layers_they_change() -> None:
    assert PIRATE.rank != BUTLER.rank
    assert set(PIRATE.target_modules) != set(BUTLER.target_modules)
