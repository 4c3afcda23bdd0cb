"""The shape of the code, read from its imports: which room may import which, and what must stay
out."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.helpers.syntax import nodes, tree_of

PACKAGE = Path(__file__).parents[2] / "manyroots"

BASE = {
    "ids", "errors", "version", "sampling", "step", "messages", "adapter_names", "options",
    "config", "server_config", "files", "kv_configs", "structured_outputs", "snapshot", "process",
    "speculative_config",
}  # fmt: skip
"""Files at the top of the package, and two rooms, that any room may import."""

MAY_IMPORT: dict[str, set[str]] = {
    "ids": set(),
    "errors": set(),
    "version": set(),
    "structured_outputs": {"errors"},
    "sampling": {"errors", "structured_outputs"},
    "files": {"errors"},
    "process": set(),
    "adapter_names": {"errors"},
    "kv_configs": {"errors"},
    "speculative_config": {"errors"},
    "options": {"errors", "adapter_names"},
    "config": {"errors", "options", "adapter_names", "kv_configs", "speculative_config"},
    "server_config": {"errors", "options", "adapter_names", "config", "sampling"},
    "step": {"ids", "sampling"},
    "messages": {"ids", "sampling", "step"},
    "snapshot": {"messages"},
    # decide
    "cache": BASE,
    "lora": BASE,
    "scheduler": BASE | {"cache", "lora"},
    "routing": BASE | {"cache"},
    # execute
    "kernels": BASE,
    "distributed": BASE,
    "store": BASE | {"models", "kernels", "lora"},
    "layers": BASE | {"kernels", "store", "lora", "distributed"},
    "models": BASE | {"kernels", "store", "layers", "lora", "distributed"},
    "runner": BASE | {"grammar", "kernels", "store", "models", "layers", "cache", "distributed"},
    # text and the outside
    "grammar": BASE,
    "text": BASE | {"grammar"},
    "engine": BASE
    | {"text", "grammar", "scheduler", "cache", "lora", "runner", "store", "models", "distributed"}
    | {"observe"},
    "observe": BASE,
    "flag_aliases": {"errors", "options", "config"},
    "llm": BASE | {"flag_aliases", "engine", "text"},
    "gateway": BASE | {"engine", "routing"},
    "api": BASE | {"grammar", "engine", "gateway", "ray", "routing", "text", "observe"},
    # The extra `ray`: what Ray starts and watches.
    "ray": BASE | {"engine", "gateway", "api"},
    # A bench of copies between tiers drives what moves them, one of kernels single layers, one of
    # the processor's share of a step a runner without a device. One of routing simulates what it
    # served.
    "bench": BASE
    | {"llm", "models", "scheduler", "cache", "lora", "engine", "text", "store"}
    | {"layers", "kernels", "distributed", "runner", "routing", "simulate"},
    "simulate": BASE | {"scheduler", "cache", "lora", "runner", "engine", "routing"},
    # Knows servers by their HTTP alone.
    "conformance": {"errors", "version"},
    "cli": BASE
    | {"flag_aliases", "llm", "api", "text", "bench", "simulate", "lora", "engine", "conformance"}
    | {"routing"},
    "__init__": {"llm", "errors", "sampling", "structured_outputs", "adapter_names"} | {"version"},
    "__main__": {"cli"},
}

NEVER_TORCH = {
    "scheduler", "cache", "lora", "routing", "simulate", "text", "gateway", "api", "observe",
    "grammar", "conformance",
} | BASE  # fmt: skip
TORCH = {"torch", "triton"}
WEB_STACK = {"starlette", "uvicorn", "fastapi", "pydantic", "h11", "httptools"}
WIRE = {"msgspec", "zmq"}
MAY_USE_WIRE = {
    "engine.wire", "engine.process", "engine.child", "engine.kv_events", "engine.wire_key",
    "distributed.wire", "gateway.orders",
    "conformance.events",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file imports, at any depth, except for type checkers only; read once."""
    tree = tree_of(path)
    skipped = {
        id(child)
        for node in nodes(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in nodes(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def own_imports(path: Path, known: dict[str, Path]) -> set[str]:
    names = {name.removeprefix("manyroots.") for name in imports(path) if "manyroots." in name}
    return names & known.keys()


def room(module: str) -> str:
    return module.split(".")[0]


ALL = modules()


def test_imports_follow_the_allowed_directions() -> None:
    assert [
        f"{module} must not import {imported}"
        for module, path in ALL.items()
        for imported in own_imports(path, ALL)
        if room(imported) not in MAY_IMPORT[room(module)] | {room(module)}
    ] == []


def test_there_is_no_import_cycle() -> None:
    graph = {module: own_imports(path, ALL) - {module} for module, path in ALL.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def roots(module: str) -> set[str]:
    """The packages that a module imports."""
    return {name.split(".")[0] for name in imports(ALL[module])}


def test_the_decide_half_text_and_api_never_import_torch() -> None:
    assert [m for m in ALL if room(m) in NEVER_TORCH and roots(m) & TORCH] == []


def test_no_web_stack_below_api() -> None:
    below = [module for module in ALL if room(module) != "api"]
    assert [module for module in below if roots(module) & WEB_STACK] == []
    assert {module for module in below if roots(module) & WIRE} <= MAY_USE_WIRE


EXECUTE = ("kernels", "store", "layers", "models", "runner")


def test_the_execute_half_knows_what_adapters_are_and_not_where_they_go() -> None:
    assert [
        f"{module} must not import {imported}"
        for module, path in ALL.items()
        if room(module) in EXECUTE
        for imported in own_imports(path, ALL) - {"lora"}
        if room(imported) == "lora"
        and not imported.startswith(("lora.targets", "lora.spec", "lora.files"))
    ] == []


def test_every_room_has_a_readme() -> None:
    rooms = {room(module) for module in ALL if (PACKAGE / room(module)).is_dir()}
    assert rooms
    for name in rooms:
        assert (PACKAGE / name / "README.md").exists(), f"{name} has no README.md"


def test_r05_nothing_is_unpickled() -> None:
    """R05: no pickle, no torch.load, no remote code, anywhere."""
    for module, path in ALL.items():
        assert not roots(module) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, module
        assert "torch.load" not in path.read_text(), module
        assert "trust_remote_code=True" not in path.read_text(), module


def test_the_engine_runs_where_there_is_no_web_stack() -> None:
    """The engine below the HTTP layer imports with msgspec, ZMQ, the web stack, llguidance and
    RE2 absent."""
    # Not h11: transformers brings it along for its downloads.
    blocked = sorted((WEB_STACK | WIRE | {"gguf", "openai", "rich", "llguidance", "re2"}) - {"h11"})
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import manyroots.llm.llm, manyroots.cli.main, manyroots.bench.offline, manyroots.runner.fake
import manyroots.bench.decode, manyroots.runner.runner
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_api_process_does_not_load_torch() -> None:
    code = "import sys, manyroots.api.server; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
