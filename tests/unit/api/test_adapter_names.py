"""Adapters over HTTP: how requests name them, and where they show (S02, S04, N19, N21, W20)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.ids import Tier
from manyroots.messages import (
    AdapterStats,
    ErrorKind,
    FinishReason,
    LoadTime,
    Notice,
    Output,
    Stats,
    Submit,
)
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.fake_engine import FakeEngine, repeat_prompt
from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio

LORA = LoraSettings(
    enable_lora=True,
    lora_modules=(
        LoraModule("sql", "/adapters/sql"),
        LoraModule("v-2", "/adapters/v2", base_model_name="grandparent"),
    ),
)


def harness(engine: FakeEngine | None = None, **settings: Any) -> Harness:
    return Harness(engine, lora=LORA, **settings)


def asked(server: Harness) -> list[str | None]:
    return [submit.adapter for submit in server.engine.submitted]


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"model": "tiny"}, None),
        ({"model": "sql"}, "sql"),
        ({"model": "tiny:sql"}, "sql"),
        ({"model": "tiny", "lora_path": "sql"}, "sql"),
        ({"model": "sql", "lora_path": "sql"}, "sql"),
        ({"model": "tiny:sql", "lora_path": "sql"}, "sql"),
        ({"model": "tiny", "lora_path": None}, None),
        ({"model": "v-2"}, "v-2"),
        ({"model": "tiny:v-2"}, "v-2"),
    ],
)
async def test_s02_adapters_are_named_three_ways(
    fields: dict[str, Any], adapter: str | None
) -> None:
    """S02, N19: and n choices all have it."""
    server = harness()
    for answer in (
        await server.complete(max_tokens=1, n=2, **fields),
        await server.chat(max_tokens=1, **fields),
    ):
        assert answer.status_code == 200
        assert answer.json()["model"] == fields["model"]
    assert asked(server) == [adapter] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"model": "tiny:nobody"}, "model"),
        ({"model": "other:sql"}, "model"),
        ({"model": "tiny:"}, "model"),
        ({"model": ":sql"}, "model"),
        ({"model": "tiny", "lora_path": "nobody"}, "lora_path"),
        ({"model": "tiny", "lora_path": ""}, "lora_path"),
        ({"model": "tiny", "lora_path": "/adapters/sql"}, "lora_path"),
    ],
)
async def test_s02_an_unknown_adapter_is_a_404_that_names_it(
    fields: dict[str, Any], param: str
) -> None:
    """S02, N19: never the base model's answer."""
    server = harness()
    for answer in (await server.complete(**fields), await server.chat(**fields)):
        assert answer.status_code == 404
        error = error_of(answer)
        assert error["param"] == param
        assert error["code"] == "model_not_found"
        assert repr(fields[param]) in error["message"]
    assert server.engine.submitted == []


