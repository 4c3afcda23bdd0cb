"""Habits of clients that were written for other servers: how they write numbers, what they call
things, which routes they expect (G04). Found by trying them; `docs/clients.md` says which."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.text.tokenizer import SpecialTokens, Tokenizer
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of
from tests.unit.api.test_responses_route import saying

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 4.0}, {"n": 1.0, "seed": 3.0, "top_k": -1.0}, {"stop_token_ids": [5.0]}],
)
async def test_g04_whole_numbers_are_integers_however_they_are_written(fields: Any) -> None:
    assert (await Harness().complete(**fields)).status_code == 200
    assert (await Harness().chat(**fields)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("is_flat", [True, False])
async def test_g04_functions_as_in_chats_and_as_in_responses(path: str, is_flat: bool) -> None:
    """Cursor sends tools of the Responses API to chats."""
    source = "{% for tool in tools %}{{ tool['function'] }}{% endfor %}"
    call = b'<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    harness = Harness(FakeEngine(script(*call)), template=source)
    look = {"name": "look", "parameters": {"type": "object"}}
    tool = {"type": "function"} | (look if is_flat else {"function": look})
    choice = {"type": "function"} | ({"name": "look"} if is_flat else {"function": look})
    for chosen in ("auto", choice):
        body: dict[str, Any] = {"model": "tiny", "tools": [tool], "tool_choice": chosen}
        body |= {"input": "hi"} if path == "/v1/responses" else {"messages": [USER]}
        response = await harness.post(path, body)
        assert response.status_code == 200, response.text
        assert '"name":"look"' in response.text
    prompt = bytes(harness.engine.submitted[0].prompt)
    assert prompt == b"{'name': 'look', 'parameters': {'type': 'object'}}"


@pytest.mark.parametrize(("seed", "kept"), [(-1, None), (-1.0, None), (-2, -2), (0, 0)])
async def test_g04_a_seed_of_minus_one_is_none(seed: Any, kept: int | None) -> None:
    """As in vLLM and llama.cpp; clients send it where a seed is left open."""
    harness = Harness()
    assert (await harness.chat(seed=seed)).status_code == 200
    assert harness.engine.submitted[0].sampling.seed == kept


@pytest.mark.parametrize("value", [4.5, 1e30, "4", True])
async def test_g04_other_numbers_are_none(value: Any) -> None:
    response = await Harness().complete(max_tokens=value)
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_g04_tokens_that_may_or_may_not_be_said_reach_the_engine(path: str) -> None:
    engine = FakeEngine()
    body: dict[str, Any] = {"model": "tiny", "allowed_token_ids": [7, 9.0], "bad_words": ["ab"]}
    asked = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
    body |= asked.get(path, {"messages": [USER]})
    response = await Harness(engine).post(path, body)
    assert response.status_code == 200, response.text
    sampling = engine.submitted[0].sampling
    assert sampling.allowed_token_ids == (7, 9)
    assert sampling.bad_token_ids == (tuple(b"ab"), tuple(b" ab"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [10**6]),
     ("allowed_token_ids", "5"), ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", "ab"),
     ("bad_words", ["x"] * 1025), ("bad_words", ["x" * 257])],
)  # fmt: skip
async def test_g04_rules_for_tokens_that_can_not_be_kept_are_refused(name: str, value: Any) -> None:
    response = await Harness().chat(**{name: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [], "kv_transfer_params": {}, "documents": []},
        {"mm_processor_kwargs": {}, "vllm_xargs": {}, "media_io_kwargs": {}},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}, "spaces_between_special_tokens": True},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ],
)
async def test_g04_what_asks_for_what_happens_anyway_is_taken(fields: Any) -> None:
    assert (await Harness().chat(**fields)).status_code == 200


async def test_g04_spaces_that_a_tokenizer_writes_are_not_left_out() -> None:
    """Of one that spells no bytes: its decoder joins words."""
    harness = Harness()
    backend = Backend(WordLevel({"[UNK]": 0, "hi": 1}, unk_token="[UNK]"))
    words = Tokenizer(backend, SpecialTokens(bos=None, eos=None), None)
    assert not words.has_bytes
    assert harness.state.loaded is not None
    harness.state.loaded.tokenizer = words
    unwanted: dict[str, Any] = {"spaces_between_special_tokens": False}
    response = await harness.complete([1], skip_special_tokens=False, **unwanted)
    assert response.status_code == 400
    assert error_of(response)["param"] == "spaces_between_special_tokens"
    assert (await harness.complete([1], max_tokens=1, **unwanted)).status_code == 200


async def test_g04_thinking_that_can_not_be_had_is_refused() -> None:
    harness = Harness(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    assert (await harness.chat(chat_template_kwargs={"thinking": False})).status_code == 200
    response = await harness.chat(chat_template_kwargs={"enable_thinking": True})
    assert response.status_code == 400
    assert error_of(response)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("extra_body", "beside the others"), ("enable_thinking", "chat_template_kwargs"),
     ("max_new_tokens", "max_tokens"), ("prompt", "/v1/completions"), ("zzz", "zzz")],
)  # fmt: skip
async def test_g04_unknown_fields_are_told_where_they_belong(name: str, remedy: str) -> None:
    fields: dict[str, Any] = {name: 1}
    response = await Harness(strict_requests=True).chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("Unrecognized request argument supplied")
    assert remedy in error_of(response)["message"]


@pytest.mark.parametrize(
    "content", [["hi"], [{"type": "input_text", "text": "hi"}], [{"type": "text", "text": "hi"}]]
)
async def test_g04_parts_of_a_text_by_any_of_their_names(content: Any) -> None:
    harness = Harness()
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    plain = (await harness.chat("hi", max_tokens=1, return_token_ids=True)).json()
    response = await harness.post("/v1/chat/completions", body | {"return_token_ids": True})
    assert response.json()["prompt_token_ids"] == plain["prompt_token_ids"]


@pytest.mark.parametrize(("wanted", "kept"), [(3, 3), (400, 10), (-1, 10)])
async def test_g04_prompts_keep_their_last_tokens(wanted: int, kept: int) -> None:
    ids = list(range(40, 50))
    fields = {"truncate_prompt_tokens": wanted, "return_token_ids": True, "max_tokens": 2}
    choice = (await Harness().complete(ids, **fields)).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids[-kept:]


async def test_g04_as_much_of_a_prompt_as_fits() -> None:
    fields = {
        "truncate_prompt_tokens": -1,
        "return_token_ids": True,
        "max_tokens": 12,
        "echo": True,
    }
    [choice] = (await Harness().complete("a" * 600 + "b", **fields)).json()["choices"]
    assert len(choice["prompt_token_ids"]) == 500
    assert choice["text"].startswith("a" * 499 + "b")
    chat = await Harness().chat("a" * 600, truncate_prompt_tokens=-1, max_tokens=12)
    assert chat.json()["usage"]["prompt_tokens"] == 500


@pytest.mark.parametrize("wanted", [0, -2, 512])
async def test_g04_a_prompt_can_not_be_cut_to_anything(wanted: int) -> None:
    response = await Harness().complete(truncate_prompt_tokens=wanted)
    assert response.status_code == 400
    assert error_of(response)["param"] == "truncate_prompt_tokens"


async def test_g04_logprobs_name_tokens_by_id_if_asked() -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    [choice] = (await Harness().complete([70, 71], logprobs=1, echo=True, **fields)).json()[
        "choices"
    ]
    scores = choice["logprobs"]
    assert scores["tokens"] == ["token_id:70", "token_id:71", "token_id:70", "token_id:71"]
    assert "token_id:70" in scores["top_logprobs"][2]
    chat = await Harness().chat(logprobs=True, top_logprobs=1, **fields)
    [_, second] = chat.json()["choices"][0]["logprobs"]["content"]
    assert second["token"] == second["top_logprobs"][0]["token"]
    assert second["token"] == f"token_id:{second['bytes'][0]}"  # a token is a byte here


@pytest.mark.parametrize(
    ("path", "remedy"),
    [("/v1/responses/resp_1", "stored"), ("/v1/audio/speech", "text alone"),
     ("/api/generate", "/v1/completions"), ("/api/chat", "/v1/chat/completions"),
     ("/v1/models/", "did you mean /v1/models?"), ("/rerank", "/v1/score"),
     ("/api/show", "/v1/models"), ("/info", "/v1/models"), ("/nothing", "/docs")],
)  # fmt: skip
async def test_g04_routes_of_other_servers_say_what_stands_here(path: str, remedy: str) -> None:
    response = await Harness().get(path)
    assert response.status_code == 404
    assert remedy in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "status", "remedy"),
    [("/v1/models/tiny:generateContent", 405, "/v1/chat/completions"),
     ("/v1beta/models/tiny:streamGenerateContent", 404, "/v1/chat/completions"),
     ("/", 405, "/v1/completions"), ("/live", 405, "send GET, HEAD")],
)  # fmt: skip
async def test_g04_what_other_servers_take_is_told_where_to_go(
    path: str, status: int, remedy: str
) -> None:
    """As the clients of Gemini and of TGI send it."""
    response = await Harness().post(path, {})
    assert response.status_code == status
    assert remedy in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_g04_an_event_is_one_line_for_whoever_reads_lines(path: str) -> None:
    said = "a\u2028b\u2029c\x85d é"
    body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 40}
    body |= {"prompt": said} if path == "/v1/completions" else {"messages": [USER]}
    response = await saying(said).post(path, body)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(_text_of(json.loads(line.removeprefix("data: "))) for line in lines)
    assert text.startswith(said)
    assert "é" in response.text  # other letters are sent as they are


def _text_of(chunk: dict[str, Any]) -> str:
    for choice in chunk.get("choices", ()):
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return str(chunk.get("delta", {}).get("text") or "")


async def test_g10_a_proxy_may_write_scheme_and_host_in_front_of_a_path() -> None:
    harness = Harness(api_key="k")
    for path, status in (("/v1/models", 401), ("/health", 200), ("", 200)):
        async with harness.connected(f"http://evil/{path.lstrip('/')}", {}) as connection:
            connection.scope["method"] = "GET"
            assert (await connection.sent.get())["status"] == status


async def test_s03_an_adapters_name_may_have_a_slash_as_the_hubs_have() -> None:
    lora = LoraSettings(enable_lora=True, lora_modules=(LoraModule("team/sql", "/x"),))
    harness = Harness(FakeEngine(), lora=lora)
    response = await harness.get("/v1/models/team/sql")
    assert response.json()["id"] == "team/sql"
    assert (await harness.get("/v1/models/team%2Fsql")).json()["id"] == "team/sql"
    for name in ("team/sql", "tiny:team/sql"):
        assert (await harness.complete(model=name)).status_code == 200
