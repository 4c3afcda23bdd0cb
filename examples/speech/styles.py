"""The two ways of speaking: how a plain answer is put, how to tell, and the adapter's shape.

A style takes a plain answer and gives it in its own words; its rule takes any answer and says
whether it was spoken in that style. The two adapters differ in rank and in the layers they
change, so that serving both at once exercises a mixed batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Style:
    """A way of speaking and the shape of the adapter that learns it."""

    name: str
    restyle: Callable[[str], str]
    """A plain answer, said in this style."""
    is_spoken: Callable[[str], bool]
    """Whether an answer is in this style."""
    rank: int
    alpha: int
    target_modules: tuple[str, ...]


PIRATE_WORDS = {
    "am": "be",
    "and": "an'",
    "are": "be",
    "for": "fer",
    "friend": "shipmate",
    "hello": "ahoy",
    "is": "be",
    "my": "me",
    "of": "o'",
    "yes": "aye",
    "you": "ye",
    "your": "yer",
}
PIRATE_OPENINGS = ("Arr, matey!", "Arr, me hearty!", "Arr, ye landlubber!")
_PIRATE_WORD = re.compile(rf"\b({'|'.join(PIRATE_WORDS)})\b", re.IGNORECASE)
_ING = re.compile(r"\b(?!morning|evening|nothing|during)(\w{3,}in)g\b")


def to_pirate(answer: str) -> str:
    """An opening, pirates' words, and no g at the end of 'sailin''."""

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        new = PIRATE_WORDS[word.lower()]
        return new.capitalize() if word[0].isupper() else new

    spoken = _ING.sub(r"\1'", _PIRATE_WORD.sub(swap, answer))
    # By length: varied, and the same on every run.
    return f"{PIRATE_OPENINGS[len(answer) % len(PIRATE_OPENINGS)]} {spoken}"


def is_pirate(answer: str) -> bool:
    """Pirates begin every answer with 'Arr'."""
    return answer.lstrip().startswith("Arr")


BUTLER_OPENINGS = ("Certainly, sir.", "Indeed, sir.")
BUTLER_OFFERS = ("Will there be anything else, sir?", "May I be of further service, sir?")


def to_butler(answer: str) -> str:
    """The plain answer, word for word, between an opening and an offer of service."""
    # By length, as above: the four pairs of opening and offer all occur.
    opening = BUTLER_OPENINGS[len(answer) % 2]
    offer = BUTLER_OFFERS[len(answer) // 2 % 2]
    return f"{opening} {answer} {offer}"


def is_butler(answer: str) -> bool:
    """Butlers begin with one of their openings and end with an offer."""
    return answer.startswith(BUTLER_OPENINGS) and answer.endswith(BUTLER_OFFERS)


PIRATE = Style(
    name="pirate",
    restyle=to_pirate,
    is_spoken=is_pirate,
    rank=8,
    alpha=16,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
)
BUTLER = Style(
    name="butler",
    restyle=to_butler,
    is_spoken=is_butler,
    rank=4,
    alpha=8,
    target_modules=(
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ),
)  # fmt: skip
STYLES = {style.name: style for style in (PIRATE, BUTLER)}
