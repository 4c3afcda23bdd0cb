"""Faults of the tiers under load, with a real engine around a tiny model (T03, T08, T12).

    python -m tests.soaks.tier_faults [--count 200] [--kind NAME ...] [--seed 0] [--ranks 2]

Prompts go round through a device that holds two of them, so that nearly all come from storage, and
each fault is planted where the next request will meet it. After each, tokens are those of an engine
without tiers, nothing is held, and every invariant of the cache holds. The choice between loading
and computing is left out here: storage is asked each time. With ranks, a value that is damaged is
any rank's, a process that is killed the first rank's or another's, and errors that are played are
the first rank's alone. Prints JSON by kind; ends with 1 if a kind met fewer faults than were asked
for.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch

from manyroots import LLM, SamplingParams
from manyroots.cache.audit import audit
from manyroots.errors import ConfigError
from manyroots.ids import RequestId
from manyroots.messages import Abort, Submit
from manyroots.store import storage_link
from manyroots.store.backends.files import Files
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import worth_loading
from tests.helpers.s3_server import BUCKET, FaultyS3, faulty_s3
from tests.unit.models.tiny import save_tiny
from tests.unit.store.tiers import RedisServer, server_program
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE, LENGTH, NUM_PROMPTS = 4, 42, 8
NUM_PAGES = LENGTH // PAGE
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
Told = dict[str, Any]


class Bench:
    """A tiny model, its prompts and what it says to each without tiers."""

    def __init__(self, folder: Path, seed: int, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.rng = random.Random(seed)
        self.model = folder / "model"
        save_tiny(self.model, "llama", vocab_size=300)
        tiny_backend().save(str(self.model / "tokenizer.json"))
        self.prompts = [
            [self.rng.randrange(3, 300) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)
        ]
        with self.engine(tensor_parallel_size=1) as llm:
            self.wanted = [self.ask(llm, index) for index in range(NUM_PROMPTS)]

    def engine(self, **settings: Any) -> LLM:
        settings = {"tensor_parallel_size": self.ranks, **settings}
        return LLM(
            str(self.model), dtype="float32", block_size=PAGE, max_model_len=64, max_num_seqs=4,
            num_gpu_blocks_override=28, progress_bars=False, **settings,
        )  # fmt: skip

    def files_settings(self, folder: Path) -> dict[str, Any]:
        # A busy machine's own delays are no faults.
        return {"kv_storage": f"file://{folder}", "kv_storage_timeout_s": PATIENCE_S}

    def on_files(self, folder: Path, **settings: Any) -> LLM:
        return self.engine(**self.files_settings(folder), **settings)

    def ask(self, llm: LLM, index: int) -> list[int]:
        return llm.generate([self.prompts[index]], GREEDY)[0].outputs[0].token_ids

    def check(self, llm: LLM, index: int) -> None:
        """The right tokens, and everything in order."""
        assert self.ask(llm, index) == self.wanted[index], f"wrong tokens for prompt {index}"
        check_order(llm)


def check_order(llm: LLM) -> None:
    cache: Any = llm._loop._scheduler._cache  # type: ignore[attr-defined]
    audit(cache)
    stats = llm.stats()
    assert stats.num_held_pages == 0, "pages are held without a holder"
    assert not cache.has_transfers, "a copy is under way for ever"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("v1/??/*"))


class Outages(logging.Handler):
    """Counts the lines that say that storage is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += "going on without" in record.getMessage()


@contextlib.contextmanager
def counted_outages() -> Iterator[Outages]:
    handler, logger = Outages(), logging.getLogger("manyroots.cache.storage_health")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


# Values that are not what they were


class Stored(Protocol):
    """A value in storage: a file, or an object with a file's methods."""

    def read_bytes(self) -> bytes: ...

    def write_bytes(self, data: bytes) -> object: ...

    def exists(self) -> bool: ...

    def unlink(self) -> None: ...


Damage = Callable[[Stored, list[Stored]], None]
"""Of a value; the others are another prompt's."""


@dataclass(frozen=True)
class Stock:
    """Settings of an engine on storage, and all values in it."""

    settings: dict[str, Any]
    values: Callable[[], set[Stored]]


