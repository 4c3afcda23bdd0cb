"""Three turns of a coding agent in a folder and a home of its own, through a `Relay`.

The second turn is forced to call a tool, which the agent then carries out and reports. Takes the
agent's command for a turn; raises AssertionError with what the agent printed or the server
refused. Nothing but the relay is reachable by what the agent is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from relay import Relay
from reporting import URL

PROMPTS = ("Say hello.", "Use a tool.", "Say goodbye.")
COMMAND = os.environ.get("MANYROOTS_AGENT", "")
"""The agent's executable."""
CAPTURE = os.environ.get("MANYROOTS_CAPTURE", "")
"""A file for everything that was sent and answered, one exchange a line."""
TURN_LIMIT_S = 600


def three_turns(
    command: Callable[[int, str], Sequence[str]],
    *,
    environment: Callable[[str], dict[str, str]],
    files: Callable[[str], dict[str, str]] = lambda url: {},
    tool: str | None = None,
    arguments: Mapping[str, str] | None = None,
    min_tokens: int = 0,
) -> Relay:
    """`command`: of a turn's number and prompt. `environment` and `files` (below the home): of the
    relay's address. `tool`: the one to force; None for an agent without tools. `arguments`: those
    of the forced call that must not be random. `min_tokens`: of every answer."""
    relay = Relay(URL, min_tokens)
    with tempfile.TemporaryDirectory(prefix="manyroots-agent-") as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        work.mkdir()
        for name, text in files(relay.url).items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        home.mkdir(exist_ok=True)
        subprocess.run(["git", "init", "-q", str(work)], check=True)
        given = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        given |= environment(relay.url)
        for number, prompt in enumerate(PROMPTS):
            if number == 1 and tool is not None:
                relay.force(tool, arguments)
            _turn(command(number, prompt), work, given, relay)
    relay.close()
    if CAPTURE:
        lines = [json.dumps(vars(item)) for item in relay.exchanges]
        Path(CAPTURE).write_text("\n".join(lines))
    assert not relay.refused(), relay.refused()
    assert len(relay.generations) >= len(PROMPTS), len(relay.generations)
    if tool is not None:
        assert relay.forced == [tool], f"{tool} was forced {len(relay.forced)} times"
        assert _came_back(relay, tool), f"no request reports what {tool} did"
    return relay


def _turn(command: Sequence[str], work: Path, environment: dict[str, str], relay: Relay) -> None:
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TURN_LIMIT_S,
    )
    told = (done.stdout + done.stderr)[-600:]
    assert done.returncode == 0, f"{done.returncode}: {told} {relay.refused()}"


def _came_back(relay: Relay, tool: str) -> bool:
    """Whether a request after the forced one holds the call and its result."""
    forced = next(i for i, item in enumerate(relay.generations) if "tool_choice" in str(item.body))
    results = ("tool_result", "function_call_output", "'role': 'tool'")
    later = [str(item.body) for item in relay.generations[forced + 1 :]]
    return any(tool in body and any(kind in body for kind in results) for body in later)
