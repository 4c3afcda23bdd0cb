"""One sequence's text: stop strings, stop tokens, minimum lengths, logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from manyroots.ids import RequestId
from manyroots.messages import DraftUse, FinishReason, Notice, Output
from manyroots.sampling import SamplingParams
from manyroots.step import TokenLogprobs
from manyroots.text.assembler import TextAssembler
from manyroots.text.tokenizer import Tokenizer

EOS = 257


def news(tokens: list[int], finish: FinishReason | None = None, **more: Any) -> Output:
    return Output(RequestId(1), tokens, finish, 0, **more)


def test_text_comes_with_the_tokens(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams())
    delta = assembler.push(news(list(b"hi")))
    assert (delta.text, delta.tokens, delta.finish_reason) == ("hi", list(b"hi"), None)
    end = assembler.push(news([33], FinishReason.LENGTH))
    assert (end.text, end.finish_reason, end.stopped) == ("!", FinishReason.LENGTH, False)


def test_the_models_end_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    for sampling in (SamplingParams(), SamplingParams(skip_special_tokens=False)):
        delta = TextAssembler(tokenizer, sampling).push(
            news([104, EOS], FinishReason.STOP, stop_token=EOS)
        )
        assert (delta.text, delta.tokens, delta.stop_reason) == ("h", [104, EOS], None)


def test_a_stop_token_is_named_and_shown_on_request(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop_token_ids=(33,), include_stop_str_in_output=True)
    delta = TextAssembler(tokenizer, sampling).push(
        news([104, 33], FinishReason.STOP, stop_token=33)
    )
    assert (delta.text, delta.stop_reason) == ("h!", 33)


def test_a_stop_string_ends_the_sequence_and_asks_for_its_abort(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("END",), logprobs=0))
    assert assembler.push(news(list(b"abE"))).text == "ab"
    logprobs = [TokenLogprobs(t, -1.0, 1, (), ()) for t in b"NDxy"]
    delta = assembler.push(news(list(b"NDxy"), logprobs=logprobs))
    assert delta.text == ""
    assert delta.tokens == list(b"ND"), "tokens after the stop string are not the caller's"
    assert [entry.token for entry in delta.logprobs] == list(b"ND")
    assert delta.offsets == [3, 4]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "END")
    assert delta.stopped


def test_v02_guesses_after_a_stop_string_are_not_accepted(tokenizer: Tokenizer) -> None:
    """V02: usage counts guesses that are part of the text."""
    notice = Notice(drafts=DraftUse(4, 3))
    delta = TextAssembler(tokenizer, SamplingParams(stop=["b"])).push(
        news(list(b"abcd"), notice=notice)
    )
    assert (delta.tokens, delta.drafts) == (list(b"ab"), DraftUse(4, 2))
    whole = TextAssembler(tokenizer, SamplingParams()).push(news(list(b"abcd"), notice=notice))
    assert whole.drafts == DraftUse(4, 3)


def test_a_stop_string_in_the_last_news_needs_no_abort(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("b",)))
    delta = assembler.push(news(list(b"ab"), FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, delta.stopped) == ("a", FinishReason.STOP, False)


def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("b",), min_tokens=3))
    delta = assembler.push(news(list(b"abcbd")))
    assert (delta.text, len(delta.tokens), delta.stop_reason) == ("abc", 4, "b")


def test_held_back_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams(stop=("END",)))
    assert assembler.push(news(list(b"aEN"))).text == "a"
    assert assembler.push(news([], FinishReason.ABORT)).text == "EN"


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams())
    assert assembler.push(news(list("é".encode())[:1])).text == ""
    assert assembler.push(news([], FinishReason.LENGTH)).text == "\ufffd"


@pytest.mark.parametrize("cut_off", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_is_cut_off_is_not_told_as_stopped(
    tokenizer: Tokenizer, cut_off: FinishReason
) -> None:
    """An unfinished character at the end is shown, and completes a stop string where the sequence
    ended by itself alone."""
    for reason, expected in ((cut_off, cut_off), (FinishReason.LENGTH, FinishReason.STOP)):
        assembler = TextAssembler(tokenizer, SamplingParams(stop=("x\ufffd",)))
        assembler.push(news([*b"x", 0xE2]))
        end = assembler.push(news([], reason))
        assert end.finish_reason is expected
        assert end.text == ("" if expected is FinishReason.STOP else "x\ufffd")


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, SamplingParams())
    assembler.push(news([], FinishReason.LENGTH))
    with pytest.raises(AssertionError, match="after the end"):
        assembler.push(news([104]))
