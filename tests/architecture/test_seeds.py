"""Nothing that a test draws depends on what ran before it, or on a library's own choices (R06)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes, tree_of

TESTS = Path(__file__).parents[1]
FILES = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("*.py"))}
TORCH_DRAWS = {
    "bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "bernoulli_", "exponential_", "normal_", "random_", "uniform_",
}  # fmt: skip


def found_by(check: Callable[[ast.Module], Iterable[str]]) -> list[str]:
    """What a check finds in any file of the tests."""
    return [f"{name}: {fault}" for name, path in FILES.items() for fault in check(tree_of(path))]


def problems(tree: ast.Module) -> Iterator[str]:
    """Calls that draw from a random source which the test has not seeded just before."""
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            if "hypothesis" in {str(name).partition(".")[0] for name in names}:
                yield f"line {node.lineno}: hypothesis draws as it likes; use tests.helpers.seeded"
    for scope in nodes(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            yield from unseeded(list(calls_of(scope)))


def calls_of(scope: ast.AST) -> Iterator[ast.Call]:
    """The calls in a scope's own body, in the order of the text, functions in it left out."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls_of(child)


def unseeded(calls: list[ast.Call]) -> Iterator[str]:
    seeded = [call.lineno for call in calls if ast.unparse(call.func) == "torch.manual_seed"]
    for call in calls:
        name, given = ast.unparse(call.func), bool(call.args or call.keywords)
        room, _, function = name.rpartition(".")
        is_source = name in ("random.Random", "np.random.default_rng", "np.random.SeedSequence")
        if is_source and given:
            continue
        if is_source or room in ("random", "np.random", "numpy.random", "secrets", "uuid"):
            yield f"line {call.lineno}: {name} has no seed of ours"
            continue
        if function not in TORCH_DRAWS or room in ("", "rng", "draw", "self", "self.rng"):
            continue
        has_generator = any(keyword.arg == "generator" for keyword in call.keywords)
        if not has_generator and not any(line <= call.lineno for line in seeded):
            yield f"line {call.lineno}: {name} without a generator or torch.manual_seed before it"


def test_r06_whatever_a_test_draws_has_a_seed_of_its_own() -> None:
    """R06."""
    assert found_by(problems) == []


SHORT_S = 100
"""Less is for what must not happen, more is patience (`tests.helpers.patience`)."""
AT_ONCE = "AT_ONCE_S"
"""What is shorter than a timeout of the product's own that would hide a fault; each says which."""
WAITS = {"wait", "wait_for", "join", "result", "timeout", "communicate"}
OF_HTTPX = {f"httpx.{name}" for name in ("Client", "AsyncClient", "get", "post", "stream", "put")}
CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()"}