StockOf = Callable[[Bench, str], contextlib.AbstractContextManager[Stock]]
"""Where an engine stores: for a bench, under a name."""


@contextlib.contextmanager
def in_files(bench: Bench, name: str) -> Iterator[Stock]:
    folder = bench.folder / name
    yield Stock(bench.files_settings(folder), lambda: set(files_of(folder)))


@dataclass(frozen=True)
class S3Object:
    """With a file's methods."""

    client: Any = field(compare=False)
    key: str

    def read_bytes(self) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=self.key)["Body"].read())

    def write_bytes(self, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=self.key, Body=data)

    def exists(self) -> bool:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=self.key)
        return bool(found["KeyCount"])

    def unlink(self) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=self.key)


@contextlib.contextmanager
def in_a_bucket(bench: Bench, name: str) -> Iterator[Stock]:
    with s3_of(bench) as s3:

        def values() -> set[Stored]:
            found = s3.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/")
            return {S3Object(s3.client, each["Key"]) for each in found.get("Contents", ())}

        url = f"s3://{BUCKET}/{name}"
        yield Stock({"kv_storage": url, "kv_storage_timeout_s": PATIENCE_S}, values)


@contextlib.contextmanager
def s3_of(bench: Bench) -> Iterator[FaultyS3]:
    with faulty_s3() as s3, mock.patch.dict(os.environ, s3.env):
        yield s3


def spoil(bench: Bench, count: int, name: str, damage: Damage, where: StockOf) -> Told:
    """Damage a stored page of the prompt that is asked for next."""
    num_faults = num_found = 0
    with where(bench, name) as stock, bench.engine(**stock.settings) as llm:
        owned: list[list[Stored]] = []
        before: set[Stored] = set()
        # For few faults, only as many as push the first off the device.
        num_prompts = min(NUM_PROMPTS, 3 + count)
        for index in range(num_prompts):
            bench.check(llm, index)
            now = stock.values()
            owned.append(sorted(now - before, key=str))
            before = now
        while num_faults < count:
            index = num_faults % num_prompts
            values = [value for value in owned[index] if value.exists()]
            others = [value for value in owned[index - 1] if value.exists()]
            assert values, "nothing is stored again"
            damage(bench.rng.choice(values), others)
            missing = missing_units(llm)
            bench.check(llm, index)
            num_faults += 1
            num_found += missing_units(llm) > missing
        total = llm.stats().total_storage_hit_tokens
    assert num_found == num_faults, f"{num_found} of {num_faults} were noticed"
    return {"faults": num_faults, "noticed": num_found, "tokens_from_storage": total}


def missing_units(llm: LLM) -> int:
    storage = llm.stats().storage
    assert storage is not None
    return storage.total_missing_units


def flipped_bits(bench: Bench, count: int, where: StockOf = in_files) -> Told:
    def damage(stored: Stored, _: list[Stored]) -> None:
        value = bytearray(stored.read_bytes())
        bit = bench.rng.randrange(8 * len(value))
        value[bit // 8] ^= 1 << bit % 8
        stored.write_bytes(bytes(value))

    return spoil(bench, count, "flipped", damage, where)


def truncated_values(bench: Bench, count: int, where: StockOf = in_files) -> Told:
    def damage(stored: Stored, _: list[Stored]) -> None:
        value = stored.read_bytes()
        stored.write_bytes(value[: bench.rng.randrange(len(value))])

    return spoil(bench, count, "truncated", damage, where)


def foreign_values(bench: Bench, count: int, where: StockOf = in_files) -> Told:
    def damage(stored: Stored, others: list[Stored]) -> None:
        stored.write_bytes(bench.rng.choice(others).read_bytes())

    return spoil(bench, count, "foreign", damage, where)


def deleted_values(bench: Bench, count: int, where: StockOf = in_files) -> Told:
    return spoil(bench, count, "deleted", lambda stored, _: stored.unlink(), where)


# Disks


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system with hardly any room, where this user may mount one; says whether."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)],
        check=False, capture_output=True,
    )  # fmt: skip
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


