"""An engine process that Ray places, starts and watches.

A `Child` whose process belongs to a Ray actor, on whichever node Ray chose. The actor holds the
process's standard input, so the process ends with it; Ray ends the actor when its gateway is gone.
Requests and tokens go over our own encrypted socket, never through Ray.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError

from manyroots.engine.child import Child, StartedProcess
from manyroots.engine.wire_key import WIRE_KEY, secure
from manyroots.process.torch_allocator import engine_environment


class EngineHost:
    """The actor: runs one engine process on its node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, address: str, key: str) -> int:
        """Start the process, which connects to the gateway; gives its pid."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyroots.engine.process", address, str(time.monotonic())],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**engine_environment(), WIRE_KEY: key},
        )
        return self._process.pid

    def wait(self) -> int:
        """Return its exit code when it has ended."""
        assert self._process is not None
        return self._process.wait()


class RayProcess:
    """A `StartedProcess` on some node."""

    def __init__(self, host: Any, pid: int) -> None:
        self._host = host
        self._end = host.wait.remote()
        self.pid = pid
        self.returncode: int | None = None

    async def wait(self) -> int:
        if self.returncode is None:
            try:
                code = int(await self._end)
            except RayError:  # the actor or its node is gone, and the process with it
                code = -signal.SIGKILL
            self.returncode = code
        return self.returncode

    def kill(self) -> None:
        ray.kill(self._host)


class RayChild(Child):
    """One life of an engine process in a Ray actor."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options`: of the actor, as `num_gpus`."""
        super().__init__()
        self._options = options
        self._host: Any = None

    async def _launch(self) -> StartedProcess:
        key = secrets.token_hex(32)
        secure(self._socket, key, is_gateway=True)
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        # Waiting for the end and starting are two calls at once.
        actor = ray.remote(EngineHost).options(max_concurrency=2, **self._options)
        self._host = actor.remote()
        pid = await self._host.begin.remote(f"tcp://{address}:{port}", key)
        return RayProcess(self._host, pid)

    async def close(self) -> None:
        await super().close()
        if self._host is not None:
            ray.kill(self._host)
