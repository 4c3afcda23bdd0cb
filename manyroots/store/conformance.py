"""Checks that a storage backend keeps its protocol: for authors of plug-ins (T14).

    python -m manyroots.store.conformance URL [--dead-url URL]

Opens the backend as a server would, stores values under random keys, and removes them at the end.
`--dead-url` is an address of the same kind at which nothing answers: each call must then raise in
time. Prints one line per check; exits with 1 if one failed. `check_backend` does the same from a
test, without pytest.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyroots.config import TierSettings
from manyroots.errors import ManyrootsError
from manyroots.store.backends.backend import Backend, Value
from manyroots.store.backends.registry import open_backend

KEY_BYTES = 32
SIZE = 5000
"""Size of most values; not a multiple of a block."""
NUM_READERS = 4
NUM_ROUNDS = 20
SPARE_S = 2.0
"""A call may end this much later than its timeout."""

OpenBackend = Callable[[], Backend]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    fault: str | None
    """None: it passed."""


class _Bench:
    """Backends that are opened, and keys to remove at the end."""

    def __init__(self, open_one: OpenBackend) -> None:
        self._open_one = open_one
        self._opened: list[Backend] = []
        self._keys: list[bytes] = []
        self.backend = self.open()

    def open(self) -> Backend:
        self._opened.append(self._open_one())
        return self._opened[-1]

    def keys(self, count: int) -> list[bytes]:
        """Keys without a value."""
        fresh = [os.urandom(KEY_BYTES) for _ in range(count)]
        self._keys += fresh
        return fresh

    def items(self, count: int, size: int = SIZE) -> list[tuple[bytes, bytes]]:
        return [(key, os.urandom(size)) for key in self.keys(count)]

    def close(self) -> None:
        """Remove everything that was stored."""
        try:
            self.backend.remove(self._keys)
        finally:
            for backend in self._opened:
                backend.close()


def check_backend(open_one: OpenBackend) -> list[CheckResult]:
    """Run every check; `open_one` opens another handle of the same storage."""
    results = []
    bench = _Bench(open_one)
    for check in (*CHECKS, all_values_can_be_removed):
        try:
            check(bench)
        except Exception as error:
            fault = str(error) if isinstance(error, AssertionError) else repr(error)
            results.append(CheckResult(_name(check), fault))
        else:
            results.append(CheckResult(_name(check), None))
    return results


def check_dead(open_dead: OpenBackend, timeout_s: float) -> list[CheckResult]:
    """Each call to storage that does not answer must raise in time."""
    key = os.urandom(KEY_BYTES)
    calls: dict[str, Callable[[Backend], object]] = {
        "get": lambda backend: backend.get([key], SIZE),
        "put": lambda backend: backend.put([(key, b"value")]),
        "exists": lambda backend: backend.exists([key]),
        "remove": lambda backend: backend.remove([key]),
    }
    results = []
    backend = open_dead()
    for name, call in calls.items():
        begin, fault = time.monotonic(), f"{name} returned, although nothing answers"
        try:
            call(backend)
        except Exception:
            took = time.monotonic() - begin
            late = f"{name} raised after {took:.1f} s; timeout_s is {timeout_s:g}"
            results.append(
                CheckResult(f"dead: {name}", late if took > timeout_s + SPARE_S else None)
            )
        else:
            results.append(CheckResult(f"dead: {name}", fault))
    backend.close()
    return results


def missing_keys_are_none(bench: _Bench) -> None:
    keys = bench.keys(3)
    _expect("get", bench.backend.get(keys, SIZE), [None] * 3)
    _expect("exists", bench.backend.exists(keys), [False] * 3)


def values_come_back_in_the_order_of_keys(bench: _Bench) -> None:
    items = bench.items(5)
    missing = bench.keys(1)[0]
    _expect("put", bench.backend.put(items), [True] * 5)
    (first, value), (last, other) = items[0], items[4]
    got = bench.backend.get([last, missing, first], SIZE)
    _expect("get", got, [other, None, value])
    _expect("exists", bench.backend.exists([missing, first]), [False, True])


def values_of_any_size_are_whole(bench: _Bench) -> None:
    for size in (1, 4096, (1 << 20) + 1):
        (item,) = bench.items(1, size)
        _expect("put", bench.backend.put([item]), [True])
        _expect(f"get of {size} bytes", bench.backend.get([item[0]], size), [item[1]])


def a_longer_value_is_not_taken_for_a_whole_one(bench: _Bench) -> None:
    (item,) = bench.items(1)
    bench.backend.put([item])
    (got,) = bench.backend.get([item[0]], SIZE - 1)
    if got is not None and len(got) == SIZE - 1:
        raise AssertionError("a value was cut to num_bytes, so it looks like a whole one")


def a_second_put_replaces_the_value(bench: _Bench) -> None:
    (item,) = bench.items(1)
    bench.backend.put([item])
    _expect("put", bench.backend.put([(item[0], b"other")]), [True])
    _expect("get", bench.backend.get([item[0]], SIZE), [b"other"])


def removed_values_are_gone(bench: _Bench) -> None:
    items = bench.items(2)
    bench.backend.put(items)
    bench.backend.remove([items[0][0], *bench.keys(1)])
    got = bench.backend.get([key for key, _ in items], SIZE)
    _expect("get after remove", got, [None, items[1][1]])
    bench.backend.put(items[:1])
    _expect("get after put", bench.backend.get([items[0][0]], SIZE), [items[0][1]])


def keep_is_harmless(bench: _Bench) -> None:
    items = bench.items(2)
    bench.backend.put(items)
    keys = [key for key, _ in items]
    bench.backend.keep([*keys, *bench.keys(1)], 60.0)
    _expect("exists after keep", bench.backend.exists(keys), [True, True])
    bench.backend.keep(keys, 0)
    got = bench.backend.get(keys, SIZE)
    _expect("get after keep", got, [value for _, value in items])


def another_handle_finds_the_values(bench: _Bench) -> None:
    items = bench.items(2)
    first = bench.open()
    first.put(items)
    _expect("get", bench.backend.get([items[0][0]], SIZE), [items[0][1]])
    again = bench.open()
    _expect("get", again.get([items[1][0]], SIZE), [items[1][1]])


def readers_never_see_half_a_value(bench: _Bench) -> None:
    """Threads read while one replaces the value repeatedly."""
    (key,) = bench.keys(1)
    versions = [bytes([number]) * (SIZE * 20) for number in (1, 2)]
    bench.backend.put([(key, versions[0])])
    faults: list[str] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                (got,) = bench.backend.get([key], SIZE * 20)
            except Exception as error:
                faults.append(f"a reader raised {error!r}")
                return
            if got is not None and bytes(got) not in versions:
                faults.append(f"a reader saw {len(got)} bytes that were never put")
                return

    readers = [threading.Thread(target=read, daemon=True) for _ in range(NUM_READERS)]
    for reader in readers:
        reader.start()
    try:
        for number in range(NUM_ROUNDS):
            bench.backend.put([(key, versions[number % 2])])
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    if faults:
        raise AssertionError(faults[0])


def all_values_can_be_removed(bench: _Bench) -> None:
    bench.close()


CHECKS: Sequence[Callable[[_Bench], None]] = (
    missing_keys_are_none,
    values_come_back_in_the_order_of_keys,
    values_of_any_size_are_whole,
    a_longer_value_is_not_taken_for_a_whole_one,
    a_second_put_replaces_the_value,
    removed_values_are_gone,
    keep_is_harmless,
    another_handle_finds_the_values,
    readers_never_see_half_a_value,
)


def _name(check: Callable[[_Bench], None]) -> str:
    return check.__name__.replace("_", " ")


def _expect(
    call: str, got: Sequence[Value | bool | None], wanted: Sequence[bytes | bool | None]
) -> None:
    if len(got) != len(wanted):
        raise AssertionError(f"{call} gave {len(got)} results for {len(wanted)} keys")
    for at, (found, right) in enumerate(zip(got, wanted, strict=True)):
        if (bytes(found) if isinstance(found, memoryview) else found) != right:
            raise AssertionError(f"{call}: result {at} is {_short(found)}, not {_short(right)}")


def _short(value: Value | bool | None) -> str:
    return f"a value of {len(value)} bytes" if isinstance(value, Value) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m manyroots.store.conformance",
        description="Check that a storage backend keeps its protocol.",
    )
    parser.add_argument("url", help="what --kv-storage would be; values are added and removed")
    parser.add_argument("--dead-url", help="one at which nothing answers")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    given = parser.parse_args(arguments)

    def opener(url: str) -> OpenBackend:
        settings = TierSettings(kv_storage=url, kv_storage_timeout_s=given.timeout_s)

        def open_one() -> Backend:
            backend = open_backend(settings)
            assert backend is not None
            return backend

        return open_one

    try:
        results = check_backend(opener(given.url))
        if given.dead_url is not None:
            results += check_dead(opener(given.dead_url), given.timeout_s)
    except ManyrootsError as error:
        print(error, file=sys.stderr)
        return 2
    for result in results:
        print(f"{'pass' if result.fault is None else 'FAIL'}  {result.check}", end="")
        print("" if result.fault is None else f": {result.fault}")
    return int(any(result.fault is not None for result in results))


if __name__ == "__main__":
    sys.exit(main())
