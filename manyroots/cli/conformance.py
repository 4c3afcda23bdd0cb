"""`manyroots conformance URL`: look for leaks between the parties of any OpenAI server.

Exit code 0 if something was judged and nothing leaks, 1 for a leak, 2 if nothing could be judged.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyroots.errors import ConfigError

if TYPE_CHECKING:
    from manyroots.conformance.report import CheckRow


def add_conformance_command(commands: Any) -> None:
    parser = commands.add_parser(
        "conformance",
        help="check a server for leaks between adapters, revisions, salts and keys",
        description="Sends prompts to a server. Judges by outputs, cached_tokens and times whether "
        "one party can notice another's. Exit code 0: kept apart; 1: a leak; 2: not judged.",
    )
    parser.add_argument("url", metavar="URL", help="address of any OpenAI-compatible server")
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="bearer token; give the keys of two tenants to compare them",
    )  # fmt: skip
    server.add_argument("--admin-key", metavar="KEY", help="key to load adapters [the API key]")
    server.add_argument(
        "--adapter", action="append", default=[], metavar="NAME[=JSON]",
        help="an adapter to use; with JSON, the body fields that choose it "
        "[those that /v1/models lists]",
    )  # fmt: skip
    server.add_argument(
        "--folders", nargs=2, default=(), metavar="DIR",
        help="two different adapters that the server can load: judges reloads and names",
    )  # fmt: skip
    server.add_argument(
        "--scratch", metavar="DIR",
        help="a folder that this program and the server share: judges files changed in place",
    )  # fmt: skip
    server.add_argument(
        "--salts", choices=("yes", "no"), help="it supports cache_salt [from its /openapi.json]"
    )
    server.add_argument(
        "--restart", metavar="COMMAND", help="restarts it and returns: judges what remains"
    )
    server.add_argument(
        "--kv-events", metavar="tcp://HOST:PORT", help="address where it publishes KV events"
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="[256]")
    run.add_argument(
        "--timed-tokens", type=int, default=2048, metavar="N",
        help="length of timed prompts [2048, or what fits]",
    )  # fmt: skip
    run.add_argument(
        "--rounds",
        type=int,
        default=12,
        metavar="N",
        help="of timed requests, at most tripled [12]",
    )
    run.add_argument(
        "--flood-tokens", type=int, default=0, metavar="N",
        help="send this many tokens, more than its device holds: judges the lower tiers",
    )  # fmt: skip
    run.add_argument(
        "--settle-s", type=float, default=1.0, metavar="S",
        help="seconds for pages to reach the lower tiers [1]",
    )  # fmt: skip
    run.add_argument(
        "--only", nargs="+", metavar="CHECK", help="run only these checks; a wrong name lists all"
    )
    run.add_argument("--seed", type=int, help="seed of the prompts [random]")
    run.add_argument("--json", metavar="FILE", help="write the report here")
    parser.set_defaults(run=_conformance)


def _conformance(arguments: dict[str, Any]) -> int:
    from manyroots.conformance.kit import CHECKS, ConformanceSettings, run_kit

    command = arguments["restart"]
    salts = arguments["salts"]
    settings = ConformanceSettings(
        url=arguments["url"],
        api_keys=tuple(arguments["api_key"]),
        admin_key=arguments["admin_key"],
        adapters=dict(_adapter(given) for given in arguments["adapter"]),
        folders=tuple(arguments["folders"]),
        scratch=arguments["scratch"],
        salts=None if salts is None else salts == "yes",
        prompt_tokens=arguments["prompt_tokens"],
        timed_tokens=arguments["timed_tokens"],
        rounds=arguments["rounds"],
        flood_tokens=arguments["flood_tokens"],
        settle_s=arguments["settle_s"],
        restart=None if command is None else _restarting(command),
        kv_events=arguments["kv_events"],
        seed=arguments["seed"],
        only=frozenset(arguments["only"] or CHECKS),
    )
    target = arguments["json"]
    if target is not None and not Path(target).absolute().parent.is_dir():
        raise ConfigError(f"--json is {target!r}; its folder does not exist.")
    report = run_kit(settings, _show)
    words = [row["verdict"] for row in report["rows"]]
    summary = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    print(f"{report['url']}, version {report['server_version']}: {summary}")
    if target is not None:
        Path(target).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(report["exit_code"])


def _adapter(given: str) -> tuple[str, dict[str, Any]]:
    name, _, text = given.partition("=")
    if not text:
        return name, {}
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--adapter has {given!r}, which is not JSON: {error}.") from error
    if not name or not isinstance(fields, dict):
        raise ConfigError(f"--adapter has {given!r}; write NAME or NAME={{...}}.")
    return name, fields


def _restarting(command: str) -> Callable[[], None]:
    def restart() -> None:
        ended = subprocess.run(command, shell=True, check=False)
        if ended.returncode:
            raise ConfigError(f"--restart: {command!r} ended with {ended.returncode}.")

    return restart


def _show(row: CheckRow) -> None:
    print(f"{row.verdict.value:10}  {row.check:28}  {row.pair:24}  {row.why}", flush=True)
