"""POST /v1/completions (S01)"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from manyroots.api.completions import _first_choices_first
from manyroots.api.generation import TextBatch
from manyroots.api.logprobs import echoed_logprobs, naming
from manyroots.messages import FinishReason, Output
from manyroots.text.assembler import TextDelta
from tests.unit.api.fake_engine import FakeEngine, logprobs_of, script
from tests.unit.api.harness import Harness, error_of, events
from tests.unit.text.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.anyio


async def test_a_prompt_is_completed_with_usage() -> None:
    body = (await Harness().complete("abc", max_tokens=4)).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abca", "length")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99, 100]], ["ab", "cd"]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: object, texts: list[str]) -> None:
    body = (await Harness().complete(prompt, max_tokens=2)).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_n_choices_of_each_prompt_are_numbered_prompt_by_prompt() -> None:
    body = (await Harness().complete(["ab", "cd"], max_tokens=2, n=2)).json()
    assert [c["text"] for c in body["choices"]] == ["ab", "ab", "cd", "cd"]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_a_stream_gives_the_same_text_and_its_usage_last() -> None:
    response = await Harness().complete(
        "héllo", max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "héllohéllo"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_without_usage_has_none() -> None:
    *chunks, done = events(await Harness().complete("ab", max_tokens=2, stream=True, n=2))
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    for index in (0, 1):
        mine = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(mine) == "ab"


async def test_a_stop_string_ends_the_text_and_aborts_the_sequence() -> None:
    harness = Harness()
    [choice] = (await harness.complete("abcd", max_tokens=100, stop="cd")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["stop_reason"] == "cd"
    assert len(harness.engine.aborted) == 1


async def test_a_stop_string_can_be_kept() -> None:
    response = await Harness().complete(
        "abcd", max_tokens=100, stop=["zz", "cd"], include_stop_str_in_output=True
    )
    assert response.json()["choices"][0]["text"] == "abcd"


async def test_stop_token_ids_stop_and_are_named() -> None:
    [choice] = (await Harness().complete("abc", stop_token_ids=[99])).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("ab", 99)


async def test_echo_puts_the_prompt_first() -> None:
    harness = Harness()
    assert (await harness.complete("ab", max_tokens=1, echo=True)).json()["choices"][0][
        "text"
    ] == "aba"
    ids = await harness.complete([97, 98], max_tokens=1, echo=True)
    assert ids.json()["choices"][0]["text"] == "aba"
    streamed = events(await harness.complete("ab", max_tokens=1, echo=True, stream=True))
    assert "".join(c["choices"][0]["text"] for c in streamed[:-1]) == "aba"


async def test_logprobs_line_up_with_the_text() -> None:
    [choice] = (await Harness().complete("aé", max_tokens=3, logprobs=2)).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


async def test_echo_with_logprobs_scores_the_prompt() -> None:
    response = await Harness().complete("abc", max_tokens=1, logprobs=1, echo=True, n=2)
    for choice in response.json()["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c", "a"]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert logprobs["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("n", [1, 3])
async def test_an_echo_with_logprobs_streams_what_it_is_whole(n: int, max_tokens: int) -> None:
    """vLLM's and OpenAI's servers stream it, too: all lists, joined, are those of one answer."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 1, "echo": True, "n": n}
    prompts = ["h\u00e9x", "ab"]
    whole = (await Harness().complete(prompts, **fields)).json()["choices"]
    *chunks, _ = events(await Harness().complete(prompts, stream=True, **fields))
    for choice in whole:
        parts = [part for c in chunks for part in c["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"
        for name, values in choice["logprobs"].items():
            scored = [part["logprobs"] for part in parts if part["logprobs"] is not None]
            assert [value for part in scored for value in part[name]] == values, name


async def test_choices_that_come_before_their_prompts_logprobs_wait_for_them() -> None:
    def delta(text: str) -> TextDelta:
        return TextDelta(text, [], None, 0)

    async def generated() -> AsyncGenerator[TextBatch, None]:
        yield [(1, delta("b")), (3, delta("d"))]
        yield [(1, delta("B")), (2, delta("c"))]
        yield [(3, delta("D")), (0, delta("a"))]
        yield [(0, delta("A"))]

    got = [[item.text for _, item in batch] async for batch in _first_choices_first(generated(), 2)]
    assert got == [["c", "d"], ["D", "a", "b", "B"], ["A"]]


async def test_prompt_logprobs_are_keyed_by_token() -> None:
    [choice] = (await Harness().complete("ab", max_tokens=1, prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
    ]


async def test_token_ids_are_returned_on_request() -> None:
    [choice] = (await Harness().complete("ab", max_tokens=1, return_token_ids=True)).json()[
        "choices"
    ]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97], [97, 98])


async def test_a_fault_of_one_prompt_among_several_says_which() -> None:
    for prompt, told in (
        (["a", ""], "prompt[1] is empty;"),
        ([[1], [2], [99_999]], "prompt[2] holds the token id"),
        (["a", "a " * 9999], "Shorten prompt[1]."),
        ("", "prompt is empty;"),
    ):
        error = error_of(await Harness().complete(prompt))
        assert told in error["message"]
        assert error["param"] == "prompt"
    refused = await Harness().post("/v1/embeddings", {"model": "tiny", "input": ["a", ""]})
    assert "input[1] is empty;" in error_of(refused)["message"]


async def test_an_engine_error_is_a_500_that_says_why() -> None:
    engine = FakeEngine(
        lambda submit: [Output(submit.request_id, [], FinishReason.ERROR, 0, error="NaN logits")]
    )
    for stream in (False, True):
        response = await Harness(engine).complete(stream=stream)
        assert response.status_code == 500
        assert "NaN logits" in error_of(response)["message"]


async def test_a_stream_that_has_begun_says_itself_what_went_wrong() -> None:
    engine = FakeEngine(
        lambda submit: [
            Output(submit.request_id, [97], None, 0),
            Output(submit.request_id, [], FinishReason.ERROR, 0, error="NaN logits"),
        ]
    )
    response = await Harness(engine).complete(stream=True)
    assert response.status_code == 200
    assert "NaN logits" in events(response)[-1]["error"]["message"]


async def test_special_tokens_are_shown_only_on_request() -> None:
    engine = FakeEngine(script(97, 256, 98))
    assert (await Harness(engine).complete()).json()["choices"][0]["text"] == "ab"
    shown = await Harness(engine).complete(skip_special_tokens=False)
    assert shown.json()["choices"][0]["text"] == "a<|begin|>b"


async def test_the_engine_receives_what_was_asked() -> None:
    harness = Harness()
    await harness.complete(
        "ab", max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=1,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, min_tokens=1,
        logit_bias={"97": -5}, cache_salt="tenant", ignore_eos=True, user="me", best_of=1,
    )  # fmt: skip
    [submit] = harness.engine.submitted
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.min_p, sampling.seed) == (1.5, 0.1, 1)
    assert (sampling.min_tokens, sampling.max_tokens) == (1, 3)
    assert sampling.logit_bias == {97: -5}
    assert submit.salt == "tenant"
    assert submit.stop_ids == ()


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo_alone_scores_the_prompt_and_says_nothing(n: int) -> None:
    body = (await Harness().complete("abc", max_tokens=0, echo=True, logprobs=1, n=n)).json()
    assert len(body["choices"]) == n
    for choice in body["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == 3


async def test_an_echo_alone_may_be_streamed() -> None:
    response = await Harness().complete("abc", max_tokens=0, echo=True, stream=True)
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_no_stop_trim_is_sglangs_name_of_what_keeps_the_stop_string() -> None:
    harness = Harness()
    for fields in ({"no_stop_trim": True}, {"include_stop_str_in_output": True}):
        body = (await harness.complete("abc", max_tokens=9, stop="c", **fields)).json()
        assert body["choices"][0]["text"] == "abc"


async def test_offsets_of_an_echoed_prompt_count_characters() -> None:
    """Clients that score the end of a prompt find it by offsets. Parts of a character have its
    offset, and later tokens have theirs in the text."""
    response = await Harness().complete("h\u00e9\u20acx", max_tokens=2, logprobs=1, echo=True)
    [choice] = response.json()["choices"]
    assert choice["text"].startswith("h\u00e9\u20acx")
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 5]


def test_offsets_of_an_echoed_prompt_leave_out_what_a_tokenizer_adds() -> None:
    entries = [logprobs_of(token, 1) for token in b"ab"]
    tokenizer = tiny_tokenizer()
    name = naming(tokenizer, by_id=False)
    made = echoed_logprobs(tokenizer, [256, *b"ab"], "ab", entries, 1, name)
    assert made.tokens == ["<|begin|>", "a", "b"]
    assert made.text_offset == [0, 0, 1]
