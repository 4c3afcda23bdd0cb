"""Fifty prompts that differ in length, language and kind; some share beginnings."""

from __future__ import annotations

STORY = (
    "Once upon a time, in a village between two rivers, there lived an old clockmaker who had "
    "never been late in his life. Every morning he wound the great clock in the tower, greeted "
    "the baker, and opened his small shop at the corner of the square. One day the great "
    "clock stopped. "
)
CODE = (
    "import math\n\n\ndef is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n"
    "    for i in range(2, math.isqrt(n) + 1):\n        if n % i == 0:\n            return False\n"
    "    return True\n\n\n"
)
SYSTEM = (
    "<|im_start|>system\nYou are a careful assistant. Answer briefly, in plain words, and say so "
    "if you do not know.<|im_end|>\n<|im_start|>user\n"
)
TURN = "<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = [
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Hello",
    "A",
    "Water boils at",
    "In 1969, the first human being",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n",
    "SELECT name, price FROM products WHERE",
    "<html>\n<head>\n<title>",
    '{"name": "Ada", "age": 36, "languages": [',
    "Q: What is 12 times 12?\nA:",
    "Roses are red, violets are blue,",
    "Die Hauptstadt von Deutschland ist",
    "El gato se sienta en",
    "Le petit prince habitait",
    "日本の首都は",
    "Привет, как",
    "😀😃😄 emoji are",
    "ﷺ ẞ ß ﬁ Ω ≈ ç √ ∫",
    "The derivative of x^2 is 2x, and the derivative of x^3 is",
    "To make bread you need flour, water, salt and",
    "Dear Sir or Madam,\n\nI am writing to",
    "Chapter 1\n\nIt was a dark and stormy night; the rain fell in",
    "pi = 3.14159265358979",
    "          indented by ten spaces and then",
    "\n\n\n\n",
    "a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a",
    STORY,
    STORY + "Nobody in the village knew why. The baker said",
    STORY + "The clockmaker climbed the stairs and found",
    STORY * 2 + "The end of the story is",
    CODE + "def next_prime(n: int) -> int:\n",
    CODE + "def test_is_prime():\n    assert",
    CODE * 2 + "print(",
    SYSTEM + "What is the largest planet?" + TURN,
    SYSTEM + "What is the smallest planet?" + TURN,
    SYSTEM + "Name three colours." + TURN,
    SYSTEM + "Who wrote Hamlet?" + TURN,
    SYSTEM + "Translate 'good morning' into French." + TURN,
    SYSTEM + "Count from one to ten." + TURN,
    SYSTEM + "Write a haiku about autumn." + TURN,
    SYSTEM + "Why is the sky blue?" + TURN,
    SYSTEM + "What is 7 + 5?" + TURN,
    SYSTEM + "Is a tomato a fruit?" + TURN,
    "The following is a list of the planets of the solar system in order: Mercury, Venus,",
    "Newton's first law says that an object at rest",
    "Error: could not open file 'data.csv': No such file or",
    "- apples\n- bananas\n- cherries\n-",
    "Once upon a time, in a village between two rivers, there lived",
]
assert len(PROMPTS) == 50
