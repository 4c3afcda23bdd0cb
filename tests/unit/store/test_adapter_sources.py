"""Adapters over HTTP in ranges: redirects, changes, limits, and how stores are signed (A04)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from manyroots.config import LoraSettings
from manyroots.errors import AdapterError, NotFoundError
from manyroots.store.sources import http_ranges
from manyroots.store.sources.address import parse_address
from manyroots.store.sources.sources import AdapterSources

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Shelf:
    """A small web server: files by path, and places that redirect."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.has_ranges = True
        self.asked: list[tuple[str, str | None]] = []
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path, given = self.path.partition("?")[0], self.headers.get("Range")
                shelf.asked.append((path, given))
                if path in shelf.redirects:
                    self.send_response(302)
                    self.send_header("Location", shelf.redirects[path])
                    self.end_headers()
                elif path not in shelf.files:
                    self.send_error(404)
                else:
                    self._send(shelf.files[path], given if shelf.has_ranges else None)

            def _send(self, body: bytes, given: str | None) -> None:
                etag = hashlib.sha256(body).hexdigest()
                if given is not None:
                    first, last = map(int, given.removeprefix("bytes=").split("-"))
                    told = f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
                    body = body[first : last + 1]
                    self.send_response(206)
                    self.send_header("Content-Range", told)
                else:
                    self.send_response(200)
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", "c" * 40)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def put(self, path: str, weights: bytes = b"weights") -> None:
        self.files |= {f"{path}/{CONFIG}": b"{}", f"{path}/{WEIGHTS}": weights}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.close()


Make = Callable[..., AdapterSources]


@pytest.fixture
def sources(tmp_path: Path) -> Make:
    def make(*prefixes: str, **more: Any) -> AdapterSources:
        return AdapterSources(
            LoraSettings(
                enable_lora=True, lora_source=prefixes, lora_cache_dir=str(tmp_path / "cache"),
                **more,
            )
        )  # fmt: skip

    return make


def test_a04_ranges_make_the_same_bytes(
    shelf: Shelf, sources: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_ranges, "RANGE_BYTES", 1000)
    data = os.urandom(10_500)
    shelf.put("/a/x", data)
    folder = sources(f"{shelf.url}/a").by_name("x").folder
    assert (folder / WEIGHTS).read_bytes() == data
    ranges = {given for path, given in shelf.asked if path.endswith(WEIGHTS)}
    assert len(ranges) == 12, "the first byte, and eleven ranges"


def test_a04_a_server_without_ranges_is_read_whole(shelf: Shelf, sources: Make) -> None:
    shelf.has_ranges = False
    shelf.put("/a/x", b"w" * 5000)
    folder = sources(f"{shelf.url}/a").by_name("x").folder
    assert (folder / WEIGHTS).read_bytes() == b"w" * 5000


def test_a04_a_redirect_inside_the_prefix_is_followed_and_one_outside_is_not(
    shelf: Shelf, sources: Make
) -> None:
    other = Shelf()
    other.put("/a/x")
    shelf.put("/a/real", b"real")
    shelf.put("/b/private")
    for file in (CONFIG, WEIGHTS):
        shelf.redirects[f"/a/inside/{file}"] = f"/a/real/{file}"
        shelf.redirects[f"/a/up/{file}"] = f"/b/private/{file}"
        shelf.redirects[f"/a/dots/{file}"] = f"/a/../b/private/{file}"
        shelf.redirects[f"/a/coded/{file}"] = f"/a/%2e%2e/b/private/{file}"
        shelf.redirects[f"/a/host/{file}"] = f"{other.url}/a/x/{file}"
        shelf.redirects[f"/a/file/{file}"] = "file:///etc/passwd"
        shelf.redirects[f"/a/loop/{file}"] = f"/a/loop/{file}"
    found = sources(f"{shelf.url}/a")
    assert (found.by_name("inside").folder / WEIGHTS).read_bytes() == b"real"
    for name in ("up", "dots", "coded", "host", "file"):
        with pytest.raises(AdapterError, match="outside its --lora-source"):
            found.by_name(name)
    with pytest.raises(AdapterError, match="more than 5 times"):
        found.by_name("loop")
    assert not other.asked
    assert not any("private" in path for path, _ in shelf.asked)
    other.close()


def test_a04_a_size_over_the_limit_is_not_downloaded(shelf: Shelf, sources: Make) -> None:
    shelf.put("/a/x", b"w" * 3000)
    with pytest.raises(AdapterError, match="at most 2147 are fetched"):
        sources(f"{shelf.url}/a", lora_max_fetch_size=2e-6).by_name("x")
    assert {given for path, given in shelf.asked if path.endswith(WEIGHTS)} == {"bytes=0-0"}


def test_a04_a_name_that_is_not_there_is_not_asked_for_again_at_once(
    shelf: Shelf, sources: Make
) -> None:
    found = sources(f"{shelf.url}/a", f"{shelf.url}/b")
    for _ in range(5):
        with pytest.raises(NotFoundError):
            found.by_name("x")
    assert len(shelf.asked) == 2, "once of each source"


def test_a04_a_copy_of_the_same_state_is_not_fetched_again(shelf: Shelf, sources: Make) -> None:
    shelf.put("/a/x")
    found = sources(f"{shelf.url}/a")
    first = found.by_name("x").folder
    num_asked = len(shelf.asked)
    assert found.by_name("x").folder == first
    assert [given for _, given in shelf.asked[num_asked:]] == ["bytes=0-0"] * 2


def test_a04_google_cloud_storage_is_asked_with_a_signature(
    shelf: Shelf, sources: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {
                "type": "service_account", "client_email": "reader@tests", "private_key_id": "1",
                "private_key": key.decode(), "gcs_base_url": shelf.url,
            }
        )
    )  # fmt: skip
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    shelf.put("/bucket/a/x", b"from google")
    folder = sources("gs://bucket/a").by_name("x").folder
    assert (folder / WEIGHTS).read_bytes() == b"from google"


def test_a04_a_hub_id_is_fetched_by_the_hubs_own_client(shelf: Shelf, tmp_path: Path) -> None:
    """In a process of its own: the client reads its endpoint when it is imported."""
    for revision in ("main", "c" * 40):
        shelf.put(f"/owner/name/resolve/{revision}", b"from the hub")
    code = (
        "import sys; from manyroots.config import LoraSettings; "
        "from manyroots.store.sources.sources import AdapterSources; "
        "found = AdapterSources(LoraSettings(enable_lora=True)).by_operator('owner/name'); "
        f"print((found.folder / {WEIGHTS!r}).read_text())"
    )
    env = os.environ | {"HF_ENDPOINT": shelf.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "from the hub", done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ftp://host/a", "begins with none of"),
        ("s3:///a", "host or bucket|empty part"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/../b", "empty part, dots"),
        ("s3://bucket/a%2fb", "characters other"),
        ("https://user:word@host/a", "host or bucket"),
        ("https://host/a?x=1", "characters other"),
        ("http://example.org/a", "use https://"),
        ("s3://bucket/a#sha256=abc", "64 hex digits"),
    ],
)
def test_a04_addresses_that_could_mislead_are_refused(text: str, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason):
        parse_address(text)


def test_a04_a_prefix_ends_at_whole_parts() -> None:
    prefix = parse_address("s3://bucket/team/")
    assert parse_address("s3://bucket/team/x").is_below(prefix)
    for other in (
        "s3://bucket/teams/x",
        "s3://bucket/tea",
        "s3://buckets/team/x",
        "gs://bucket/team/x",
    ):
        assert not parse_address(other).is_below(prefix)
