"""Pages in a bucket, on a real S3 server on loopback: what is put is got, and faults are told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from manyroots.config import TierSettings
from manyroots.errors import ConfigError
from manyroots.store.backends.backend import Backend
from manyroots.store.backends.registry import open_backend
from manyroots.store.conformance import check_backend, check_dead
from tests.helpers.patience import PATIENCE_S
from tests.helpers.s3_server import BUCKET, FaultyS3, faulty_s3
from tests.unit.store.tiers import free_port

KEYS = [bytes([number]) * 32 for number in range(5)]
VALUES = [bytes([number]) * 500 for number in range(5)]


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    with faulty_s3() as found, mock.patch.dict(os.environ, found.env):
        yield found


@pytest.fixture(autouse=True)
def _no_fault(s3: FaultyS3) -> Iterator[None]:
    yield
    s3.fault = ""
    s3.released.set()
    s3.released.clear()


def bucket(folder: str = "kv", name: str = BUCKET, timeout_s: float = PATIENCE_S) -> Backend:
    settings = TierSettings(kv_storage=f"s3://{name}/{folder}", kv_storage_timeout_s=timeout_s)
    backend = open_backend(settings)
    assert backend is not None
    return backend


def test_t14_a_bucket_passes_the_check(s3: FaultyS3) -> None:
    """T14, T02: as plug-ins do; nothing is left there."""
    failed = [each for each in check_backend(bucket) if each.fault is not None]
    assert failed == []
    assert s3.client.list_objects_v2(Bucket=BUCKET, Prefix="kv/")["KeyCount"] == 0


def test_t14_a_bucket_at_a_dead_address_raises_in_time(s3: FaultyS3) -> None:
    """T14: nothing listens there."""
    dead = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    with mock.patch.dict(os.environ, dead):
        results = check_dead(lambda: bucket(timeout_s=5.0), 5.0)
    assert [each for each in results if each.fault is not None] == []


def test_t03_a_folder_of_a_bucket_has_only_its_own_values(s3: FaultyS3) -> None:
    """T03: servers of two folders do not meet; none is the bucket itself."""
    one, whole = bucket("a/b"), bucket("")
    one.put([(KEYS[0], VALUES[0])])
    assert whole.exists(KEYS[:1]) == [False]
    assert whole.put([(KEYS[0], VALUES[1])]) == [True]
    assert one.get(KEYS[:1], 500) == [VALUES[0]]


@pytest.mark.parametrize("fault", ["status500", "hangup", "truncated"])
def test_t03_a_bucket_that_fails_says_why_and_no_keys(s3: FaultyS3, fault: str) -> None:
    """T03: errors are logged; a key is a prompt in another form. What comes after works."""
    backend = bucket("broken")
    backend.put(list(zip(KEYS, VALUES, strict=True)))
    s3.fault = fault
    with pytest.raises(OSError, match=r"HTTP|status code: 500|error") as caught:
        backend.get(KEYS, 500)
    assert KEYS[0].hex()[2:] not in str(caught.value)
    assert "\n" not in str(caught.value)
    s3.fault = ""
    assert backend.get(KEYS, 500) == VALUES


def test_t03_a_bucket_that_is_slow_is_given_up_in_time(s3: FaultyS3) -> None:
    """T03: and is used again when it answers."""
    backend = bucket("late", timeout_s=0.2)
    s3.fault = "slow"
    begin = time.monotonic()
    with pytest.raises((TimeoutError, OSError)):
        backend.get(KEYS, 500)
    assert time.monotonic() - begin < PATIENCE_S / 2
    s3.fault = ""
    s3.released.set()
    assert bucket("late").put([(KEYS[0], VALUES[0])]) == [True]


def test_t03_single_failures_lose_single_values(s3: FaultyS3) -> None:
    """T03: a busy service refuses single requests, which are those that come first here."""
    backend = bucket("flaky")
    items = list(zip(KEYS, VALUES, strict=True))
    for key, value in items:  # by the server's own door: it has met none of these paths
        path = f"flaky/manyroots-1/{key.hex()[:2]}/{key.hex()[2:]}"
        s3.client.put_object(Bucket=BUCKET, Key=path, Body=value)
    with pytest.raises(OSError, match="500"):
        backend.get(KEYS[:2], 500)
    assert backend.get(KEYS[:3], 500) == [*VALUES[:2], None]
    assert backend.get(KEYS[:4], 500) == [*VALUES[:3], None]


def test_t02_a_bucket_that_is_not_there_keeps_nothing_and_says_so(s3: FaultyS3) -> None:
    """T02."""
    backend = bucket(name="nowhere")
    assert backend.get(KEYS[:1], 500) == [None]
    with pytest.raises(OSError, match="404"):
        backend.put([(KEYS[0], VALUES[0])])


@pytest.mark.parametrize(
    ("url", "settings", "message"),
    [
        ("s3:///folder", {}, "write s3://bucket/folder"),
        ("s3://bucket/x?endpoint=y", {}, "AWS_ENDPOINT_URL"),
        ("s3://bucket", {"kv_storage_size": 1.0}, "--kv-storage-size is not for s3://"),
        ("s3://bucket", {"kv_storage_ttl_s": 9}, "--kv-storage-ttl-s is not for s3://"),
    ],
)
def test_t14_a_bucket_that_can_not_be_opened_is_refused(
    url: str, settings: dict[str, float], message: str
) -> None:
    """T14: with a remedy."""
    with pytest.raises(ConfigError, match=message):
        open_backend(TierSettings(kv_storage=url, **settings))  # type: ignore[arg-type]
