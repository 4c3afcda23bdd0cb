"""Backends: what is put is got, within the limit, whatever other processes do."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from manyroots.config import TierSettings
from manyroots.errors import ConfigError
from manyroots.store.backends.backend import Backend
from manyroots.store.backends.files import Files
from manyroots.store.backends.registry import open_backend
from tests.helpers.patience import PATIENCE_S
from tests.unit.store.tiers import RedisServer, server_program

SIZE = 5000
ROOM = 8192
"""What a file of that size takes."""
needs_redis = pytest.mark.skipif(
    not server_program(),
    reason="no redis-server on this machine: install Debian's redis-server or valkey-server",
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def used(folder: Path) -> int:
    sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.name != "used"]
    return sum(-(-size // 4096) * 4096 for size in sizes)


def check_backend(backend: Backend) -> None:
    """Batches of every kind."""
    assert backend.get([key(1), key(2)], SIZE) == [None, None]
    assert backend.put([(key(i), value(i)) for i in range(5)]) == [True] * 5
    assert backend.get([key(3), key(9), key(0)], SIZE) == [value(3), None, value(0)]
    assert backend.exists([key(8), key(4)]) == [False, True]
    backend.put([(key(4), b"other")])
    backend.remove([key(3), key(77)])
    assert backend.get([key(3), key(4)], SIZE) == [None, b"other"]


def test_t02_files_keep_what_they_are_given(tmp_path: Path) -> None:
    """T02: and another server on the folder finds it."""
    check_backend(Files(tmp_path, None))
    assert Files(tmp_path, None).get([key(0), key(4)], SIZE) == [value(0), b"other"]


def test_t12_the_folder_stays_within_its_limit_and_loses_what_was_used_longest_ago(
    tmp_path: Path,
) -> None:
    """T12: over a restart, too."""
    files = Files(tmp_path, 10 * ROOM)
    for number in range(10):
        files.put([(key(number), value(number))])
    for number in range(10):
        os.utime(files._path(key(number)), (number, number))
    assert files.get([key(0)], SIZE) == [value(0)]  # used just now
    files = Files(tmp_path, 10 * ROOM)
    files.put([(key(10), value(10))])
    assert used(tmp_path) <= 10 * ROOM
    assert files.exists([key(0), key(1), key(9), key(10)]) == [True, False, True, True]
    assert Files(tmp_path, 3 * ROOM).exists([key(10)]) == [True]
    assert used(tmp_path) <= 3 * ROOM, "a smaller limit holds from the start on"
    assert Files(tmp_path, 4096).put([(key(11), value(11))]) == [False]


def test_t12_several_servers_on_one_folder_keep_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T12: three processes write at once; at no moment is there more than the limit."""
    code = (
        "import sys; from pathlib import Path; from manyroots.store.backends import files\n"
        f"files._LOCK_WAIT_S = {PATIENCE_S}\n"
        "files, name = files.Files(Path(sys.argv[1]), 20 * 8192), int(sys.argv[2])\n"
        "for i in range(60): files.put([((name * 1000 + i).to_bytes(32, 'big'), b'x' * 5000)])\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(name)])
        for name in (1, 2, 3)
    ]
    monkeypatch.setattr("manyroots.store.backends.files._LOCK_WAIT_S", PATIENCE_S)
    most, watcher = 0, Files(tmp_path, 20 * ROOM)
    while any(writer.poll() is None for writer in writers):
        with watcher._locked():  # counting takes time: no process writes meanwhile
            most = max(most, used(tmp_path))
        time.sleep(0.005)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert most <= 20 * ROOM
    assert 15 * ROOM <= used(tmp_path) <= 20 * ROOM


def test_t12_a_wrong_count_is_made_good_at_the_next_start(tmp_path: Path) -> None:
    """T12: and what died with its writer is gone."""
    files = Files(tmp_path, 4 * ROOM)
    files.put([(key(i), value(i)) for i in range(3)])
    (tmp_path / "v1" / "aside" / "99-dead").write_bytes(b"half")
    (tmp_path / "v1" / "used").write_bytes(b"\xff" * 8)
    files = Files(tmp_path, 4 * ROOM)
    assert list((tmp_path / "v1" / "aside").iterdir()) == []
    assert files.put([(key(3), value(3))]) == [True]
    assert files.exists([key(i) for i in range(4)]) == [True] * 4


def test_t13_what_is_kept_goes_after_all_others_until_its_time_is_over(tmp_path: Path) -> None:
    """T13: over a restart, too; use does not shorten it, and 0 ends it."""
    files = Files(tmp_path, 4 * ROOM)
    files.put([(key(i), value(i)) for i in range(4)])
    files.keep([key(0), key(1), key(99)], 3600.0)
    files.keep([key(1)], 0)
    files.keep([key(0)], 60.0)  # another server asks for less
    assert files.get([key(0)], SIZE) == [value(0)]
    assert files.exists([key(0)]) == [True]
    left = files._path(key(0)).stat().st_mtime - time.time()
    assert 3500 < left <= 3600
    os.utime(files._path(key(1)), (1, 1))
    files = Files(tmp_path, 4 * ROOM)
    files.put([(key(i), value(i)) for i in range(4, 12)])
    assert files.exists([key(0), key(1)]) == [True, False]
    os.utime(files._path(key(0)), (1, 1))  # its time is long over
    files.put([(key(i), value(i)) for i in range(12, 20)])
    assert files.exists([key(0)]) == [False]


