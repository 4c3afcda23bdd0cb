"""Clients of others, untouched, against a real server with SmolLM2.

    python -m tests.clients [NAME ...] [--folder /tmp/manyroots-clients] [--url http://...]

Each client has a venv of its own, made once in the folder; agents of npm are installed there.
Prints every check and how it went, then a line for each client, and exits with 1 if any failed.
`docs/clients.md` has the last outcomes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from manyroots.config import ModelSettings
from manyroots.files.gguf_header import read_metadata
from manyroots.models.source import resolve_source
from manyroots.text import gguf_tokenizer
from manyroots.text.tokenizer_files import load_tokenizer
from tests.clients.agent_model import CONTEXT, write_agent_model
from tests.e2e.conftest import running

SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = {
    "openai": ("openai", "pydantic"),
    "anthropic": ("anthropic",),
    "langchain_openai": ("langchain-openai",),
    "litellm": ("litellm", "mcp"),  # its tools import mcp
    "instructor": ("instructor",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "llm_comply": ("llm-comply",),
    "guidellm": ("guidellm", "torch==2.13.0"),  # without the pin: gigabytes of another torch
    "aiperf": ("aiperf",),
    "lm_eval": ("lm-eval[api]", "transformers"),
    "outlines": ("outlines", "openai"),
    "guidance": ("guidance", "openai"),
    "llama_index": ("llama-index-llms-openai-like",),
    "smolagents": ("smolagents[openai]",),
    "semantic_kernel": ("semantic-kernel",),
    "inspect_ai": ("inspect-ai", "openai", "anthropic"),
    "haystack": ("haystack-ai",),
    "magentic": ("magentic",),
}
"""By script: what its venv has."""
AGENTS = {
    "claude_code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "qwen_code": "@qwen-code/qwen-code",
    "opencode": "opencode-ai",
    "cline": "cline",
    "continue": "@continuedev/cli",
    "pi": "@mariozechner/pi-coding-agent",
    "aider": ("aider-chat",),
    "open_webui": ("open-webui",),
    "mini_swe_agent": ("mini-swe-agent", "mcp"),  # litellm's tools import mcp
    "gptme": ("gptme",),
}
"""By script: an npm package, or what its venv has. Their prompts are long, so that they talk to a
small random model; named alone, and never part of a run of all."""
EXECUTABLES = {
    "claude_code": "claude", "codex": "codex", "qwen_code": "qwen", "opencode": "opencode",
    "cline": "cline", "continue": "cn", "pi": "pi",
}  # fmt: skip
AGENT_FLAGS = (
    "--served-model-name", "local", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8",
    "--num-gpu-blocks-override", "9000",
)  # fmt: skip
FLAGS = (
    "--max-model-len", "2048", "--num-gpu-blocks-override", "600", "--max-num-seqs", "8",
    "--max-num-batched-tokens", "512", "--override-generation-config", '{"temperature": 0}',
)  # fmt: skip
"""Greedy where a client says nothing: this model comes to an end then, which some clients want."""


def venv_of(home: Path, packages: Sequence[str]) -> Path:
    """The commands of a venv, which is made if it is not there."""
    commands = home / "bin"
    if not (home / "made").exists():
        venv.create(home, with_pip=True)
        install = [commands / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *packages], check=True)
        (home / "made").touch()
    return commands


def agent_of(home: Path, package: str, executable: str) -> Path:
    """An npm package's command, which is installed if it is not there."""
    if not (home / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", str(home), package], check=True)
    return home / "node_modules" / ".bin" / executable


def tokenizer_of(folder: Path) -> Path:
    """The model's tokenizer as a folder of transformers', for clients that count tokens."""
    home = folder / "tokenizer"
    if not (home / "tokenizer_config.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        file = resolve_source(ModelSettings()).path
        gguf_tokenizer.build(read_metadata(file), file).save(str(home / "tokenizer.json"))
        special = load_tokenizer(str(file)).special_tokens.for_template()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def run(
    name: str,
    python: str,
    url: str,
    *,
    key: str = "none",
    only: Sequence[str] = (),
    tokenizer: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> list[dict[str, object]]:
    """A client's checks, each with its error or None. `only`: the names of some."""
    environment = {**os.environ, "MANYROOTS_URL": url, "MANYROOTS_KEY": key}
    environment["MANYROOTS_TOKENIZER"] = str(tokenizer)
    environment |= more or {}
    environment.pop("PYTHONPATH", None)  # what this package needs is not the client's
    script = [python, str(SCRIPTS / f"use_{name}.py"), *only]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if not lines:
        return [{"check": "start", "error": done.stderr[-500:], "seconds": 0}]
    return [json.loads(line) for line in lines]


def run_agent(name: str, folder: Path, url: str) -> list[dict[str, object]]:
    """Three turns of an agent."""
    more, python, package = {"MANYROOTS_MODEL": "local"}, sys.executable, AGENTS[name]
    if isinstance(package, str):
        more["MANYROOTS_AGENT"] = str(agent_of(folder / name, package, EXECUTABLES[name]))
    else:
        python = str(venv_of(folder / name, package) / "python")
    return run(name, python, url, more=more)


@contextlib.contextmanager
def served(url: str | None, *flags: str) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running(*flags) as server:
        server.wait_until_ready()
        yield server.url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*CLIENTS, *AGENTS)))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/manyroots-clients"))
    parser.add_argument("--url", help="of a server that runs already")
    given = parser.parse_args()
    outcomes: dict[str, list[dict[str, object]]] = {}
    agents = [name for name in given.names if name in AGENTS]
    if agents:
        model = given.folder / "agent-model"
        write_agent_model(model, tokenizer_of(given.folder))
        with served(given.url, str(model), *AGENT_FLAGS) as url:
            for name in agents:
                outcomes[name] = run_agent(name, given.folder, url)
    others = [name for name in given.names or CLIENTS if name not in AGENTS]
    with served(given.url, *FLAGS) if others else contextlib.nullcontext("") as url:
        for name in others:
            python = str(venv_of(given.folder / name, CLIENTS[name]) / "python")
            outcomes[name] = run(name, python, url, tokenizer=tokenizer_of(given.folder))
    for name, checks in outcomes.items():
        for check in checks:
            print(name, check["check"], check["error"] or "passed")
        print(f"{name}: {_num_passed(checks)}/{len(checks)}")
    return 1 if any(_num_passed(checks) < len(checks) for checks in outcomes.values()) else 0


def _num_passed(checks: list[dict[str, object]]) -> int:
    return sum(check["error"] is None for check in checks)


if __name__ == "__main__":
    sys.exit(main())
