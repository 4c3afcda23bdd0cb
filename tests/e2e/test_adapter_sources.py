"""Adapters on demand from a real S3 server, through a real server of ours (A04)."""

from __future__ import annotations

import concurrent.futures
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.e2e.adapter_server import AdapterServer, serving, tokens
from tests.e2e.conftest import HEADERS
from tests.helpers.patience import PATIENCE_S
from tests.helpers.s3_server import BUCKET, FaultyS3, faulty_s3
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
PREFIX = f"s3://{BUCKET}/public"
NUM_ADAPTERS = 60
"""Many more than host memory has room for."""
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    with faulty_s3() as found:
        yield found


@pytest.fixture(scope="module")
def server(tiny: TinyAdapters, s3: FaultyS3) -> Iterator[AdapterServer]:
    cache = tiny.model.parent / "cache"
    with serving(
        tiny, env=s3.env, **{
            "max-loras": 4, "max-cpu-loras": 8, "lora-source": PREFIX, "lora-cache-dir": str(cache),
            "lora-max-fetch-size": "0.001", "lora-fetch-timeout-s": "30",
        },
    ) as server:  # fmt: skip
        yield server


def test_a04_many_adapters_come_on_demand_and_each_gives_its_own_answer(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters
) -> None:
    names = [f"team/a{number}" for number in range(NUM_ADAPTERS)]
    for number, name in enumerate(names):
        recipe = replace(RECIPES["few"], seed=1000 + number)
        s3.put(f"public/{name}", tiny.write(f"on-demand-{number}", recipe))
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda name: server.complete(name, PROMPT), names))
    found = [tokens(answer) for answer in answers]
    for number in range(0, NUM_ADAPTERS, 12):
        assert found[number] == tiny.greedy(PROMPT, f"on-demand-{number}", 8)
    assert len({tuple(item) for item in found}) > NUM_ADAPTERS // 2, "adapters that differ"
    assert set(names) <= set(server.names())
    # Each object was asked for a bounded number of times: looked at, read, looked at again.
    assert max(s3.asked.values()) <= 4
    assert s3.most_at_once > 4, "adapters are fetched side by side"
    server.assert_balance()


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("nobody", 404, "does not exist"),
        ("status500", 503, "could not be fetched after 3 tries: status 500"),
        ("truncated", 503, "it ended after"),
        ("changing", 400, "changed while it was fetched"),
        ("redirected", 400, "outside its --lora-source, which is not followed"),
        ("large", 400, "Raise --lora-max-fetch-size"),
        ("broken", 400, "adapter 'broken' can't be used"),
    ],
)
def test_a04_what_a_source_gets_wrong_fails_that_request_alone(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters, name: str, status: int, reason: str
) -> None:
    recipe = RECIPES["few"]
    if name == "large":
        recipe = replace(recipe, rank=512)
    s3.put(f"public/{name}", tiny.write(f"faulty-{name}", recipe))
    s3.put("public/good", tiny.write("good", replace(RECIPES["few"], seed=5)))
    if name == "nobody":
        s3.client.delete_object(Bucket=BUCKET, Key=f"public/{name}/{WEIGHTS}")
    if name == "broken":
        s3.client.put_object(Bucket=BUCKET, Key=f"public/{name}/{WEIGHTS}", Body=b"x" * 300)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        bad = threads.submit(server.complete, name, PROMPT)
        good = threads.submit(server.complete, "good", PROMPT)
        assert tokens(good.result()) == tiny.greedy(PROMPT, "good", 8)
        refused = bad.result()
    assert refused.status_code == status, refused.text
    assert reason in refused.json()["error"]["message"]
    assert name not in server.names()
    assert not s3.outside, "a redirect was followed"
    server.assert_balance()


def test_a04_a_server_error_that_passes_is_tried_again(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters
) -> None:
    s3.put("public/flaky", tiny.write("flaky", replace(RECIPES["few"], seed=6)))
    assert tokens(server.complete("flaky", PROMPT)) == tiny.greedy(PROMPT, "flaky", 8)


def test_a04_a_changed_object_is_served_after_a_load_in_place(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters
) -> None:
    s3.put("public/moving", tiny.write("moving-1", replace(RECIPES["few"], seed=7)))
    assert tokens(server.complete("moving", PROMPT)) == tiny.greedy(PROMPT, "moving-1", 8)
    s3.put("public/moving", tiny.write("moving-2", replace(RECIPES["few"], seed=8)))
    assert tokens(server.complete("moving", PROMPT)) == tiny.greedy(PROMPT, "moving-1", 8)
    loaded = server.load("moving", f"{PREFIX}/moving", load_inplace=True)
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["lora_path"] == f"{PREFIX}/moving"
    assert tokens(server.complete("moving", PROMPT)) == tiny.greedy(PROMPT, "moving-2", 8)


