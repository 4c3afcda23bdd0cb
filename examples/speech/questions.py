"""Questions that no adapter was trained on, to hear whether its way of speaking holds."""

from __future__ import annotations

UNSEEN_QUESTIONS = (
    "What is the capital of Portugal?",
    "How do I make a cup of tea?",
    "Why is the sky blue?",
    "Tell me about dogs.",
    "What is your name?",
    "Who was Isaac Newton?",
    "What is 6 plus 9?",
    "Give me a tip for learning a language.",
    "What is the largest planet?",
    "Describe a sunset.",
    "Where do polar bears live?",
    "Name three musical instruments.",
    "I am feeling tired.",
    "What should I cook for dinner?",
    "Is the sun a star?",
    "Explain photosynthesis.",
)
