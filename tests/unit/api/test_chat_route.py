"""POST /v1/chat/completions (S01)"""

from __future__ import annotations

import pytest

from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of, events

pytestmark = pytest.mark.anyio
ANSWER = FakeEngine(script(*"olá!".encode()))


async def test_a_chat_is_answered() -> None:
    harness = Harness(FakeEngine(script(*"olá!".encode())))
    body = (await harness.chat("hi")).json()
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "olá!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    [submit] = harness.engine.submitted
    text = harness.tokenizer.decode(submit.prompt, skip_special_tokens=False)
    assert text == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
    assert submit.sampling.max_tokens == 512 - len(submit.prompt), "the rest of the context"


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason() -> None:
    response = await Harness(ANSWER).chat(stream=True, stream_options={"include_usage": True})
    first, *texts, last, usage, done = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in texts) == "olá!"
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


async def test_n_chats_stream_side_by_side() -> None:
    chunks = events(await Harness(ANSWER).chat(n=3, stream=True))[:-1]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "olá!"
        assert mine[-1]["finish_reason"] == "stop"


async def test_both_names_of_the_limit_are_known() -> None:
    for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        body = (await Harness().chat("hello", **fields)).json()
        assert body["usage"]["completion_tokens"] == 2
    both = await Harness().chat(max_tokens=2, max_completion_tokens=3)
    assert error_of(both)["param"] == "max_completion_tokens"


async def test_chat_logprobs_carry_bytes() -> None:
    body = (await Harness().chat(max_tokens=2, logprobs=True, top_logprobs=2)).json()
    [first, _] = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "<|begin|>"
    assert bytes(first["bytes"]) == b"<|begin|>"
    assert len(first["top_logprobs"]) == 2
    assert (await Harness().chat(max_tokens=2)).json()["choices"][0]["logprobs"] is None


async def test_options_reach_the_template() -> None:
    harness = Harness()
    await harness.chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=1)
    text = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert text.endswith("assistant\nhm ")


async def test_the_last_message_can_be_continued() -> None:
    harness = Harness()
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I th"}]
    response = await harness.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": messages, "max_tokens": 1,
         "add_generation_prompt": False, "continue_final_message": True},
    )  # fmt: skip
    assert response.status_code == 200
    text = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert text.endswith("<|begin|>assistant\nI th")


async def test_a_model_without_a_template_says_what_to_do() -> None:
    response = await Harness(template=None).chat()
    assert response.status_code == 400
    assert "--chat-template" in error_of(response)["message"]


async def test_prompt_logprobs_come_with_the_response() -> None:
    body = (await Harness().chat(max_tokens=1, prompt_logprobs=0, n=2)).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
