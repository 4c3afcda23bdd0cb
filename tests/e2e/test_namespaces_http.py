"""Whose pages are whose, as callers of the server see it: `cached_tokens` and the page counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.adapter_server import (
    MODEL,
    PAGE_SIZE,
    AdapterServer,
    cached,
    completion,
    serving,
    tokens,
)
from tests.helpers.adapter_folders import Recipe
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

COUNT = 8
INVOCATION = [201, 202]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    tiny = TinyAdapters(tmp_path_factory.mktemp("tiny"))
    recipe = Recipe(rank=8, modules=ATTENTION, seed=9, invocation_tokens=tuple(INVOCATION))
    tiny.write("activated", recipe)
    return tiny


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    modules = [f"{name}={tiny.path(name)}" for name in ("all", "few", "activated")]
    env = slow_steps(tiny.model.parent, while_there=tiny.slow)
    with serving(tiny, *modules, env=env) as server:
        yield server


def prompt(seed: int, length: int = 22) -> list[int]:
    """Tokens that no other test has sent."""
    return [(seed * 31 + index * 7) % 190 for index in range(length)]


def full_pages(length: int) -> int:
    return length // PAGE_SIZE * PAGE_SIZE


def test_n01_the_same_tokens_share_nothing_between_adapters_and_base(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """N01, N05, N19: each is cold although the others are warm, then finds every full page of its
    own; tokens are PEFT's both times."""
    same = prompt(1)
    models = {"all": "all", MODEL: None, "few": "few"}
    for is_warm in (False, True):
        for model, adapter in models.items():
            answer = server.complete(model, same, COUNT)
            assert cached(answer) == (full_pages(len(same)) if is_warm else 0), model
            assert tokens(answer) == tiny.greedy(same, adapter, COUNT)


