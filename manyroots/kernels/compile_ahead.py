"""Compiles kernels in parallel before they are launched.

Takes something that launches kernels; gives nothing, but the kernels are compiled then, and in
Triton's cache on disk. Triton compiles when a kernel is first launched, one after the other, on one
core. Here launches only name what must be compiled, and threads compile it: most of the time is
spent in LLVM and in the assembler, which do not hold Python's lock.

Nothing is computed, so that memory which kernels would have written is zeros: an index that another
operator reads from it is valid.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_THREADS = 32


def compile_ahead(launch_all: Callable[[], object]) -> None:
    """Compile every kernel that `launch_all` launches. On a machine with one core, or with a Triton
    that can't, nothing happens: kernels are compiled when they are launched."""
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return
    if num_threads < 2:
        return
    began = time.monotonic()
    try:
        _compile(launch_all, num_threads, AsyncCompileMode)
    except Exception:
        logger.warning("kernels are compiled when they are first launched", exc_info=True)
        return
    logger.info("kernels compiled in %.1f s by %d threads", time.monotonic() - began, num_threads)


def _compile(launch_all: Callable[[], object], num_threads: int, mode: Callable[..., Any]) -> None:
    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads,
        # What can't be compiled is said where it is launched.
        mode(threads, ignore_errors=True),
        _named_only(),
    ):
        launch_all()


@contextmanager
def _named_only() -> Iterator[None]:
    """Launches become compilations, each kind of launch once."""
    from triton.runtime.jit import JITFunction

    run, seen = JITFunction.run, set[object]()

    def named(kernel: Any, *args: Any, **options: Any) -> None:
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
    """What Triton compiles for, or more than that: a kernel too many costs nothing but a look."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int and not is_constant:
        return value if value < 16 else (value % 16 == 0, value.bit_length() > 31)
    if isinstance(value, float) and not is_constant:
        return float
    if (box := getattr(value, "block_shape", None)) is not None:  # a descriptor of a tensor
        # Of Triton's own descriptors only Gluon's have a layout.
        layout = str(getattr(value, "layout", None))
        return type(value), value.base.dtype, *box, layout  # type: ignore[attr-defined]
    return value if isinstance(value, Hashable) else id(value)
