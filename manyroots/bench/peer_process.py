"""transformers' peer in a process of its own, as its users run it: with torch's own settings.

What the `manyroots` command sets for torch's allocator would make the peer faster than it is
elsewhere. Takes and gives one line of JSON for each run, over pipes; the same two methods as
`TransformersPeer`. A line on stderr is the peer's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import manyroots
from manyroots.bench.processor import Taken
from manyroots.config import ModelSettings
from manyroots.errors import ConfigError, ManyrootsError
from manyroots.process.torch_allocator import callers_environment


class PeerProcess:
    """Started and loaded when made; ended by `close`."""

    def __init__(
        self, settings: ModelSettings, dtype: str, device: str, adapters: Mapping[str, Path]
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyroots.bench.peer_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        paths = {name: str(path) for name, path in adapters.items()}
        self.name: str = self._ask(asdict(settings), dtype, device, paths)

    def run(
        self, prompts: list[list[int]], num_new_tokens: int, adapters: list[str] | None
    ) -> tuple[Taken, list[list[int]]]:
        """What it took, and the new tokens of each prompt; `adapters` names one for each prompt."""
        times, tokens = self._ask(prompts, num_new_tokens, adapters)
        return Taken(**times), tokens

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"the process of the peer ended with {self._process.wait()}; what it said is "
                "above. Pass --compare none to measure without it."
            )
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise ConfigError(answer["error"])
        return answer["given"]


def _environment() -> dict[str, str]:
    """The caller's, with this package on the path."""
    home = str(Path(manyroots.__file__).parents[1])
    found = callers_environment()
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (home, found.get("PYTHONPATH"))))
    return found


def _serve() -> None:
    """The other end. What is printed meanwhile goes to stderr."""
    from manyroots.bench.peers import TransformersPeer

    answers, sys.stdout = sys.stdout, sys.stderr

    def tell(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    settings, dtype, device, paths = json.loads(sys.stdin.readline())
    try:
        adapters = {name: Path(path) for name, path in paths.items()}
        peer = TransformersPeer(_settings(settings), dtype, device, adapters)
    except ManyrootsError as error:
        tell(error=str(error))
        return
    tell(given=peer.name)
    for line in sys.stdin:
        prompts, num_new_tokens, names = json.loads(line)
        time, tokens = peer.run(prompts, num_new_tokens, names)
        tell(given=(asdict(time), tokens))


def _settings(values: dict[str, Any]) -> ModelSettings:
    """JSON has lists where settings have tuples."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return ModelSettings(**given)


if __name__ == "__main__":
    _serve()
