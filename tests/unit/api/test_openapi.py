"""The document is made of what checks requests (G05)."""

from __future__ import annotations

import json

import pytest

from manyroots.config import LoraSettings
from tests.unit.api.harness import Harness

pytestmark = pytest.mark.anyio


async def test_g05_the_document_has_every_route_and_the_fields_that_are_checked() -> None:
    harness = Harness(
        lora=LoraSettings(enable_lora=True), admin_key="a", enable_lora_endpoints=True
    )
    document = (await harness.get("/openapi.json")).json()
    routes = {route.path.replace(":path", "") for route in harness.app.routes}  # type: ignore[attr-defined]
    assert set(document["paths"]) == routes
    schemas = document["components"]["schemas"]
    assert {"messages", "max_completion_tokens", "seed"} <= set(
        schemas["ChatRequest"]["properties"]
    )
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["user"]["description"].startswith("Accepted")
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas


async def test_g05_the_document_and_its_page_need_no_key_and_no_other_host() -> None:
    harness = Harness(api_key="k", root_path="/llm")
    assert (await harness.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]
    page = await harness.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/llm/openapi.json" in page.text
    assert "http" not in page.text
