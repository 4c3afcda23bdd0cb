"""Compiles Triton kernels in helper processes.

In: a kernel's source and options, as Triton hands them to its compiler. Out: what Triton's
`compile` gives; the kernel is then in Triton's cache on disk. Triton's front end is Python. In one
process, threads that compile take turns for it, because they share the interpreter's lock.

`python -m manyroots.kernels.compile_helpers` imports torch and the kernels, which takes seconds,
and computes nothing. The helpers are its forks. It starts with the engine if nothing at all is in
the cache, and otherwise once several kernels are not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from importlib import import_module
from threading import Lock
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_here
from triton.runtime.jit import JITCallable, JITFunction

from manyroots.kernels.choice import kernel_set_of
from manyroots.process.forked_helpers import ForkedHelpers, answer_in_forks
from manyroots.process.helper_process import HelperDiedError, Message

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 32
FEW_KERNELS = 8
"""This process compiles so many while helpers would still import."""
CPU_S = 600
"""Processor time for one kernel. The largest ones take about ten seconds."""
MEMORY_BYTES = 64 << 30
"""Address space, of which LLVM reserves far more than it uses."""


class _NotCachedError(Exception):
    """A kernel is not in Triton's cache."""


class _CannotSendError(Exception):
    """A source or an option has a value that JSON can't represent."""


class CompileHelpers:
    """The helper processes of this process. Any thread may call `compile`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._processes: ForkedHelpers | None = None
        self._num_missing = 0
        self.num_compiled = 0
        """Kernels that helpers have compiled."""

    def begin(self) -> None:
        """Start the processes if nothing is in the cache, so that they import meanwhile."""
        with self._lock:
            if num_at_once() > 1 and _is_cache_empty():
                self._begin()

    def _begin(self) -> None:
        if self._processes is None:
            with contextlib.suppress(OSError):
                self._processes = ForkedHelpers("manyroots.kernels.compile_helpers", num_at_once())

    def compile(self, source: Any, **options: Any) -> Any:
        """In the place of Triton's `compile`. This process compiles the first few kernels, unless
        helpers were started, and what a helper fails to compile."""
        # Triton calls `make_ir` only if the kernel is not in the cache.
        source.make_ir = _raise_not_cached
        try:
            return compile_here(source, **options)
        except _NotCachedError:
            pass
        finally:
            del source.make_ir
        if (processes := self._take()) is not None:
            self._compile_by(processes, source, options)
        return compile_here(source, **options)

    def _take(self) -> ForkedHelpers | None:
        with self._lock:
            self._num_missing += 1
            if self._num_missing > FEW_KERNELS:
                self._begin()
            return self._processes

    def _compile_by(self, processes: ForkedHelpers, source: Any, options: dict[str, Any]) -> None:
        try:
            [fault] = processes.call([json.dumps(_job_of(source, options)).encode()])
        except (_CannotSendError, HelperDiedError, OSError) as error:
            fault = str(error).encode()
        if fault:
            logger.info("no helper process compiled %s: %s", source.name, fault.decode())
        with self._lock:
            self.num_compiled += not fault

    def close(self) -> None:
        """End the processes. Later calls may start new ones."""
        with self._lock:
            processes, self._processes = self._processes, None
            self._num_missing = 0
        if processes is not None:
            processes.close()


HELPERS = CompileHelpers()
"""Shared by all compilations of a start, so that helpers import torch once."""


def num_at_once() -> int:
    """Kernels that are compiled at once: one for each core."""
    return min(MAX_AT_ONCE, len(os.sched_getaffinity(0)))


def _is_cache_empty() -> bool:
    try:
        return not os.listdir(knobs.cache.dir)
    except FileNotFoundError:
        return True


def fix_hash(function: Any) -> None:
    """Let Triton hash a function after all that it calls, whatever was hashed before.

    In the cache a kernel is found by a hash of its code and of the constants that it uses. Triton
    (3.6 to 3.9) leaves out the constants of a called function that was not hashed before. So the
    same kernel would have another hash in a process that launches kernels in another order.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            if isinstance(called := function.fn.__globals__.get(name), JITCallable):
                fix_hash(called)
        function.cache_key  # noqa: B018 (Triton makes the hash on demand)


def _raise_not_cached(*_: object, **__: object) -> None:
    raise _NotCachedError


def _job_of(source: Any, options: dict[str, Any]) -> dict[str, Any]:
    target = options["target"]
    return {
        "kernel": _name_of(source.fn, source.fn.fn),
        "source": _name_of(type(source), type(source)),
        "parts": [_plain(part) for part in (source.signature, source.constants, source.attrs)],
        "target": [target.backend, target.arch, target.warp_size],
        "options": _plain({key: options[key] for key in options if key != "target"}),
    }


def _name_of(value: object, definition: Any) -> list[str]:
    """Module and name of a kernel or a class, by which a helper finds it."""
    name = [definition.__module__, definition.__qualname__]
    if _named(name) is not value:
        raise _CannotSendError(f"{'.'.join(name)} is not what its module has under this name")
    return name


def _named(name: list[str]) -> Any:
    module, attribute = name
    return getattr(import_module(module), attribute, None)


def _plain(value: Any) -> Any:
    """A value as JSON, from which `_restored` makes an equal one."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": _name_of(type(value), type(value)), "values": [_plain(v) for v in value]}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, JITFunction):
        return {"kernel": _name_of(value, value.fn)}
    raise _CannotSendError(f"a {type(value).__name__} can't be sent to a helper")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_restored(item) for item in value["tuple"])
    if "named" in value:
        return _named(value["named"])(*(_restored(item) for item in value["values"]))
    if "kernel" in value:
        return _named(value["kernel"])
    return {_restored(key): _restored(item) for key, item in value["dict"]}


def _answer(message: Message) -> Message:
    """Compile a kernel into the cache. Returns an empty text, or what was wrong."""
    try:
        job = json.loads(message[0])
        signature, constants, attributes = map(_restored, job["parts"])
        fix_hash(kernel := _named(job["kernel"]))
        source = _named(job["source"])(kernel, signature, constants, attributes)
        options = _restored(job["options"])
        compiled = compile_here(source, target=GPUTarget(*job["target"]), **options)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".encode()]
    with contextlib.suppress(Exception):  # The launch makes it again, and reports this.
        _make_launcher(source, compiled)
    return [b""]


def _make_launcher(source: Any, compiled: Any) -> None:
    """Triton before 3.8 launches a kernel by a C module for the types of its arguments. It compiles
    the module at the first launch if it is not in the cache."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(source, compiled.metadata)


def _prepare() -> None:
    """What each process would do before its first kernel."""
    kernel_set_of("triton")
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # A hash of all of Triton.


if __name__ == "__main__":
    _prepare()
    answer_in_forks(_answer, [*map(int, sys.argv[1:])], cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
