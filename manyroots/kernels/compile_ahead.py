"""Compiles kernels in parallel before they are launched.

Takes a function that launches kernels; returns nothing, but afterwards the kernels are compiled and
in Triton's cache on disk. Triton compiles a kernel at its first launch, one after the other on one
core. Here a launch only records what to compile. Threads take the records and let helper processes
compile them (`compile_helpers.py`).

Nothing is computed, so memory that kernels would have written holds zeros. An index that another
operator reads from it is therefore valid.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def compile_ahead(launch_all: Callable[[], object]) -> None:
    """Compile every kernel that `launch_all` launches. Does nothing on a machine with one core or
    with an unsuitable Triton: kernels are then compiled at their first launch."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode

        from manyroots.kernels.compile_helpers import HELPERS, num_at_once
    except ImportError:
        return
    if num_at_once() < 2:
        return
    began, before = time.monotonic(), HELPERS.num_compiled
    try:
        with (
            _compiled_by(HELPERS.compile),
            ThreadPoolExecutor(num_at_once(), thread_name_prefix="compile") as threads,
            # A compile error is raised again, and reported, at the launch.
            AsyncCompileMode(threads, ignore_errors=True),
            _named_only(),
        ):
            launch_all()
    except Exception:
        logger.warning("kernels are compiled when they are first launched", exc_info=True)
        return
    took_s, num_compiled = time.monotonic() - began, HELPERS.num_compiled - before
    logger.info("kernels compiled in %.1f s, %d by helper processes", took_s, num_compiled)


def begin_helpers() -> None:
    """Early in a start: if nothing is compiled yet, helpers import torch meanwhile."""
    with contextlib.suppress(ImportError):
        from manyroots.kernels.compile_helpers import HELPERS

        HELPERS.begin()


def end_helpers() -> None:
    """After the last `compile_ahead` of a start."""
    with contextlib.suppress(ImportError):
        from manyroots.kernels.compile_helpers import HELPERS

        HELPERS.close()


@contextmanager
def _compiled_by(compiler: Callable[..., Any]) -> Iterator[None]:
    """Kernels call `compiler` instead of Triton's `compile`, which each keeps as an attribute."""
    from triton.runtime.jit import JITFunction

    def keep(kernel: JITFunction[Any], own: Callable[..., Any]) -> None:
        kernel.__dict__["compile"] = own

    # A property of the class comes before an attribute of the kernel.
    JITFunction.compile = property(lambda _: compiler, keep)
    try:
        yield
    finally:
        del JITFunction.compile


@contextmanager
def _named_only() -> Iterator[None]:
    """Turns launches into compilations, one for each kind of launch."""
    from triton.runtime.jit import JITFunction

    from manyroots.kernels.compile_helpers import fix_hash

    run, seen = JITFunction.run, set[object]()

    def named(kernel: Any, *args: Any, **options: Any) -> None:
        fix_hash(kernel)
        constants = kernel.constexprs
        key = (
            kernel,
            *(_kind(arg, at in constants) for at, arg in enumerate(args)),
            *((name, _kind(value, True)) for name, value in options.items() if name != "grid"),
        )
        if key not in seen:
            seen.add(key)
            run(kernel, *args, **{**options, "warmup": True})

    with ExitStack() as undo:
        for place, name, new in (
            (JITFunction, "run", named),
            (torch, "empty", torch.zeros),
            (torch, "empty_like", torch.zeros_like),
            (Tensor, "new_empty", Tensor.new_zeros),
        ):
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, new)
        yield


def _kind(value: object, is_constant: bool) -> object:
    """The keys that Triton compiles for, or more: an extra kernel costs only a lookup."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int and not is_constant:
        return value if value < 16 else (value % 16 == 0, value.bit_length() > 31)
    if isinstance(value, float) and not is_constant:
        return float
    if (box := getattr(value, "block_shape", None)) is not None:  # a tensor descriptor
        # Of Triton's descriptors only Gluon's have a layout.
        layout = str(getattr(value, "layout", None))
        return type(value), value.base.dtype, *box, layout  # type: ignore[attr-defined]
    return value if isinstance(value, Hashable) else id(value)
