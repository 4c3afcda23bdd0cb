"""Pause, sleep, other weights and an empty cache over HTTP: for the admin key alone (G06)."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

from manyroots.messages import ControlReply
from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer a"}
PATHS = {
    "/pause": "pause abort", "/pause_generation": "pause abort", "/resume": "resume",
    "/continue_generation": "resume", "/sleep": "sleep abort", "/wake_up": "wake",
    "/release_memory_occupation": "sleep abort", "/resume_memory_occupation": "wake",
    "/reset_prefix_cache": "reset", "/flush_cache": "reset",
}  # fmt: skip


@pytest.mark.parametrize("path", [*PATHS, "/update_weights", "/is_paused", "/is_sleeping"])
async def test_g06_nobody_but_the_admin(path: str) -> None:
    harness = Harness(admin_key="a", api_key="k")
    method = harness.get if path.startswith("/is_") else lambda p, **m: harness.post(p, {}, **m)
    assert (await method(path, headers={"authorization": "Bearer k"})).status_code == 403  # type: ignore[operator]
    assert (await method(path)).status_code == 401  # type: ignore[operator]
    assert not harness.engine.controls
    assert (await Harness().post(path, {})).status_code == 404, "without an admin there are none"


@pytest.mark.parametrize(("path", "told"), PATHS.items())
async def test_g06_what_the_admin_asks_is_done(path: str, told: str) -> None:
    harness = Harness(admin_key="a")
    async with harness.client as client:
        response = await client.post(path, headers=ADMIN)
    assert response.json()["success"] is True
    assert harness.engine.controls == [told]


async def test_g06_weights_are_updated_in_a_pause() -> None:
    harness = Harness(admin_key="a")
    body: dict[str, Any] = {"model_path": "step-2"}
    response = await harness.post("/update_weights", body, headers=ADMIN)
    assert response.json()["freed_pages"] == 6
    assert harness.engine.controls == ["pause wait", "update step-2", "resume"]
    harness.engine.is_paused = True
    harness.engine.controls.clear()
    await harness.post("/update_weights_from_disk", body, headers=ADMIN)
    assert harness.engine.controls == ["update step-2"], "a pause that was there stays"


async def test_g06_updates_at_once_come_one_after_the_other() -> None:
    """G06: the second would find a pause that is the first one's, and not there yet."""
    harness = Harness(admin_key="a")
    engine = harness.engine
    real = engine.update_weights

    async def update(path: str) -> ControlReply:
        await asyncio.sleep(0.01)
        return await real(path)

    with mock.patch.object(engine, "update_weights", update):
        async with harness.client as client:
            asked = [
                client.post("/update_weights", json={"model_path": path}, headers=ADMIN)
                for path in ("one", "two")
            ]
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    assert engine.controls == [
        "pause wait", "update one", "resume", "pause wait", "update two", "resume",
    ]  # fmt: skip


async def test_g06_an_update_does_not_end_a_pause_that_was_asked_for_meanwhile() -> None:
    harness = Harness(admin_key="a")
    engine = harness.engine
    async with harness.client as client:

        async def update(path: str) -> ControlReply:
            await client.post("/pause?mode=keep", headers=ADMIN)
            return ControlReply(1)

        with mock.patch.object(engine, "update_weights", update):
            body = {"model_path": "one"}
            answer = await client.post("/update_weights", json=body, headers=ADMIN)
    assert answer.status_code == 200
    assert engine.controls == ["pause wait", "pause keep"]
    assert engine.is_paused


async def test_g06_modes_and_states() -> None:
    harness = Harness(admin_key="a")
    await harness.post("/pause?mode=keep", {}, headers=ADMIN)
    assert (await harness.get("/is_paused", headers=ADMIN)).json() == {"is_paused": True}
    response = await harness.post("/pause?mode=maybe", {}, headers=ADMIN)
    assert error_of(response)["param"] == "mode"
    await harness.post("/sleep?mode=wait", {}, headers=ADMIN)
    assert harness.engine.controls == ["pause keep", "sleep wait"]
    assert (await harness.get("/is_sleeping", headers=ADMIN)).json() == {"is_sleeping": True}
    assert (await harness.get("/health")).status_code == 200
    assert (await harness.get("/ready")).status_code == 503
    response = await harness.complete()
    assert response.status_code == 503
    assert "asleep" in error_of(response)["message"]
