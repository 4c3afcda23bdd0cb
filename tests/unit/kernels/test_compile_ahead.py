"""Kernels are compiled ahead: launches name them, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from manyroots.kernels import compile_ahead


class Kernel(SimpleNamespace):
    """One whose third parameter is a constant."""

    constexprs = (2,)
    hash = "known"

    __hash__ = object.__hash__


KERNEL: Any = Kernel()


class Compiler:
    """In the place of Triton: notes what is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.is_open = False

        def run(kernel: object, *args: object, grid: object, warmup: bool, **options: Any) -> None:
            assert warmup, "a launch would compute"
            assert self.is_open
            self.compiled.append((kernel, args, options))

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(_async_compile, "AsyncCompileMode", self._mode)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))

    def _mode(self, threads: Executor, *, ignore_errors: bool) -> Compiler:
        assert ignore_errors
        return self

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_open = False


def launched(*args: object, **options: Any) -> Callable[[], object]:
    return lambda: JITFunction.run(KERNEL, *args, grid=(1,), warmup=False, **options)


def test_each_kind_of_launch_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)

    def launch_all() -> None:
        for launch in (
            launched(x, 100, BLOCK=16),
            launched(x, 101, BLOCK=16),
            launched(x[1:], 100, BLOCK=16),
            launched(x, 112, BLOCK=16),
            launched(x, 1, BLOCK=16),
            launched(half, 100, BLOCK=16),
            launched(x, 100, BLOCK=32),
            launched(x, 100, 48, BLOCK=32),
            launched(x, 100, 64, BLOCK=32),
            launched(x, 0.5, BLOCK=16),
            launched(x, 0.25, BLOCK=16),
        ):
            launch()

    compile_ahead.compile_ahead(launch_all)
    assert len(compiler.compiled) == 9, "101 is as 100, and 0.25 as 0.5"
    assert not compiler.is_open


def test_what_kernels_would_have_written_is_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that torch reads from it is valid; afterwards all is as before."""
    Compiler(monkeypatch)
    before = torch.empty, torch.empty_like, JITFunction.run
    found: list[float] = []

    def launch_all() -> None:
        out = torch.empty(1000, dtype=torch.int64)
        found.append(out.abs().max().item())
        found.append(torch.empty_like(out).abs().max().item())
        found.append(out.new_empty(1000).abs().max().item())

    compile_ahead.compile_ahead(launch_all)
    assert found == [0, 0, 0]
    assert (torch.empty, torch.empty_like, JITFunction.run) == before


def test_a_start_does_not_fail_by_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Compiler(monkeypatch)

    def launch_all() -> None:
        raise RuntimeError("an operator refused zeros")

    compile_ahead.compile_ahead(launch_all)
    assert "compiled when they are first launched" in caplog.text
    assert JITFunction.run.__name__ == "run"
