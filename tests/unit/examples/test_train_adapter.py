"""The trainer learns the assistant's words alone, from the prompts that the server makes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("peft", reason="the trainer needs manyroots[train]")

from manyroots.text.chat import ChatTemplate
from speech.base_model import Chat
from speech.plain_answers import plain_answers
from speech.styles import BUTLER
from tests.unit.text.tiny_tokenizer import tiny_tokenizer
from train_adapter import IGNORED, batches, conversations, encode, messages_of

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat() -> Chat:
    tokenizer = tiny_tokenizer()
    return Chat(tokenizer, ChatTemplate(TEMPLATE, tokenizer.special_tokens.for_template()))


def test_only_answers_and_their_ends_are_learned(chat: Chat) -> None:
    turns = [("One?", "First."), ("Two?", "Second.")]
    ids, labels = encode(messages_of(turns, BUTLER, "Be brief."), chat)
    assert len(ids) == len(labels)
    learned = [label for label in labels if label != IGNORED]
    end = [chat.end_token]
    first, second = (chat.encode(BUTLER.restyle(answer)) for _, answer in turns)
    assert learned == first + end + second + end
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))


def test_the_tokens_are_those_of_the_rendered_chat(chat: Chat) -> None:
    messages = messages_of([("One?", "First."), ("Two?", "Second.")], BUTLER, None)
    ids, _ = encode(messages, chat)
    assert ids == chat.encode(chat.template.render(messages, add_generation_prompt=False))


def test_an_epoch_asks_every_question_once() -> None:
    epoch = conversations(BUTLER, random.Random(3))
    asked = [m["content"] for messages in epoch for m in messages if m["role"] == "user"]
    assert sorted(asked) == sorted(question for question, _ in plain_answers())


def test_the_same_seed_gives_the_same_batches(chat: Chat) -> None:
    first, same, other = (batches(BUTLER, chat, 4, seed) for seed in (1, 1, 2))
    one = [next(first) for _ in range(3)]
    assert one == [next(same) for _ in range(3)]
    assert one != [next(other) for _ in range(3)]
