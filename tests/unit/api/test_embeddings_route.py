"""Embeddings: the hidden state after a text, of length 1 (G05)."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio


async def embed(harness: Harness | None = None, **fields: Any) -> Any:
    body = {"model": "tiny", "input": "hello"} | fields
    return await (harness or Harness()).post("/v1/embeddings", body)


async def test_g05_each_text_has_a_vector_of_length_one() -> None:
    harness = Harness()
    answer = (await embed(harness, input=["hello", "ab"])).json()
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert answer["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert all(submit.sampling.wants_hidden for submit in harness.engine.submitted)
    assert harness.state.service.concurrency.num_alive == 0


async def test_g05_vectors_as_base64_and_texts_as_tokens() -> None:
    answer = (await embed(encoding_format="base64", input=[[1, 2], [3]])).json()
    for item in answer["data"]:
        assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == pytest.approx(
            (0.6, 0.8)
        )


async def test_g05_the_models_own_length_may_be_asked_for() -> None:
    """As mem0 does; another is refused by the one there is."""
    assert len((await embed(dimensions=2)).json()["data"][0]["embedding"]) == 2
    assert "have 2" in error_of(await embed(dimensions=16))["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [None]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"dimensions": 16}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_g05_what_has_no_vector(fields: dict[str, Any], param: str) -> None:
    response = await embed(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_g05_many_texts_are_computed_in_portions() -> None:
    """G05: LangChain sends 1,000 texts at once and the AI SDK 2,048, whatever this server runs."""
    harness = Harness(max_prompts_per_request=4, max_queued_requests=0)
    texts = [f"{number:02}" for number in range(10)]
    answer = (await embed(harness, input=texts)).json()
    assert [item["index"] for item in answer["data"]] == list(range(10))
    assert answer["usage"]["prompt_tokens"] == 20
    assert [bytes(submit.prompt).decode() for submit in harness.engine.submitted] == texts
    assert harness.state.service.concurrency.num_alive == 0
    response = await embed(harness, input=[*texts, "a" * 600, "b"])
    assert response.status_code == 400
    assert "input[10] has 600" in error_of(response)["message"]
    assert harness.state.service.concurrency.num_alive == 0


async def test_g05_more_texts_than_openai_takes_are_refused() -> None:
    response = await embed(input=["a"] * 2049)
    assert response.status_code == 400
    assert "2049 prompts" in error_of(response)["message"]