def disk_faults(bench: Bench, count: int, name: str, number: int) -> Told:
    """Writes that fail while a real or a played disk refuses them, between times that work."""
    folder = bench.folder / name
    num_faults, real_write = 0, Path.write_bytes
    with small_disk(folder) as is_real, counted_outages() as outages:

        def write(path: Path, value: bytes) -> int:
            nonlocal num_faults
            refuses = not is_real or number != errno.ENOSPC
            try:
                if refuses and is_on and "aside" in path.parts:
                    raise OSError(number, os.strerror(number))
                return real_write(path, value)
            except OSError:
                num_faults += 1
                raise

        is_on = False
        with mock.patch.object(Path, "write_bytes", write), bench.on_files(folder) as llm:
            turn = 0
            while num_faults < count:
                is_on = turn % 40 >= 8
                if is_real and number == errno.ENOSPC and turn % 40 == 8:
                    fill(folder)
                if turn % 40 == 39:
                    (folder / "filler").unlink(missing_ok=True)
                    for path in files_of(folder):
                        path.unlink()
                bench.check(llm, turn % NUM_PROMPTS)
                rest(llm)
                turn += 1
            # What ended last may not have been counted yet.
            deadline = time.monotonic() + PATIENCE_S
            while True:
                storage = llm.stats().storage
                assert storage is not None
                if outages.num_lines == storage.total_outages > 0:
                    break
                assert time.monotonic() < deadline, "a line for each outage"
                bench.check(llm, turn % NUM_PROMPTS)
                rest(llm)
                turn += 1
    return {
        "faults": num_faults, "requests": turn, "outages": storage.total_outages,
        "disk": "tmpfs" if is_real and number == errno.ENOSPC else "errors played",
    }  # fmt: skip


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filler", "wb", 0) as file:
        while True:
            file.write(b"x" * 4096)


def full_disk(bench: Bench, count: int) -> Told:
    return disk_faults(bench, count, "full", errno.ENOSPC)


def read_only_folder(bench: Bench, count: int) -> Told:
    return disk_faults(bench, count, "read-only", errno.EROFS)


# Servers


def outages_of(bench: Bench, count: int, url: str, spell: Callable[[], Callable[[], None]]) -> Told:
    """A server that stops answering at a random moment, and answers again later. `spell` plants the
    fault and gives what ends it."""
    num_faults = turn = 0
    with (
        counted_outages() as outages,
        bench.engine(kv_storage=url, kv_storage_timeout_s=0.15) as llm,
    ):
        while num_faults < count:
            for _ in range(2):
                bench.check(llm, turn % NUM_PROMPTS)
                turn += 1
            end = spell()
            failed = failures(llm)
            for _ in range(3):
                bench.check(llm, turn % NUM_PROMPTS)
                turn += 1
            end()
            num_faults += failures(llm) > failed
            rest(llm)
        storage = llm.stats().storage
    assert storage is not None
    assert outages.num_lines == storage.total_outages
    return {"faults": num_faults, "requests": turn, "outages": storage.total_outages}


@contextlib.contextmanager
def redis_of(bench: Bench) -> Iterator[RedisServer]:
    if not server_program():
        raise SystemExit("no redis-server on this machine: install Debian's redis-server")
    server = RedisServer(bench.folder)
    try:
        yield server
    finally:
        server.stop()


def failures(llm: LLM) -> int:
    storage = llm.stats().storage
    assert storage is not None
    return storage.total_failed_units + storage.total_unwritten_units


def rest(llm: LLM) -> None:
    """Storage that was given up rests for some steps; here they pass at once."""
    health: Any = llm._loop._scheduler._cache.storage  # type: ignore[attr-defined]
    for direction in (health._reading, health._writing):
        direction._rests_until = 0


def redis_killed(bench: Bench, count: int) -> Told:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_of(bench))

        def spell() -> Callable[[], None]:
            server.stop()

            def end() -> None:
                nonlocal server
                server = RedisServer(bench.folder, port=server.port)
                stack.callback(server.stop)

            return end

        return outages_of(bench, count, server.url, spell)


def redis_hung(bench: Bench, count: int) -> Told:
    with redis_of(bench) as server:

        def spell() -> Callable[[], None]:
            server.process.send_signal(signal.SIGSTOP)
            return lambda: server.process.send_signal(signal.SIGCONT)

        return outages_of(bench, count, server.url, spell)


