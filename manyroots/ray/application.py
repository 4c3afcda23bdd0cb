"""A Ray Serve application: one gateway, and engines as actors that Ray places.

`serve run manyroots.ray:app model=... replicas=3`, or a YAML file with these names as `args`. Names
are those of `manyroots serve`'s flags. The gateway listens on its own port: Ray Serve's proxy would
delay streams. Serve starts it, checks its health and starts it again.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import yaml
from ray import serve

from manyroots.api.server import listen, serve_one_life
from manyroots.api.supervisor import Life
from manyroots.config import ENGINE_ROOMS, EngineSettings, engine_settings
from manyroots.errors import ConfigError
from manyroots.server_config import ServerSettings, check_together, server_settings

DEFAULT_PORT = 8001
"""Beside Ray Serve's own proxy, which has 8000."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """Builds the application from settings by name, as `manyroots serve`'s YAML file has them."""
    engine, server = parse(arguments)
    return Gateway.options(  # type: ignore[attr-defined, no-any-return]
        num_replicas=1, health_check_period_s=5, graceful_shutdown_timeout_s=server.drain_timeout_s
    ).bind(engine, server)


def parse(arguments: dict[str, Any]) -> tuple[EngineSettings, ServerSettings]:
    """Settings of the engines and of the gateway. Texts, as a command line gives them, are read as
    YAML. Raises ConfigError naming what can't be."""
    values = {
        name.replace("-", "_"): yaml.safe_load(value) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    from dataclasses import fields

    engine_names = {spec.name for room in ENGINE_ROOMS.values() for spec in fields(room)}
    server_names = {spec.name for spec in fields(ServerSettings)}
    for name in values:
        if name not in engine_names | server_names:
            raise ConfigError(f"{name!r} is no setting of `manyroots serve`.")
    engine = engine_settings({n: v for n, v in values.items() if n in engine_names})
    own = {n: v for n, v in values.items() if n in server_names}
    own = {"port": DEFAULT_PORT, **own, "replica_backend": "ray"}
    server = server_settings(own)
    check_together(engine, server)
    return engine, server


@serve.deployment
class Gateway:
    """The API and its router in a Serve replica."""

    def __init__(self, engine: EngineSettings, server: ServerSettings) -> None:
        logging.basicConfig(level=server.log_level.upper())
        self._listener = listen(server)
        self._code: int | None = None
        ear, self._orders = os.pipe()

        def run() -> None:
            self._code = serve_one_life(engine, server, self._listener, Life(ear, 0))

        self._thread = threading.Thread(target=run, name="manyroots", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Where callers send requests."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    async def __call__(self, request: Any) -> dict[str, str]:
        """What Serve's own proxy answers: where the gateway is."""
        return {"gateway": self.address()}

    def check_health(self) -> None:
        """Raises where Serve should start another gateway."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the gateway has ended with code {self._code}")

    def __del__(self) -> None:
        """Drain: one order asks for it, as SIGTERM does."""
        if self._thread.is_alive():
            os.write(self._orders, b"s")
            self._thread.join(60)
