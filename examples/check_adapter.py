"""Ask the base model and an adapter questions that no adapter was trained on.

    python examples/check_adapter.py --style pirate --adapter examples/adapters/pirate

Prints both answers to each question and how many of each are in the style. PEFT computes them,
not the engine, so that this is also a reference for what the engine should say.
Exits with 1 if the base speaks in the style or the adapter fails to in more than one answer.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

from speech.base_model import Chat, answers, base_model_file, load_base, load_chat
from speech.questions import UNSEEN_QUESTIONS
from speech.styles import STYLES, Style


@dataclass(frozen=True, slots=True)
class Count:
    """Answers in the style."""

    by_base: int
    by_adapter: int

    @property
    def is_good(self) -> bool:
        return self.by_base == 0 and self.by_adapter >= len(UNSEEN_QUESTIONS) - 1


def report(model: Any, chat: Chat, style: Style) -> Count:
    """Print what `model` (PEFT's) answers with its adapter and without."""
    with model.disable_adapter():
        plain = answers(model, chat, UNSEEN_QUESTIONS)
    spoken = answers(model, chat, UNSEEN_QUESTIONS)
    for question, before, after in zip(UNSEEN_QUESTIONS, plain, spoken, strict=True):
        print(f"\n{question}\n  base:   {before!r}\n  {style.name}: {after!r}")
    count = Count(sum(map(style.is_spoken, plain)), sum(map(style.is_spoken, spoken)))
    print(
        f"\nIn style {style.name}: base {count.by_base}, adapter {count.by_adapter} "
        f"of {len(UNSEEN_QUESTIONS)} answers."
    )
    return count


def main() -> None:
    from peft import PeftModel

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--style", required=True, choices=sorted(STYLES), help="what to listen for")
    parser.add_argument("--adapter", required=True, help="the adapter's folder")
    parser.add_argument("--model", help=".gguf file of the base model (default: the default model)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = base_model_file(options.model)
    model = PeftModel.from_pretrained(load_base(path), options.adapter).eval()
    count = report(model, load_chat(path), STYLES[options.style])
    sys.exit(0 if count.is_good else 1)


if __name__ == "__main__":
    main()