def short_waits(tree: ast.Module) -> Iterator[str]:
    """Where a test gives up on something sooner than a busy machine may need for it."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id != AT_ONCE
    }
    for call in (node for node in nodes(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        if name in OF_HTTPX and not limits and "transport" not in {k.arg for k in call.keywords}:
            yield f"line {call.lineno}: {name} gives up after httpx's own 5 s"
        room, _, function = name.rpartition(".")
        if room and function in WAITS and len(call.args) == 1 + (function == "wait_for"):
            limits += call.args[-1:]
        for limit in limits:
            given = constants.get(limit.id) if isinstance(limit, ast.Name) else limit
            value = given.value if isinstance(given, ast.Constant) else None
            if isinstance(value, int | float) and 1 <= value < SHORT_S:
                yield f"line {call.lineno}: {name} gives up after {value} s"


def held_against_the_clock(tree: ast.Module) -> Iterator[str]:
    """Where a test asserts that something took less than so long on this machine."""
    for node in (each for each in nodes(tree) if isinstance(each, ast.Assert)):
        for compare in (each for each in ast.walk(node.test) if isinstance(each, ast.Compare)):
            sides = [compare.left, *compare.comparators]
            is_taken = any(
                isinstance(side, ast.BinOp)
                and isinstance(side.op, ast.Sub)
                and CLOCKS & {ast.unparse(part) for part in (side.left, side.right)}
                for side in sides
            )
            if is_taken and not {"PATIENCE_S", AT_ONCE} & set(
                re.findall(r"\w+", ast.unparse(node))
            ):
                yield f"line {node.lineno}: {ast.unparse(compare)}"


def test_r06_what_must_happen_is_waited_for_patiently() -> None:
    """R06: with `tests.helpers.patience`, or as long; and no clock on the wall decides."""
    assert [*found_by(short_waits), *found_by(held_against_the_clock)] == []


TIERS = {"num_host_pages", "kv_storage", "kv_offloading_size"}
ENGINES = {"LLM", "build_engine", "serve", "serving", "running", "run_tiers", "RealEngine"}
QUICK = {"quick_tiers", "worth_loading", "worth_loading_there", "RealEngine", "is_worth_loading"}
MEASURED = {
    "unit/test_llm_slow_storage.py": "what is measured is what it tests",
    "unit/test_llm_weights.py": "all that it finds is on the device",
    "unit/engine/test_kv_events.py": "nothing is loaded",
}


def measured_tiers(tree: ast.Module) -> bool:
    """Whether engines load from tiers if this machine was quick enough so far, which on a busy one
    they are not."""
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    said = {keyword.arg for call in calls for keyword in call.keywords}
    said |= {
        str(key.value).replace("-", "_")
        for node in nodes(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    used = {node.id for node in nodes(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    return bool(TIERS & said and ENGINES & names and not QUICK & used)


def test_r06_whether_a_tier_is_used_is_not_measured() -> None:
    """R06: with `tests.helpers.quick_tiers`. Checks on a GPU are no part of `make test`."""
    found = {name for name, path in FILES.items() if measured_tiers(tree_of(path))}
    assert {name for name in found if not name.startswith("gpu/")} == MEASURED.keys()


def test_the_check_sees_measured_tiers() -> None:
    engine = "with LLM(model, num_host_pages=5) as llm: pass"
    assert measured_tiers(ast.parse(engine))
    assert measured_tiers(ast.parse("more = {'kv-storage': 'file://x'}\nwith serving(tiny): pass"))
    assert not measured_tiers(ast.parse(f"with quick_tiers():\n    {engine}"))
    assert not measured_tiers(ast.parse("SimulationSettings(num_host_pages=5)"))


PROBED = {
    "unit/store/tiers.py": "tries again with another one",
    "helpers/machine.py": "uses none",
    "clients/scripts/use_open_webui.py": "its log tells no port, and it is run by hand",
    "unit/engine/test_dynamo_indexer.py": "the indexer takes a number and tells none",
}


def probed_ports(tree: ast.Module) -> Iterator[str]:
    """Calls that look for a free port which another process opens later."""
    for node in (each for each in nodes(tree) if isinstance(each, ast.Call)):
        is_bound = ast.unparse(node.func).rpartition(".")[2] in ("create_server", "bind")
        if is_bound and node.args and re.fullmatch(r"\(.*, 0\)", ast.unparse(node.args[0])):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_r06_ports_are_opened_by_who_chooses_them() -> None:
    """R06: between a look and the opening another test's server may take it."""
    found = found_by(probed_ports)
    assert {fault.partition(":")[0] for fault in found} == PROBED.keys(), found


def test_the_check_sees_short_waits() -> None:
    for code in (
        "event.wait(5)", "asyncio.timeout(10)", "httpx.get(url, timeout=1)", "httpx.get(url)",
        "LIMIT_S = 60\nasyncio.wait_for(done, LIMIT_S)", "future.result(45.0)", "thread.join(60)",
    ):  # fmt: skip
        assert list(short_waits(ast.parse(code))), code
    for code in (
        "event.wait(0.1)", "event.wait()", "event.wait(PATIENCE_S)", "', '.join(names)",
        "AT_ONCE_S = 45\nevent.wait(AT_ONCE_S)", "httpx.AsyncClient(transport=app)",
    ):  # fmt: skip
        assert not list(short_waits(ast.parse(code))), code


def test_the_check_sees_what_is_held_against_the_clock() -> None:
    for code in ("assert time.monotonic() - begin < 0.35", "assert 3 > time.time() - begin"):
        assert list(held_against_the_clock(ast.parse(code))), code
    for code in (
        "assert time.monotonic() < deadline", "assert time.monotonic() - begin < PATIENCE_S / 2",
    ):  # fmt: skip
        assert not list(held_against_the_clock(ast.parse(code))), code


@pytest.mark.parametrize(
    "code",
    [
        "from hypothesis import given",
        "import random\nrandom.choice([1])",
        "rng = random.Random()",
        "x = np.random.rand(3)",
        "x = np.random.default_rng()",
        "def test():\n    x = torch.randn(3)",
        "def test():\n    w.normal_(0, 1)",
        "torch.manual_seed(1)\ndef test():\n    x = torch.randn(3)",
        "def test():\n    x = torch.randn(3)\n    torch.manual_seed(1)",
    ],
)
def test_the_check_sees_what_has_no_seed(code: str) -> None:
    assert len(list(problems(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "rng = random.Random(1)\nrng.choice([1])",
        "x = np.random.default_rng(1).random(3)",
        "def test():\n    torch.manual_seed(1)\n    x = torch.randn(3)",
        "x = torch.randn(3, generator=g)",
    ],
)
def test_the_check_lets_seeded_draws_pass(code: str) -> None:
    assert list(problems(ast.parse(code))) == []
