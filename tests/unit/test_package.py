"""The package as its users import it: public names, and an environment that stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import manyroots
from manyroots import errors
from manyroots.process.torch_allocator import DELAY_MS, PURGE_DELAY, engine_environment

LOOK = """
import json, os, sys
before = dict(os.environ)
import manyroots
seen = {"has_torch": "torch" in sys.modules, "changed": dict(os.environ) != before}
[getattr(manyroots, name) for name in manyroots.__all__]
seen["changed_by_all"] = sorted(set(os.environ) - set(before))
print(json.dumps(seen))
"""


def test_importing_the_package_changes_no_environment_variable_and_imports_no_torch() -> None:
    env = {name: value for name, value in os.environ.items() if name != PURGE_DELAY}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert not seen["has_torch"]
    assert not seen["changed"]
    assert PURGE_DELAY not in seen["changed_by_all"]


def test_every_exception_is_exported() -> None:
    exceptions = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ManyrootsError)
    }
    assert exceptions <= set(manyroots.__all__)
    assert all(getattr(manyroots, name) is getattr(errors, name) for name in exceptions)


def test_an_engine_process_keeps_freed_memory_unless_the_caller_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PURGE_DELAY, raising=False)
    assert engine_environment()[PURGE_DELAY] == DELAY_MS
    assert PURGE_DELAY not in os.environ
    monkeypatch.setenv(PURGE_DELAY, "5")
    assert engine_environment()[PURGE_DELAY] == "5"