@pytest.mark.parametrize("gone", ["", "v1", "v1/aside", "v1/used", "v1/00"])
def test_t12_a_folder_that_somebody_empties_is_written_to_again(tmp_path: Path, gone: str) -> None:
    """T12: all of it, or what a cleaner of old files takes; the limit holds as before."""
    folder = tmp_path / "kv"
    files = Files(folder, 4 * ROOM)
    files.put([(key(i), value(i)) for i in range(3)])
    lost = folder / gone
    lost.unlink() if lost.is_file() else shutil.rmtree(lost)
    assert files.put([(key(3), value(3))]) == [True]
    assert files.get([key(3)], SIZE) == [value(3)]
    assert files.put([(key(i), value(i)) for i in range(4, 12)]) == [True] * 8
    assert used(folder) <= 4 * ROOM
    files.remove([key(11)])
    assert files.exists([key(11)]) == [False]


def test_t12_a_lock_on_a_file_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    """T12: a process that waits for it takes the lock file that all other processes see."""
    one, other = Files(tmp_path, None), Files(tmp_path, None)
    opened, real = [], Files._open_used
    with contextlib.ExitStack() as held:
        held.enter_context(one._locked())

        def open_used(files: Files) -> BinaryIO:
            opened.append(real(files))
            if len(opened) == 1:  # it waits; the folder is emptied, and the lock given back
                shutil.rmtree(tmp_path / "v1")
                held.close()
            return opened[-1]

        with mock.patch.object(Files, "_open_used", open_used), other._locked():
            assert os.path.samestat(os.fstat(opened[-1].fileno()), other._used.stat())
    assert len(opened) == 2


def test_t02_a_file_that_only_its_owner_may_read_is_missing(tmp_path: Path) -> None:
    """T02: of a server that runs as another user; the rest of a batch is read."""
    files = Files(tmp_path, None)
    files.put([(key(i), value(i)) for i in range(2)])
    real = os.open

    def denied(path: Path, *rest: int) -> int:
        if path == files._path(key(0)):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    with mock.patch.object(os, "open", denied):
        assert files.get([key(0), key(1)], SIZE) == [None, value(1)]


def test_t12_what_is_no_file_is_not_counted(tmp_path: Path) -> None:
    """T12: and does not keep others from being removed."""
    files = Files(tmp_path, 3 * ROOM)
    (tmp_path / "v1" / "00" / "not-ours").mkdir(parents=True)
    assert files.put([(key(i), value(i)) for i in range(6)]) == [True] * 6
    assert files.exists([key(5)]) == [True]


def test_t12_a_file_that_goes_while_all_are_counted_hides_no_other(tmp_path: Path) -> None:
    """T12: servers that share a folder remove what each of them likes."""
    Files(tmp_path, 8 * ROOM).put([(key(i), value(i)) for i in range(6)])
    real = os.scandir

    def one_goes(folder: Any) -> list[Any]:
        entries = sorted(real(folder), key=lambda entry: entry.name)
        if Path(folder).name == "00":
            Path(entries[2].path).unlink()
        return entries

    with mock.patch.object(os, "scandir", one_goes):
        files = Files(tmp_path, 8 * ROOM)
    assert int.from_bytes((tmp_path / "v1" / "used").read_bytes(), "little") == 5 * ROOM
    assert files.exists([key(i) for i in range(6)]) == [True, True, False, True, True, True]


@needs_redis
def test_t02_redis_keeps_what_it_is_given(tmp_path: Path) -> None:
    """T02: with a password, and for as long as was said."""
    server = RedisServer(tmp_path, "--requirepass", "secret")
    try:
        url = server.url.replace("redis://", "redis://:secret@")
        backend = open_backend(TierSettings(kv_storage=url, kv_storage_ttl_s=30))
        assert backend is not None
        check_backend(backend)
        wrong = open_backend(TierSettings(kv_storage=server.url))
        assert wrong is not None
        with pytest.raises(Exception, match="authenticate"):
            wrong.get([key(0)], SIZE)
        backend.close()
    finally:
        server.stop()


