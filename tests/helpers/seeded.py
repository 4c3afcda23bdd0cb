"""Cases drawn by seeds of our own: a test sees the same ones whatever else runs, and whatever is
installed (R06).

`@for_seeds(n)` runs a test once for each of n seeds, with a `Draw` of that seed for its argument
`draw`. A failure names its seed, and `pytest --seed N` runs that one alone. `seeds(n)` gives the
seeds of a test that is parametrized by them. `pytest --times 20` draws twenty times as many cases.

Tests draw few cases by default: the suite must end in 20 minutes, the same seeds come in every run,
and `tests/soaks` draws others by the million.
"""

from __future__ import annotations

import functools
import inspect
import random
import struct
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LETTERS = (
    "ab",
    "abcdefghijklmnopqrstuvwxyz",
    " .,:;!?'\"\\/{}[]<>|",
    "0123456789",
    "\t\n\r\x00\x1b\x7f",
    "éüßñçøœ",
    "日本語中文한국어",
    "😀🎉👩‍👧🏽🇩🇪",
    "e\u0301o\u0308\u200d\u200b\ufeff\ufffd",
    "אבגدهو",
    "\U0010ffff\uffff\ud7ff\ue000",
)
INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
)
FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-45, 1e-38, 1e-310, 3.4e38, 3.5e38, 1.7e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


class Draw(random.Random):
    """Random values with a liking for the ends of what is possible, where mistakes are."""

    only_seed: int | None = None
    """Set by `pytest --seed`."""
    times: int = 1
    """Set by `pytest --times`."""

    def flag(self) -> bool:
        return self.random() < 0.5

    def integer(self, least: int, most: int) -> int:
        if self.random() < 0.2:
            return self.choice((least, most))
        return self.randint(least, most)

    def any_integer(self) -> int:
        if self.flag():
            return self.choice(INTEGERS)
        return self.randint(-1, 1) * self.getrandbits(self.randint(1, 80))

    def any_float(self) -> float:
        if self.flag():
            return self.choice(FLOATS)
        bits: float = struct.unpack("d", self.randbytes(8))[0]
        return bits

    def list_of(self, item: Callable[[], T], least: int = 0, most: int = 10) -> list[T]:
        return [item() for _ in range(self.integer(least, most))]

    def text(self, letters: str | None = None, least: int = 0, most: int = 12) -> str:
        """Of these letters, or of any that UTF-8 can write."""
        if letters is not None:
            return "".join(self.choices(letters, k=self.integer(least, most)))
        return "".join(self.list_of(self.letter, least, most))

    def letter(self) -> str:
        if self.random() < 0.8:
            return self.choice(self.choice(LETTERS))
        code = self.randrange(0x110000 - 0x800)
        return chr(code if code < 0xD800 else code + 0x800)

    def json(self, depth: int = 2) -> Any:
        """Whatever JSON may hold, Python's NaN and infinities included."""
        kind = self.randrange(7 if depth else 5)
        if kind >= 5:
            values = self.list_of(lambda: self.json(depth - 1), most=3)
            return values if kind == 5 else {self.text(most=8): value for value in values}
        return (None, self.flag(), self.any_integer(), self.any_float(), self.text(most=8))[kind]


def seeds(count: int) -> range:
    """So many, or the one that `pytest --seed` asks for."""
    if Draw.only_seed is not None:
        return range(Draw.only_seed, Draw.only_seed + 1)
    return range(count * Draw.times)


def for_seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that takes a `draw` becomes one that runs for so many seeds."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name != "draw"]

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for seed in seeds(count):
                try:
                    test(*args, draw=Draw(seed), **kwargs)
                except Exception as error:
                    error.add_note(f"seed {seed}; `pytest --seed {seed}` runs it alone")
                    raise

        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return wrap
