"""Several adapters with weights in one request, against PEFT's combination (A07)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.adapter_server import AdapterServer, cached, completion, serving, tokens
from tests.helpers.tiny_adapters import TinyAdapters

PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
COUNT = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    modules = [f"{name}={tiny.path(name)}" for name in ("all", "few", "stable", "other")]
    with serving(tiny, *modules) as server:
        yield server


def ask(server: AdapterServer, parts: list[tuple[str, float]], **more: Any) -> httpx.Response:
    adapters = [{"name": name, "weight": weight} for name, weight in parts]
    body = completion("tiny", PROMPT, COUNT) | {"adapters": adapters} | more
    return server.post("/v1/completions", body)


def by_peft(tiny: TinyAdapters, parts: list[tuple[str, float]]) -> list[int]:
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    base.generation_config.eos_token_id = None
    first, *others = [name for name, _ in parts]
    model = PeftModel.from_pretrained(base, tiny.path(first), adapter_name=first)
    for name in others:
        model.load_adapter(tiny.path(name), adapter_name=name)
    model.add_weighted_adapter(
        [name for name, _ in parts], [weight for _, weight in parts], "sum",
        combination_type="cat",
    )  # fmt: skip
    model.set_adapter("sum")
    model.eval()
    ids = torch.tensor([PROMPT])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT,
        pad_token_id=0,
    )  # fmt: skip
    return list(made[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    "parts",
    [
        [("other", 0.5), ("stable", 1.5)],
        [("all", 0.7), ("few", 0.4)],
        [("few", 2.0), ("other", -0.5), ("all", 0.25), ("stable", 1.0)],
    ],
)
def test_a07_a_combination_is_what_peft_makes_of_it(
    server: AdapterServer, tiny: TinyAdapters, parts: list[tuple[str, float]]
) -> None:
    answer = ask(server, parts)
    assert tokens(answer) == by_peft(tiny, parts)
    assert cached(answer) == 0
    assert cached(ask(server, parts)) > 0, "the same parts find their own pages"
    server.assert_balance()


def test_a07_weights_and_order_are_a_namespace_of_their_own(server: AdapterServer) -> None:
    ask(server, [("all", 1.0), ("few", 1.0)])
    assert cached(ask(server, [("all", 1.0), ("few", 0.5)])) == 0
    assert cached(ask(server, [("few", 1.0), ("all", 1.0)])) == 0
    assert cached(ask(server, [("all", 1.0)])) == 0
    assert cached(ask(server, [("all", 1.0), ("few", 1.0)])) > 0
    revisions = {
        ask(server, parts).json()["choices"][0]["adapter_revision"]
        for parts in ([("all", 1.0), ("few", 1.0)], [("few", 1.0), ("all", 1.0)])
    }
    assert len(revisions) == 2


def test_a07_a_new_revision_of_a_part_makes_another_sum(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    assert server.load("part", tiny.path("few")).status_code == 200
    parts = [("part", 1.0), ("other", 1.0)]
    assert tokens(ask(server, parts)) == by_peft(tiny, [("few", 1.0), ("other", 1.0)])
    assert server.load("part", tiny.path("all"), load_inplace=True).status_code == 200
    assert tokens(ask(server, parts)) == by_peft(tiny, [("all", 1.0), ("other", 1.0)])
    assert server.unload("part").status_code == 200
    assert ask(server, parts).status_code == 404
    server.assert_balance()


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"adapters": []}, 400, "from 1 to 4"),
        ({"adapters": [{"name": "all"}] * 5}, 400, "from 1 to 4"),
        ({"adapters": [{"name": "all"}, {"name": "all"}]}, 400, "twice"),
        ({"adapters": [{"name": "all", "weight": 1e9}]}, 400, "it must be from -100"),
        ({"adapters": [{"name": "never"}]}, 404, "does not exist"),
        ({"adapters": [{"name": "all"}], "model": "few"}, 400, "beside another adapter"),
        ({"adapters": [{"name": "all"}], "lora_path": "few"}, 400, "beside another adapter"),
        ({"adapters": [{"name": "all@0123456789ab"}]}, 404, "does not exist"),
        ({"adapters": [{"name": "all*2+few"}]}, 404, "does not exist"),
    ],
)
def test_a07_a_combination_that_can_not_be_is_refused(
    server: AdapterServer, change: dict[str, Any], status: int, reason: str
) -> None:
    answer = server.post("/v1/completions", completion("tiny", PROMPT, 2) | change)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]
