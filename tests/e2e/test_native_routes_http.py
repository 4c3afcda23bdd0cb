"""/score, /render and /generate over HTTP with a real model, held against the routes they equal."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HEADERS, Server
from tests.helpers.patience import PATIENCE_S


@pytest.fixture(scope="module")
def post(server: Server) -> Any:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=PATIENCE_S) as client:

        def send(path: str, **body: Any) -> Any:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text[:300]
            return response.json()

        yield send


def test_g05_scores_are_what_embeddings_and_logprobs_say(post: Any, model: str) -> None:
    """G05: the cosine of two texts' vectors; the probability of a token after a text."""
    texts = ["A cat sleeps.", "A kitten naps.", "Taxes rose in May."]
    vectors = [
        item["embedding"] for item in post("/v1/embeddings", model=model, input=texts)["data"]
    ]
    near = post("/score", model=model, text_1=texts[0], text_2=texts[1:])["data"]
    for item, other in zip(near, vectors[1:], strict=True):
        cosine = math.fsum(a * b for a, b in zip(vectors[0], other, strict=True))
        assert item["score"] == pytest.approx(cosine, abs=1e-4)
    labels = [post("/tokenize", prompt=word)["tokens"][-1] for word in (" Paris", " Rome")]
    query, item = "The capital of France", " is"
    [scores] = post("/v1/score", query=query, items=[item], label_token_ids=labels)["scores"]
    for label, score in zip(labels, scores, strict=True):
        prompt = [*post("/tokenize", prompt=query + item)["tokens"], label]
        echoed = post(
            "/v1/completions", model=model, prompt=prompt, max_tokens=0, echo=True, logprobs=0
        )
        logprob = echoed["choices"][0]["logprobs"]["token_logprobs"][-1]
        assert score == pytest.approx(math.exp(logprob), rel=1e-3)
    assert scores[0] > scores[1]


def test_g05_a_rendered_chat_and_generate_give_the_chats_text(post: Any, model: str) -> None:
    """G05: the token ids of /render, sent to /generate, are the chat."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Name a colour."}]}
    asked = chat | {"max_tokens": 6, "temperature": 0}
    shown = post("/v1/chat/completions/render", **asked)
    made = post(
        "/generate",
        input_ids=shown["token_ids"],
        sampling_params={"max_new_tokens": 6, "temperature": 0},
    )
    answer = post("/v1/chat/completions", **asked)
    assert made["text"] == answer["choices"][0]["message"]["content"]
    assert made["meta_info"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
