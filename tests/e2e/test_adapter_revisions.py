"""Adapters uploaded in request bodies: revisions that are published while others stream (A05)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.adapter_server import ADMIN, AdapterServer, cached, completion, serving, tokens
from tests.e2e.conftest import HEADERS
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
TAR = {"content-type": "application/x-tar"}
LONG = 200


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters) -> Iterator[AdapterServer]:
    cache, template = tiny.model.parent / "cache", tiny.model.parent / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with serving(
        tiny,
        env=slow_steps(tiny.model.parent, while_there=tiny.slow),
        **{
            "lora-cache-dir": str(cache),
            "lora-max-fetch-size": "0.001",
            "chat-template": str(template),
        },
    ) as server:
        yield server


def archive(folder: Path, *names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names or ("adapter_config.json", "adapter_model.safetensors"):
            tar.add(folder / name, arcname=name)
    return out.getvalue()


def upload(server: AdapterServer, name: str, body: bytes, **more: str) -> httpx.Response:
    return server.client.post(
        "/v1/upload_lora_adapter", params={"lora_name": name} | more, content=body,
        headers=ADMIN | TAR,
    )  # fmt: skip


def revision(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["adapter_revision"]
    return found


def test_a05_a_revision_is_published_under_a_running_stream(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    folders = {
        number: tiny.write(f"rev{number}", replace(RECIPES["few"], seed=40 + number))
        for number in (1, 2, 3)
    }
    first = upload(server, "live", archive(folders[1]))
    assert first.status_code == 200, first.text
    old = first.json()["revision"]
    assert revision(server.complete("live", PROMPT)) == old

    expected = {number: tiny.greedy(PROMPT, f"rev{number}", 8) for number in (1, 2)}
    tiny.slow.touch()  # so that the stream is not over before the old revision is asked again
    stream = server.stream(completion("live", PROMPT, LONG) | {"prompt": [*PROMPT, 5]})
    seen = [next(stream)]
    assert seen[0]["choices"][0]["adapter_revision"] == old

    second = upload(server, "live", archive(folders[2]))
    new = second.json()["revision"]
    assert new != old
    answer = server.complete("live", PROMPT)
    assert (revision(answer), tokens(answer)) == (new, expected[2])
    assert cached(answer) == 0, "pages of another revision were found"
    # The old revision is alive while its stream runs, and finds the pages that it computed.
    answer = server.complete(f"live@{old}", PROMPT)
    assert (revision(answer), tokens(answer)) == (old, expected[1])
    assert cached(answer) > 0
    tiny.slow.unlink()
    assert cached(server.complete(f"live@{new}", PROMPT)) > 0

    seen += stream
    said = [token for event in seen for token in event["choices"][0].get("token_ids") or ()]
    assert said == tiny.greedy([*PROMPT, 5], "rev1", LONG)
    server.assert_balance()
    over = server.complete(f"live@{old}", PROMPT)
    assert over.status_code == 404, over.text
    assert cached(server.complete("live", PROMPT)) > 0, "the newest revision's pages stay"
    assert upload(server, "live", archive(folders[2])).json()["status"] == "unchanged"


def test_a05_every_route_names_the_revision(server: AdapterServer, tiny: TinyAdapters) -> None:
    made = upload(server, "chatty", archive(Path(tiny.path("few")))).json()["revision"]
    body: dict[str, Any] = {
        "model": "chatty", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4,
    }  # fmt: skip
    answer = server.post("/v1/chat/completions", body)
    assert answer.json()["choices"][0]["adapter_revision"] == made
    assert server.post("/v1/messages", body).json()["adapter_revision"] == made
    started = events(server.post("/v1/messages", body | {"stream": True}))[0]
    assert started["message"]["adapter_revision"] == made
    body = {"model": "chatty", "input": "hi", "max_output_tokens": 4}
    assert server.post("/v1/responses", body).json()["adapter_revision"] == made
    created, *_, ended = events(server.post("/v1/responses", body | {"stream": True}))
    assert created["response"]["adapter_revision"] == made
    assert ended["response"]["adapter_revision"] == made
    base = server.post("/v1/responses", body | {"model": "base"}).json()
    assert "adapter_revision" not in base


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """What a stream's events carry."""
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("make", "status", "reason"),
    [
        (lambda folder: b"not a tar", 400, "not a whole tar archive"),
        (lambda folder: archive(folder)[:3000], 400, "not a whole tar archive|damaged|header"),
        (lambda folder: archive(folder, "adapter_config.json"), 400, "no adapter_model"),
        (lambda folder: b"\0" * (4 << 20), 413, "--lora-max-fetch-size"),
    ],
)
def test_a05_a_bad_upload_changes_nothing(
    server: AdapterServer, tiny: TinyAdapters, make: Any, status: int, reason: str
) -> None:
    good = upload(server, "steady", archive(Path(tiny.path("few"))))
    assert good.status_code == 200, good.text
    refused = upload(server, "steady", make(Path(tiny.path("other"))))
    assert refused.status_code == status, refused.text
    answer = server.complete("steady", PROMPT)
    assert revision(answer) == good.json()["revision"]
    assert tokens(answer) == tiny.greedy(PROMPT, "few", 8)


def test_a05_an_archive_can_place_no_file_elsewhere(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.add(Path(tiny.path("few"), "adapter_model.safetensors"), "../escaped")
    refused = upload(server, "sly", out.getvalue())
    assert refused.status_code == 400
    assert "link or a device" in refused.json()["error"]["message"]
    assert not list(tiny.model.parent.rglob("escaped"))


def test_a05_uploads_need_the_admin_key(server: AdapterServer, tiny: TinyAdapters) -> None:
    body = archive(Path(tiny.path("few")))
    for headers, status in ((HEADERS, 403), ({}, 401)):
        answer = server.client.post(
            "/v1/upload_lora_adapter", params={"lora_name": "x"}, content=body,
            headers=headers | TAR,
        )  # fmt: skip
        assert answer.status_code == status
    for name in ("tiny", "a b", "../x"):
        assert upload(server, name, body).status_code == 400


def test_a04_adapters_say_where_they_are_why_they_left_and_how_they_came(
    server: AdapterServer, tiny: TinyAdapters
) -> None:
    """Two slots and host memory for three: the fourth adapter puts the first out."""
    names = [f"seen{number}" for number in range(4)]
    for number, name in enumerate(names):
        path = tiny.write(name, replace(RECIPES["few"], seed=80 + number))
        assert server.load(name, str(path)).status_code == 200
        assert server.complete(name, PROMPT).status_code == 200
    answer = server.client.get("/v1/adapters", headers=HEADERS)
    states = {item["name"]: item for item in answer.json()["data"]}
    assert states["seen3"]["tier"] == "device"
    assert set(states["seen3"]["came_seconds"]) == {"storage to host", "host to device"}
    assert all(seconds > 0 for seconds in states["seen3"]["came_seconds"].values())
    assert states["seen0"]["tier"] == "storage"
    assert states["seen0"]["left"] == "host: its memory was needed for another adapter"
    assert len(states["seen0"]["revision"]) == 12
    text = server.client.get("/metrics", headers=HEADERS).text
    assert 'manyroots:adapter_left_total{model_name="tiny",reason="evicted",tier="host"}' in text