def redis_slow(bench: Bench, count: int) -> Told:
    """Answers come, later than a request may wait."""
    import redis

    with redis_of(bench) as server:

        def spell() -> Callable[[], None]:
            client = redis.Redis(port=server.port)
            client.client_pause(350)
            begin = time.monotonic()

            def end() -> None:
                time.sleep(max(0.0, 0.4 - (time.monotonic() - begin)))
                client.close()

            return end

        return outages_of(bench, count, server.url, spell)


def s3_faults(bench: Bench, count: int, fault: str) -> Told:
    """Every request meets the fault for a while."""
    with s3_of(bench) as s3:

        def spell() -> Callable[[], None]:
            s3.released.clear()
            s3.fault = fault

            def end() -> None:
                s3.fault = ""
                s3.released.set()

            return end

        told = outages_of(bench, count, f"s3://{BUCKET}/outages", spell)
    return told | {"requests_to_s3_that_met_it": s3.num_faults}


# Memory


def host_allocation(bench: Bench, count: int) -> Told:
    """The host tier can't be had at start, which is said; copies for storage can't, later."""
    num_refused = num_failed = turn = 0
    num_starts, num_copies = -(-count // 2), max(1, count // 2)
    for _ in range(num_starts):
        with (
            mock.patch.object(np, "zeros", side_effect=MemoryError),
            mock.patch.object(torch, "zeros", side_effect=MemoryError),
        ):
            try:
                bench.engine(num_host_pages=50)
            except ConfigError as error:
                num_refused += "lower --k" in str(error)
    real = storage_link.pack

    def pack(key: bytes, unit: bytes) -> bytes:
        nonlocal num_failed
        if bench.rng.random() < 0.5:
            num_failed += 1
            raise MemoryError
        return real(key, unit)

    with (
        mock.patch.object(storage_link, "pack", pack),
        bench.on_files(bench.folder / "memory") as llm,
    ):
        while num_failed < num_copies:
            for path in files_of(bench.folder / "memory"):
                path.unlink()
            bench.check(llm, turn % NUM_PROMPTS)
            rest(llm)
            turn += 1
    assert num_refused == num_starts, f"{num_refused} starts were refused"
    return {"faults": num_refused + num_failed, "starts_refused": num_refused, "requests": turn}


# Ends at bad moments


def aborts(bench: Bench, count: int) -> Told:
    """Requests that end while their pages are on their way from storage, or to it."""
    number = num_aborted = 0
    real = Files.get

    def get(self: Files, keys: Any, num_bytes: int) -> Any:
        time.sleep(0.003)
        return real(self, keys, num_bytes)

    folder = bench.folder / "aborts"
    with mock.patch.object(Files, "get", get), bench.on_files(folder) as llm:
        for index in range(NUM_PROMPTS):
            bench.check(llm, index)
        loop: Any = llm._loop
        while num_aborted < count:
            ids = []
            for _ in range(3):
                number += 1
                ids.append(RequestId(10**6 + number))
                prompt = bench.prompts[bench.rng.randrange(NUM_PROMPTS)]
                loop.handle(Submit(ids[-1], prompt, None, GREEDY, 0, (), None))
            for _ in range(bench.rng.randrange(4)):
                loop.step()
            num_aborted += loop._scheduler._cache.has_transfers
            loop.handle(Abort(ids))
            while loop.has_work:
                loop.step()
            check_order(llm)
            bench.check(llm, number % NUM_PROMPTS)
    return {"faults": num_aborted, "requests": number}


def kills(bench: Bench, count: int) -> Told:
    """Servers that are killed while they write, each started on what the last one left."""
    folder = bench.folder / "kills"
    limit = 60 * 8192
    num_whole = 0
    for turn in range(count):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                serve_until_killed(bench, folder, turn)
            os._exit(3)
        if bench.ranks == 1 or turn % 2 == 0:
            wait_for_ranks(bench, child)
            time.sleep(bench.rng.uniform(0.05, 0.7))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"the server ended by itself, with {status}"
        else:
            rank = wait_for_ranks(bench, child)
            time.sleep(bench.rng.uniform(0.05, 0.7))
            os.kill(rank, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 3, "the first rank went on alone"
        if turn % 50 == 49 or turn == count - 1:
            num_whole += check_folder(bench, folder, limit)
    return {"faults": count, "restarts_checked": -(-count // 50), "tokens_from_storage": num_whole}


def wait_for_ranks(bench: Bench, child: int) -> int:
    """Until all ranks of a server compute; gives the process of the second. With one rank, nothing
    is waited for: a start may be killed, too."""
    if bench.ranks == 1:
        return child
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        started = bench.folder / f"started-{child}"
        if started.exists():
            return int(started.read_text())
        time.sleep(0.01)
    raise AssertionError("a server did not start")


def serve_until_killed(bench: Bench, folder: Path, turn: int) -> None:
    with bench.on_files(folder, kv_storage_size=60 * 8192 / 2**30) as llm:
        if bench.ranks > 1:
            note_start(bench, llm)
        while True:
            for index in range(NUM_PROMPTS):
                bench.check(llm, index)
            for path in files_of(folder)[turn % 3 :: 3]:
                path.unlink(missing_ok=True)


def note_start(bench: Bench, llm: LLM) -> None:
    ranks: Any = llm._loop._runner._ranks  # type: ignore[attr-defined]
    aside = bench.folder / f"starting-{os.getpid()}"
    aside.write_text(str(ranks.pids[0]))
    aside.rename(bench.folder / f"started-{os.getpid()}")


def check_folder(bench: Bench, folder: Path, limit: int) -> int:
    """In a process of its own, so that no engine's threads are there when the next is forked."""
    told = bench.folder / "found"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            told.write_text(str(look_at(bench, folder, limit)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, "what killed servers left is not in order"
    return int(told.read_text())


def look_at(bench: Bench, folder: Path, limit: int) -> int:
    """What a new server finds: right tokens, and no more bytes than allowed."""
    with bench.on_files(folder, kv_storage_size=limit / 2**30) as llm:
        for index in range(NUM_PROMPTS):
            bench.check(llm, index)
        found = llm.stats().total_storage_hit_tokens
    sizes = [-(-path.stat().st_size // 4096) * 4096 for path in files_of(folder)]
    assert sum(sizes) <= limit, "the folder is larger than allowed"
    assert not list((folder / "v1" / "aside").iterdir()), "what died with its writer is still there"
    return found


KINDS: dict[str, Callable[[Bench, int], Told]] = {
    "kills": kills,  # first: it forks, and no engine's threads may be there
    "flipped bits": flipped_bits,
    "truncated values": truncated_values,
    "foreign values": foreign_values,
    "deleted files": deleted_values,
    "full disk": full_disk,
    "read-only folder": read_only_folder,
    "redis killed": redis_killed,
    "redis hung": redis_hung,
    "redis slow": redis_slow,
    "s3 flipped bits": partial(flipped_bits, where=in_a_bucket),
    "s3 truncated values": partial(truncated_values, where=in_a_bucket),
    "s3 foreign values": partial(foreign_values, where=in_a_bucket),
    "s3 deleted values": partial(deleted_values, where=in_a_bucket),
    "s3 truncated answers": partial(s3_faults, fault="truncated"),
    "s3 errors": partial(s3_faults, fault="status500"),
    "s3 slow": partial(s3_faults, fault="slow"),
    "s3 killed": partial(s3_faults, fault="hangup"),
    "host allocation": host_allocation,
    "aborts": aborts,
}


def run(kinds: list[str], count: int, seed: int, folder: Path, ranks: int) -> dict[str, Told]:
    told: dict[str, Told] = {}
    bench = Bench(folder, seed, ranks)
    with worth_loading():
        for kind in kinds:
            begin = time.monotonic()
            told[kind] = KINDS[kind](bench, count)
            told[kind]["seconds"] = round(time.monotonic() - begin, 1)
            print(json.dumps({kind: told[kind]}), flush=True)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kind", action="append", choices=tuple(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        kinds = arguments.kind or list(KINDS)
        told = run(kinds, arguments.count, arguments.seed, Path(folder), arguments.ranks)
    return int(any(each["faults"] < arguments.count for each in told.values()))


if __name__ == "__main__":
    sys.exit(main())