@needs_redis
def test_t02_a_value_in_redis_goes_so_long_after_its_last_use(tmp_path: Path) -> None:
    """T02, T13: what is written has its time to live; to be read or asked for begins it anew. What
    is kept for longer has that time."""
    import redis

    server = RedisServer(tmp_path)
    try:
        backend = open_backend(TierSettings(kv_storage=server.url, kv_storage_ttl_s=300))
        endless = open_backend(TierSettings(kv_storage=server.url))
        assert backend is not None
        assert endless is not None
        with redis.Redis(port=server.port) as admin:

            def times() -> list[int]:
                """What each value has left, in seconds, by key; -1 is for ever."""
                return [admin.ttl(name) for name in sorted(admin.keys())]

            backend.put([(key(i), value(i)) for i in range(3)])
            assert len(times()) == 3
            assert all(290 <= left <= 300 for left in times())
            for number in range(3):
                admin.expire(b"manyroots:1:" + key(number), 50)
            backend.get([key(0)], SIZE)
            backend.exists([key(1)])
            assert [left > 50 for left in times()] == [True, True, False]
            backend.keep([key(1), key(77)], 3600.0)
            backend.keep([key(1)], 60.0)  # another server asks for less
            backend.get([key(1)], SIZE)
            backend.exists([key(1)])
            assert 3500 < times()[1] <= 3600
            backend.keep([key(1)], 0)
            assert 290 <= times()[1] <= 300
            endless.put([(key(9), value(9))])
            assert times()[-1] == -1
        backend.close()
        endless.close()
    finally:
        server.stop()


@needs_redis
def test_t03_t12_a_redis_that_refuses_a_part_says_which(tmp_path: Path) -> None:
    """T03, T12: of one batch, one value may be written and others may not."""
    import redis

    server = RedisServer(tmp_path)
    try:
        backend = open_backend(TierSettings(kv_storage=server.url))
        assert backend is not None
        with redis.Redis(port=server.port) as admin:
            admin.acl_setuser(
                "default", enabled=True, nopass=True, keys=["*\x01"], commands=["+@all"], reset=True
            )
        assert backend.put([(key(i), value(10 + i)) for i in range(3)]) == [False, True, False]
        assert backend.get([key(1)], SIZE) == [value(11)]
        backend.close()
    finally:
        server.stop()


@needs_redis
def test_t02_a_full_redis_says_so_without_what_it_was_given(tmp_path: Path) -> None:
    """T02: keys and values are the prompts of users in another form, and have no place in a log."""
    import redis

    server = RedisServer(tmp_path)
    try:
        with redis.Redis(port=server.port) as admin:
            backend = open_backend(TierSettings(kv_storage=server.url))
            assert backend is not None
            admin.config_set("maxmemory", 1)
            with pytest.raises(Exception, match="maxmemory") as caught:
                backend.put([(key(i), b"secret" * 200) for i in range(3)])
            assert "secret" not in str(caught.value)
            assert "manyroots:1:" not in str(caught.value)
            admin.config_set("maxmemory", 0)
            assert backend.put([(key(1), value(1))]) == [True]
            backend.close()
    finally:
        server.stop()


@needs_redis
def test_t02_a_redis_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    """T02: a replica, which refuses to move the end of a value's time."""
    import redis

    server = RedisServer(tmp_path)
    try:
        backend = open_backend(TierSettings(kv_storage=server.url, kv_storage_ttl_s=30))
        assert backend is not None
        backend.put([(key(1), value(1))])
        with redis.Redis(port=server.port) as admin:
            admin.acl_setuser(
                "default", enabled=True, nopass=True, keys="*", reset=True,
                commands=["+@all", "-expire", "-set"],
            )  # fmt: skip
        assert backend.get([key(1), key(2)], SIZE) == [value(1), None]
        with pytest.raises(Exception, match="no permissions"):
            backend.put([(key(2), value(2))])
        backend.close()
    finally:
        server.stop()


@needs_redis
def test_t02_redis_over_tls_with_a_password(tmp_path: Path) -> None:
    """T02: the server's certificate is checked, and so is the password, from the environment."""
    certificate, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(secret), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ("--tls-cert-file", str(certificate), "--tls-key-file", str(secret),
           "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no")  # fmt: skip
    server = RedisServer(tmp_path, "--requirepass", "secret", *tls, is_tls=True)

    def open_at(url: str, password: str) -> Backend:
        with mock.patch.dict("os.environ", MANYROOTS_KV_STORAGE_PASSWORD=password):
            backend = open_backend(TierSettings(kv_storage=url))
        assert backend is not None
        return backend

    try:
        trusted = f"{server.url}?ssl_ca_certs={certificate}"
        check_backend(open_at(trusted, "secret"))
        with pytest.raises(Exception, match="invalid username-password pair"):
            open_at(trusted, "wrong").get([key(0)], SIZE)
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            open_at(server.url, "secret").get([key(0)], SIZE)
        plain = server.url.replace("rediss://", "redis://:secret@")
        with pytest.raises(Exception, match=r"(?i)connection"):
            open_at(plain, "secret").get([key(0)], SIZE)
    finally:
        server.stop()


def test_a_folder_that_can_not_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-storage names /proc/nothing"):
        Files(Path("/proc/nothing"), None)