def test_a04_only_addresses_below_the_prefix_are_loaded(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters
) -> None:
    s3.put("private/one", tiny.write("private", RECIPES["few"]))
    s3.put("public-not/one", tiny.write("private", RECIPES["few"]))
    before = s3.asked.total()
    for path in (
        f"s3://{BUCKET}/private/one", f"{PREFIX}-not/one", f"{PREFIX}/../private/one",
        f"{PREFIX}/%2e%2e/private/one", "s3://other/public/one", "https://127.0.0.1/public/one",
    ):  # fmt: skip
        refused = server.load("x", path)
        assert refused.status_code == 400, refused.text
    assert s3.asked.total() == before, "nothing was asked of the store"


def test_a04_a_poisoned_object_is_refused_by_its_hash(
    server: AdapterServer, s3: FaultyS3, tiny: TinyAdapters
) -> None:
    folder = tiny.write("pinned", replace(RECIPES["few"], seed=9))
    right = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    s3.put("public/pinned", tiny.write("poison", replace(RECIPES["few"], seed=10)))
    refused = server.load("pinned", f"{PREFIX}/pinned#sha256={right}")
    assert refused.status_code == 400
    assert f"{right} was asked for" in refused.json()["error"]["message"]
    s3.put("public/pinned", folder)
    loaded = server.load("pinned", f"{PREFIX}/pinned#sha256={right}")
    assert loaded.status_code == 200, loaded.text


def test_a04_a_cached_copy_is_checked_and_bounded(tmp_path: Path, tiny: TinyAdapters) -> None:
    """A damaged file of the disk cache is fetched again; the cache stays within its size; a slow
    answer is given up in time."""
    size = sum(file.stat().st_size for file in Path(tiny.path("few")).iterdir())
    with (
        faulty_s3() as s3,
        serving(
            tiny, env=s3.env, **{
                "lora-source": PREFIX, "lora-cache-dir": str(tmp_path),
                "lora-cache-size": f"{3.5 * size / 2**30:.9f}",
                "lora-fetch-timeout-s": "8",
            },
        ) as server,
    ):  # fmt: skip
        s3.put("public/slow", Path(tiny.path("few")))
        threads = concurrent.futures.ThreadPoolExecutor(1)
        slow = threads.submit(server.complete, "slow", PROMPT)
        for number in range(8):
            recipe = replace(RECIPES["few"], seed=20 + number)
            s3.put(f"public/c{number}", tiny.write(f"cached-{number}", recipe))
        for number in [*range(8), 0]:  # the first has left host memory and the disk by then
            answer = server.complete(f"c{number}", PROMPT)
            assert tokens(answer) == tiny.greedy(PROMPT, f"cached-{number}", 8)
            kept = [file.stat().st_size for file in tmp_path.rglob("adapter_*")]
            assert sum(kept) <= 3.5 * size
        for file in tmp_path.rglob(WEIGHTS):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(bytes(data))
        # Meanwhile a slow answer has kept its own request waiting, and none of the others.
        refused = slow.result()
        assert refused.status_code == 503
        assert "--lora-fetch-timeout-s" in refused.json()["error"]["message"]
        threads.shutdown()
        assert server.unload("c0").status_code == 200
        assert tokens(server.complete("c0", PROMPT)) == tiny.greedy(PROMPT, "cached-0", 8)
        server.assert_balance()


def test_a04_names_below_a_folder_are_found(tmp_path: Path, tiny: TinyAdapters) -> None:
    """A folder is a source as any other; links that lead out of it are not followed."""
    shelf = tmp_path / "shelf"
    shutil.copytree(tiny.path("few"), shelf / "team" / "few")
    (shelf / "sly").symlink_to(tiny.path("other"))
    with serving(tiny, **{"lora-source": str(shelf)}) as server:
        assert tokens(server.complete("team/few", PROMPT)) == tiny.greedy(PROMPT, "few", 8)
        assert server.complete("team/none", PROMPT).status_code == 404
        refused = server.complete("sly", PROMPT)
        assert refused.status_code == 400
        metrics = httpx.get(f"{server.server.url}/metrics", headers=HEADERS, timeout=PATIENCE_S)
        assert "team/none" not in metrics.text