def test_n12_unloading_frees_the_pages_of_the_adapter(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """N12: free counts return to what they were before it was used, at once."""
    assert server.load("it", tiny.path("other")).status_code == 200
    server.assert_balance()
    before = server.pages()
    for seed in (2, 3):
        assert tokens(server.complete("it", prompt(seed), COUNT))
    server.assert_balance()
    used = before.free - server.pages().free
    # Keys and values of the last token are never computed.
    assert used == 2 * ((len(prompt(2)) + COUNT - 1) // PAGE_SIZE)
    answer = server.unload("it").json()
    assert (answer["status"], answer["freed_pages"]) == ("unloaded", used)
    server.assert_balance()
    assert server.pages() == before


def test_n13_unloading_in_mid_stream_keeps_exactly_what_the_stream_holds(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """N13, W04: the rest goes at once, and that when the stream is over, without another call."""
    count = 220
    assert server.load("it", tiny.path("other")).status_code == 200
    server.assert_balance()
    before = server.pages()
    assert tokens(server.complete("it", prompt(4), COUNT))
    got: list[int] = []
    unloaded = None
    tiny.slow.touch()  # so that the stream is not over before the adapter is unloaded
    for event in server.stream(completion("it", prompt(5), count)):
        got += event["choices"][0].get("token_ids") or []
        if unloaded is None:
            unloaded = server.unload("it").json()
            pages = server.pages()
            # Held is the stream's own: what others left is gone.
            assert pages.cached == before.cached
            assert pages.held == before.free - pages.free > 0
            tiny.slow.unlink()
            assert server.complete("it", prompt(5), COUNT).status_code == 404
    assert unloaded is not None
    assert (unloaded["status"], unloaded["draining_requests"]) == ("draining", 1)
    assert unloaded["freed_pages"] == (len(prompt(4)) + COUNT - 1) // PAGE_SIZE
    assert got == tiny.greedy(prompt(5), "other", count)
    server.assert_balance()
    assert server.pages() == before


def test_n19_an_unknown_name_is_a_404_that_names_it(server: AdapterServer) -> None:
    """N19: never an answer of the base model, however the name is written."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    for name in ("nobody", "ALL", "all ", f"{MODEL}:nobody", "few:all", f"{MODEL}:", "all/"):
        for answer in (
            server.complete(name, prompt(6)),
            server.post("/v1/chat/completions", chat | {"model": name}),
            server.post("/v1/completions", completion(name, prompt(6), 4) | {"stream": True}),
        ):
            assert answer.status_code == 404, (name, answer.text)
            assert name.strip() in answer.json()["error"]["message"]
    answer = server.complete(MODEL, prompt(6), lora_path="nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json()["error"]["message"]


def test_n20_a_name_means_its_content(server: AdapterServer, tiny: TinyAdapters) -> None:
    """N20: other weights under the same name find nothing of the old ones, in place or after an
    unload; two names of the same content share pages."""
    same = prompt(7)
    for content, more in (
        ("stable", {}), ("other", {"load_inplace": True}), ("stable", {"load_inplace": True}),
    ):  # fmt: skip
        assert server.load("it", content, **more).status_code == 200
        answer = server.complete("it", same, COUNT)
        assert (cached(answer), tokens(answer)) == (0, tiny.greedy(same, content, COUNT))
        assert cached(server.complete("it", same, COUNT)) == full_pages(len(same))
    assert server.load("it", "stable", load_inplace=True).json()["status"] == "unchanged"
    assert cached(server.complete("it", same, COUNT)) == full_pages(len(same))
    assert server.load("twin", "stable").status_code == 200
    answer = server.complete("twin", same, COUNT)
    assert cached(answer) == full_pages(len(same))
    assert tokens(answer) == tiny.greedy(same, "stable", COUNT)
    assert server.unload("it").status_code == 200
    assert cached(server.complete("twin", same, COUNT)) == full_pages(len(same))
    assert server.unload("twin").status_code == 200
    assert server.load("it", "stable").status_code == 200
    assert cached(server.complete("it", same, COUNT)) == 0
    assert server.unload("it").status_code == 200


def test_n21_salts_separate_tenants_of_one_adapter(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """N21, N04: no salt, two tenants, and salts that are names of adapters and of the model."""
    same = prompt(8)
    wanted = tiny.greedy(same, "few", COUNT)
    salts = [None, "tenant a", "tenant b", "few", "all", MODEL]
    for expected in (0, full_pages(len(same))):
        for salt in salts:
            more = {} if salt is None else {"cache_salt": salt}
            answer = server.complete("few", same, COUNT, **more)
            assert (cached(answer), tokens(answer)) == (expected, wanted), salt
    assert cached(server.complete(MODEL, same, COUNT, cache_salt="few")) == 0


def test_n22_an_activated_adapter_shares_the_base_models_pages_up_to_its_invocation(
    server: AdapterServer,
) -> None:
    """N22: the adapter and the base model share the pages before the invocation, in both
    directions; the pages after it are the adapter's own."""
    document = prompt(9, 21)
    asked = [*document, *INVOCATION, 30, 31, 32, 33, 34, 35, 36]
    cold = tokens(server.complete("activated", asked, COUNT, cache_salt="cold"))
    assert cold != tokens(server.complete(MODEL, asked, COUNT, cache_salt="cold"))
    assert tokens(server.complete(MODEL, document, COUNT))
    answer = server.complete("activated", asked, COUNT)
    assert (cached(answer), tokens(answer)) == (full_pages(len(document)), cold)
    answer = server.complete("activated", asked, COUNT)
    assert (cached(answer), tokens(answer)) == (full_pages(len(asked)), cold)
    # The base model finds none of the adapter's pages, and what the adapter computed of its own.
    assert cached(server.complete(MODEL, asked, COUNT)) == full_pages(len(document))
    other = prompt(10, 21)
    assert tokens(server.complete("activated", [*other, *INVOCATION, 30], COUNT))
    assert cached(server.complete(MODEL, other, COUNT)) == full_pages(len(other))


def test_pages_and_slots_balance_when_all_is_unloaded(server: AdapterServer) -> None:
    """N12, W08"""
    server.assert_empty_after_unloading_all()