async def test_s02_in_a_batch_each_prompt_may_have_its_own() -> None:
    """S02: null is the base model."""
    server = harness()
    answer = await server.complete(
        ["ab", "cd", "ef"], lora_path=["sql", None, "v-2"], n=2, max_tokens=1
    )
    assert answer.status_code == 200
    assert asked(server) == ["sql", "sql", None, None, "v-2", "v-2"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "sql", "lora_path": "v-2"},
        {"model": "sql", "lora_path": ["sql", None]},
        {"model": "tiny", "lora_path": ["sql"]},
        {"model": "tiny", "lora_path": []},
        {"model": "tiny", "lora_path": ["sql", 3]},
        {"model": "tiny", "lora_path": 7},
    ],
)
async def test_s02_what_contradicts_itself_is_a_400(fields: dict[str, Any]) -> None:
    """S02"""
    server = harness()
    answer = await server.complete(["ab", "cd"], **fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("lora_path")
    assert server.engine.submitted == []


async def test_n21_the_salt_goes_with_the_adapter() -> None:
    """N21"""
    server = harness()
    await server.complete(model="sql", cache_salt="tenant", max_tokens=1)
    [submit] = server.engine.submitted
    assert (submit.adapter, submit.salt) == ("sql", "tenant")


@pytest.mark.parametrize(
    ("kind", "status"),
    [(ErrorKind.NOT_FOUND, 404), (ErrorKind.REQUEST, 400), (ErrorKind.ENGINE, 500)],
)
async def test_w10_an_adapter_that_cannot_be_used_fails_its_requests_with_the_reason(
    kind: ErrorKind, status: int
) -> None:
    """W10: whole and streamed, with the same status; the base model's requests go on."""

    def rule(submit: Submit) -> Any:
        if submit.adapter is None:
            return repeat_prompt(submit)
        notice = Notice(error_kind=kind)
        return [Output(submit.request_id, [], FinishReason.ERROR, 0, error="r is 0", notice=notice)]

    server = harness(FakeEngine(rule))
    for ask in (server.complete, server.chat):
        for more in ({}, {"stream": True}):
            answer = await ask(model="sql", **more)
            assert answer.status_code == status
            assert "r is 0" in error_of(answer)["message"]
    answer = await server.complete(model="sql", stream=True, echo=True)
    assert answer.status_code == status
    assert (await server.complete(max_tokens=1)).status_code == 200


async def test_s02_models_lists_adapters_with_their_parent() -> None:
    """S01, S02"""
    server = harness()
    models = (await server.get("/v1/models")).json()["data"]
    shown = [(model["id"], model["root"], model["parent"]) for model in models]
    assert shown == [
        ("tiny", "tiny", None),
        ("sql", "/adapters/sql", "tiny"),
        ("v-2", "/adapters/v2", "grandparent"),
    ]
    one = await server.get("/v1/models/sql")
    assert one.json() == models[1]
    assert (await server.get("/v1/models/nobody")).status_code == 404


async def test_tokenize_takes_an_adapters_name() -> None:
    """G05."""
    server = harness()
    body = {"model": "sql", "prompt": "ab"}
    assert (await server.post("/tokenize", body)).status_code == 200
    assert (await server.post("/tokenize", body | {"model": "nobody"})).status_code == 404


class Counting(FakeEngine):
    """An engine whose adapters are somewhere."""

    @property
    def stats(self) -> Stats:
        adapters = AdapterStats(2, 1, 8, 3, 5, 1, 2, 10, 20, 4, 6, 7)
        return Stats(0, 0, 10, 10, 0, 0, 0, 0, 0, 0, 0, adapters)


def sample(text: str, name: str, **labels: str) -> float:
    for line in text.splitlines():
        match = re.fullmatch(rf"{re.escape(name)}(?:{{(.*)}})? (\S+)", line)
        if match is None:
            continue
        found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
        if labels.items() <= found.items():
            return float(match[2])
    raise AssertionError(f"no {name} with {labels}")


async def test_s04_metrics_say_where_adapters_are() -> None:
    """S04"""
    server = harness(Counting())
    text = (await server.get("/metrics")).text
    assert sample(text, "manyroots:adapters", tier="device") == 3
    assert sample(text, "manyroots:adapters", tier="host") == 5
    assert sample(text, "manyroots:adapters", tier="storage") == 2
    assert sample(text, "manyroots:adapter_slots_used") == 4
    assert sample(text, "manyroots:adapter_slots_total") == 8
    assert sample(text, "manyroots:adapter_draining") == 1
    assert sample(text, "manyroots:adapter_loads_total", source="host") == 10
    assert sample(text, "manyroots:adapter_loads_total", source="storage") == 20
    assert sample(text, "manyroots:adapter_evictions_total", tier="device") == 6


async def test_s04_metrics_before_the_first_step_and_without_lora() -> None:
    """S04"""
    text = (await harness().get("/metrics")).text
    assert sample(text, "manyroots:adapter_slots_used") == 0
    assert "manyroots:adapter_slots_used" not in (await Harness().get("/metrics")).text


async def test_s04_requests_are_counted_by_adapter_and_only_by_names_that_exist() -> None:
    """S04: callers can't make labels."""
    server = harness()
    await server.complete(model="sql", n=2, max_tokens=1)
    await server.complete(model="stranger", max_tokens=1)
    await server.complete(model="tiny", max_tokens=1)
    text = (await server.get("/metrics")).text
    assert sample(text, "manyroots:adapter_requests_total", adapter="sql") == 2
    assert "stranger" not in text
    assert text.count("manyroots:adapter_requests_total{") == 1


async def test_s04_running_and_waiting_adapters_show_as_dashboards_know_them() -> None:
    """S04"""
    server = harness()
    server.engine.gate.clear()
    body = {"model": "sql", "prompt": "ab", "stream": True}
    async with server.connected("/v1/completions", body) as connection:
        async with asyncio.timeout(PATIENCE_S):
            while not server.engine.running:
                await asyncio.sleep(0)
        text = (await server.get("/metrics")).text
        labels = {"max_lora": "8", "waiting_lora_adapters": "sql", "running_lora_adapters": ""}
        assert sample(text, "vllm:lora_requests_info", **labels) > 0
        server.engine.gate.set()
        while b"text" not in (await connection.sent.get()).get("body", b""):
            pass
        server.engine.gate.clear()
        text = (await server.get("/metrics")).text
        labels = {"waiting_lora_adapters": "", "running_lora_adapters": "sql"}
        assert sample(text, "vllm:lora_requests_info", **labels) > 0
    text = (await server.get("/metrics")).text
    labels = {"waiting_lora_adapters": "", "running_lora_adapters": ""}
    assert sample(text, "vllm:lora_requests_info", **labels) > 0


async def test_w20_first_token_latency_by_where_the_adapter_was() -> None:
    """W20"""
    places = iter([Tier.STORAGE, Tier.HOST, Tier.DEVICE, Tier.DEVICE])

    def rule(submit: Submit) -> Any:
        was = next(places) if submit.adapter else None
        for index, output in enumerate(repeat_prompt(submit)):
            output.notice = Notice(adapter_was=was) if index == 0 else None
            yield output

    server = harness(FakeEngine(rule))
    for model in ("sql", "sql", "tiny", "sql", "sql"):
        await server.complete(model=model, max_tokens=3)
    text = (await server.get("/metrics")).text
    name = "manyroots:adapter_time_to_first_token_seconds_count"
    assert [sample(text, name, adapter_was=was) for was in ("disk", "host", "warm")] == [1, 1, 2]


async def test_s04_load_seconds_by_source_and_failed_loads() -> None:
    """S04"""
    server = harness()
    tell = server.engine.watcher.loaded
    tell(LoadTime(Tier.STORAGE, Tier.HOST, 0.2, True))
    tell(LoadTime(Tier.HOST, Tier.DEVICE, 0.1, True))
    tell(LoadTime(Tier.HOST, Tier.DEVICE, 0.3, True))
    tell(LoadTime(Tier.STORAGE, Tier.HOST, 0.5, False))
    text = (await server.get("/metrics")).text
    name = "manyroots:adapter_load_seconds"
    assert sample(text, f"{name}_sum", source="host", target="device") == pytest.approx(0.4)
    assert sample(text, f"{name}_count", source="storage", target="host") == 1
    assert sample(text, "manyroots:adapter_failed_loads_total") == 1
