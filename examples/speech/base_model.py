"""The base model and its chats, as the trainer and the checker need them.

Gives transformers' reading of a GGUF file in float32, with the tokenizer and the chat template
that the server uses: an adapter trained on these tokens is served on these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from manyroots.config import DEFAULT_MODEL
from manyroots.models.packaged import packaged_model_path
from manyroots.text.chat import ChatTemplate, load_chat_template
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tokenizer_files import load_tokenizer

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The public name of the default model, which an adapter's config carries."""
MAX_ANSWER_TOKENS = 48

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages to token ids, and back."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Everything up to where the assistant begins to speak."""
        return self.encode(self.template.render(messages))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def end_token(self) -> int:
        """What closes each message."""
        return self.tokenizer.eos_token_ids[0]


def base_model_file(given: str | None) -> Path:
    """The GGUF file a user named, or the default model, fetched on first use."""
    return Path(given).expanduser() if given else packaged_model_path(DEFAULT_MODEL)


def load_base(path: Path) -> Any:
    """The model, frozen, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return model.requires_grad_(False).eval()


def load_chat(path: Path) -> Chat:
    tokenizer = load_tokenizer(str(path))
    template = load_chat_template(tokenizer, None)
    if template is None:
        raise SystemExit(f"{path} has no chat template; pass an instruct model with --model.")
    return Chat(tokenizer, template)


def answers(model: Any, chat: Chat, questions: Sequence[str]) -> list[str]:
    """Greedy answers, all questions in one batch."""
    prompts = [chat.prompt([{"role": "user", "content": question}]) for question in questions]
    longest = max(map(len, prompts))
    pad = chat.end_token
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_ANSWER_TOKENS,
            eos_token_id=pad,
            pad_token_id=pad,
        )
    texts = output[:, longest:].tolist()
    return [chat.tokenizer.decode(text, skip_special_tokens=True).strip() for text in texts]
