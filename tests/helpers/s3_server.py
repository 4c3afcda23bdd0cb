"""A real S3 server on loopback (moto's), behind a proxy that misbehaves for keys by their names.

A key with one of these words in it is served so: `status500` always fails, `flaky` fails once per
object, `slow` sends nothing, `truncated` sends half of its body and hangs up, `redirected` sends
its caller to another server, `changing` has another ETag in every answer. `fault` does the first
four to every request, whatever its key; `hangup` closes every connection without an answer.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tests.helpers.patience import PATIENCE_S

BUCKET = "shelf"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "reader",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@dataclass
class FaultyS3:
    """The server's address and what it was asked for."""

    url: str
    client: Any
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by path."""
    outside: Counter[str] = field(default_factory=Counter)
    """Requests that arrived where redirects lead."""
    most_at_once: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    """Ends slow answers."""
    fault: str = ""
    """Of every request from now on: `status500`, `slow`, `truncated` or `hangup`."""
    num_faults: int = 0
    """Requests that had the fault."""

    @property
    def env(self) -> dict[str, str]:
        return CREDENTIALS | {"AWS_ENDPOINT_URL": self.url}

    def put(self, key: str, folder: Path) -> None:
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            self.client.put_object(
                Bucket=BUCKET, Key=f"{key}/{file}", Body=(folder / file).read_bytes()
            )


@contextlib.contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="writer", aws_secret_access_key="secret",
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    found = FaultyS3("", client)
    outside = _serve(_outside_handler(found))
    proxy = _serve(_proxy_handler(found, port, f"http://127.0.0.1:{outside.server_port}"))
    found.url = f"http://127.0.0.1:{proxy.server_port}"
    try:
        yield found
    finally:
        found.released.set()
        for server in (proxy, outside):
            server.shutdown()
            server.server_close()
        moto.stop()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Connections that wait to be accepted: a full queue loses some for seconds."""


def _serve(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _outside_handler(found: FaultyS3) -> type[BaseHTTPRequestHandler]:
    class Outside(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.outside[self.path] += 1
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Outside


def _proxy_handler(found: FaultyS3, port: int, elsewhere: str) -> type[BaseHTTPRequestHandler]:
    lock, numbers, failed = threading.Lock(), itertools.count(1), Counter[str]()
    alive, one_by_one = [0], threading.Lock()

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            with lock:
                found.num_faults += bool(found.fault)
                found.asked[path] += 1
                failed[path] += 1
                alive[0] += 1
                found.most_at_once = max(found.most_at_once, alive[0])
                is_first = failed[path] == 1
            try:
                self._answer(path, is_first)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with lock:
                    alive[0] -= 1

        do_PUT = do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815

        def _answer(self, path: str, is_first: bool) -> None:
            length = int(self.headers.get("Content-Length", 0))
            given = self.rfile.read(length) if length else None
            if found.fault == "hangup":
                self.close_connection = True
                return
            path += found.fault
            if "status500" in path or ("flaky" in path and is_first):
                self.send_error(500)
                return
            if "slow" in path:
                found.released.wait(PATIENCE_S)
            if "redirected" in path:
                self.send_response(307)
                self.send_header("Location", elsewhere + path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            behind = http.client.HTTPConnection("127.0.0.1", port)
            with one_by_one:  # moto answers a read with a 500 if a write replaces its object
                behind.request(self.command, self.path, given, dict(self.headers.items()))
                answer = behind.getresponse()
                body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() in ("content-range", "content-type", "last-modified"):
                    self.send_header(name, value)
                elif name.lower() == "etag":
                    is_other = "changing" in path and "safetensors" in path
                    self.send_header(name, f'"{next(numbers)}"' if is_other else value)
            is_head = self.command == "HEAD"
            size = answer.getheader("Content-Length", "0") if is_head else str(len(body))
            self.send_header("Content-Length", size)
            self.end_headers()
            is_cut = "truncated" in path and len(body) > 1
            is_cut &= "safetensors" in path or bool(found.fault)
            self.wfile.write(body[: len(body) // 2] if is_cut else body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Proxy
