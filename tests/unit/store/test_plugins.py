"""Storage by plug-in: one registry, a package that adds a kind, and the check that it can run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from manyroots import LLM, SamplingParams
from manyroots.config import TierSettings, engine_settings
from manyroots.engine.preflight import check_start
from manyroots.errors import ConfigError
from manyroots.store import conformance
from manyroots.store.backends import registry
from manyroots.store.backends.files import Files
from manyroots.store.backends.registry import check_storage, open_backend
from manyroots.store.conformance import check_backend, check_dead
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import quick_tiers
from tests.helpers.snippets import ROOT, snippets
from tests.unit.models.tiny import save_tiny
from tests.unit.store.tiers import RedisServer, Shelf, free_port, server_program
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE = ROOT / "docs" / "how-to" / "add-a-storage-backend.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, installed by pip as the page says, into a folder of its own."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    code = {each.language: each.text for each in snippets(PAGE) if "test_plugins" in each.mark}
    (source / "kv_sqlite.py").write_text(code["python"])
    (source / "pyproject.toml").write_text(code["toml"])
    assert "pip install ." in code["sh"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
         "--target", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return target


def environment(installed: Path) -> dict[str, str]:
    path = os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def test_t14_a_package_adds_a_kind_of_storage_and_passes_the_check(
    installed: Path, tmp_path: Path
) -> None:
    """T14: the page's example, installed as it says, through the command that it names."""
    done = subprocess.run(
        [sys.executable, "-m", "manyroots.store.conformance", f"sqlite://{tmp_path}/pages.db"],
        check=False, capture_output=True, text=True, env=environment(installed),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass  ") == len(conformance.CHECKS) + 1


def test_t14_an_engine_serves_pages_from_a_plug_in(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T14: a second engine on the same database finds what the first computed."""
    monkeypatch.syspath_prepend(installed)
    model = tmp_path / "model"
    save_tiny(model, "llama", vocab_size=300)
    tiny_backend().save(str(model / "tokenizer.json"))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    told = []
    for _ in range(2):
        with quick_tiers(), LLM(
            str(model), dtype="float32", block_size=4, max_model_len=64, max_num_seqs=2,
            num_gpu_blocks_override=28, progress_bars=False,
            kv_storage=f"sqlite://{tmp_path}/pages.db",
        ) as llm:  # fmt: skip
            answer = llm.generate([list(range(3, 45))], params)[0]
            told.append((answer.outputs[0].token_ids, llm.stats().total_storage_hit_tokens))
    (tokens, cold), (again, found) = told
    assert again == tokens
    assert (cold, found) == (0, 40)


def test_t14_files_pass_the_check(tmp_path: Path) -> None:
    """T14: as plug-ins do."""
    results = check_backend(lambda: Files(tmp_path, None))
    assert [each for each in results if each.fault is not None] == []
    assert not any(path.is_file() for path in tmp_path.glob("v1/??/*")), "values are left"


@pytest.mark.skipif(not server_program(), reason="no redis-server on this machine")
def test_t14_redis_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T14: and raises in time where no server is."""
    server = RedisServer(tmp_path)
    try:
        dead = f"redis://127.0.0.1:{free_port()}/0"
        assert conformance.main([server.url, "--dead-url", dead]) == 0
        assert "pass  dead: put" in capsys.readouterr().out
    finally:
        server.stop()


class Torn(Shelf):
    """Gives half of each value."""

    def get(self, keys: Any, num_bytes: int) -> Any:
        return [value and value[: len(value) // 2] for value in super().get(keys, num_bytes)]


class Cut(Shelf):
    """Gives no more than it is asked for."""

    def get(self, keys: Any, num_bytes: int) -> Any:
        return [value and value[:num_bytes] for value in super().get(keys, num_bytes)]


class Reordered(Shelf):
    def get(self, keys: Any, num_bytes: int) -> Any:
        return super().get(keys, num_bytes)[::-1]


class Undying(Shelf):
    def remove(self, keys: Any) -> None:
        """Nothing."""


class Keepless(Shelf):
    def keep(self, keys: Any, for_s: float) -> None:
        raise NotImplementedError


class Forgetful(Shelf):
    """Says that it stores what it does not."""

    def put(self, items: Any) -> list[bool]:
        return [True] * len(items)


class Tearing(Shelf):
    """Replaces a value in two parts, and goes on when a reader has seen the first."""

    def __init__(self) -> None:
        super().__init__()
        self.was_seen = threading.Event()

    def put(self, items: Any) -> list[bool]:
        for key, value in items:
            if len(value) > 90_000 and key in self.values:
                self.values[key] = value[:7]
                self.was_seen.wait(PATIENCE_S)
        return super().put(items)

    def get(self, keys: Any, num_bytes: int) -> Any:
        found = super().get(keys, num_bytes)
        if any(value is not None and len(value) == 7 for value in found):
            self.was_seen.set()
        return found


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Torn, "values come back in the order of keys"),
        (Cut, "a longer value is not taken for a whole one"),
        (Reordered, "values come back in the order of keys"),
        (Undying, "removed values are gone"),
        (Keepless, "keep is harmless"),
        (Forgetful, "values of any size are whole"),
        (Tearing, "readers never see half a value"),
    ],
)
def test_t14_the_check_finds_what_is_wrong(kind: type[Shelf], check: str) -> None:
    """T14: each fault by the check that is for it; a right backend passes."""
    shelf = kind()
    failed = [each.check for each in check_backend(lambda: shelf) if each.fault is not None]
    assert check in failed


def test_t14_a_right_backend_passes() -> None:
    """T14."""
    shelf = Shelf()
    assert [each for each in check_backend(lambda: shelf) if each.fault is not None] == []
    assert shelf.values == {}


def test_t14_a_dead_backend_must_raise_in_time() -> None:
    """T14: one that answers is found, and so is one that takes too long."""
    shelf = Shelf()
    assert all(each.fault for each in check_dead(lambda: shelf, 1.0))
    shelf.fault = ConnectionError("down")
    assert not any(each.fault for each in check_dead(lambda: shelf, 1.0))
    with mock.patch.object(conformance.time, "monotonic", iter(range(0, 800, 100)).__next__):
        results = check_dead(lambda: shelf, 1.0)
    assert all("raised after 100.0 s" in (each.fault or "") for each in results)


def plugins(**values: str) -> Any:
    """As if packages with these entry points were installed."""
    found = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
    return mock.patch.object(registry, "entry_points", return_value=found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_storage": "ftp://host/x"}, "begins with 'ftp'; installed kinds of storage are file"),
        ({"kv_storage": "file://relative"}, "an absolute path"),
        ({"kv_storage": "redis://h:1/0", "kv_storage_size": 1.0}, "maxmemory"),
        ({"kv_storage": "file:///x", "kv_storage_ttl_s": 1}, "--kv-storage-ttl-s is for redis"),
        ({"kv_storage": "gone://:secret@x"}, "nowhere:Gone can't be imported: ModuleNotFound"),
        ({"kv_storage": "odd://:secret@x"}, "pathlib:Path has no check; upgrade the package"),
    ],
)
def test_t14_storage_that_can_not_be_opened_is_refused_before_a_model_is_loaded(
    given: dict[str, Any], message: str
) -> None:
    """T14: with a remedy, without the URL's password, by the start and by the engine."""
    with plugins(gone="nowhere:Gone", odd="pathlib:Path"):
        for refused in (check_storage, open_backend):
            with pytest.raises(ConfigError, match=message) as caught:
                refused(engine_settings(given).tiers)
            assert "secret" not in str(caught.value)
        with pytest.raises(ConfigError, match=message):
            check_start(engine_settings(given))


def test_t14_a_plug_in_does_not_replace_files(tmp_path: Path) -> None:
    """T14: whatever is installed, file:// means what it has always meant."""
    with plugins(file="nowhere:Gone"):
        settings = TierSettings(kv_storage=f"file://{tmp_path}")
        assert isinstance(open_backend(settings), Files)
