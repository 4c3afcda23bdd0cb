"""Limits of keys on a clock that the test moves, and keys files that can't be used (A06)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from manyroots.api.tenants import KeySpec, Tenant, load_tenants
from manyroots.errors import ConfigError, OverloadedError, RequestError
from manyroots.observe.requests import RequestFacts
from manyroots.observe.usage import UsageCounts

CAPACITY = 1000


def test_a06_tokens_per_minute_refill_and_unused_ones_come_back() -> None:
    now = [0.0]
    tenant = Tenant(KeySpec(name="a", key="k", tokens_per_minute=600), lambda: now[0])
    tenant.reserve(400, CAPACITY)
    with pytest.raises(OverloadedError, match="200 of 600 per minute are left") as refused:
        tenant.reserve(300, CAPACITY)
    assert refused.value.retry_after_s == 10
    now[0] += 10
    tenant.reserve(300, CAPACITY)
    tenant.give_back(400, 50)
    tenant.reserve(350, CAPACITY)
    with pytest.raises(RequestError, match="tokens_per_minute allows 600"):
        tenant.reserve(601, CAPACITY)
    assert tenant.refused == {"tokens": 1}


def test_a06_memory_and_running_requests_are_shares_that_come_back() -> None:
    tenant = Tenant(KeySpec(name="a", key="k", memory_share=0.1, max_running=2))
    lease = tenant.begin(2)
    with pytest.raises(OverloadedError, match="2 are allowed"):
        tenant.begin(1)
    tenant.reserve(80, CAPACITY)
    with pytest.raises(OverloadedError, match="100 are its share"):
        tenant.reserve(30, CAPACITY)
    tenant.give_back(80, 80)
    tenant.reserve(30, CAPACITY)
    lease.release()
    lease.release()
    assert tenant.num_running == 0


def test_a06_a_key_may_be_given_by_its_hash(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"secret").hexdigest()
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "sha256": hashed, "adapters": ["x/*"]}]}))
    tenants = load_tenants(str(file))
    found = tenants.find(b"secret")
    assert found is not None
    assert (found.may_use("x/y"), found.may_use("x"), found.may_use("xy")) == (True, False, False)
    assert tenants.find(b"other") is None
    assert tenants.find(None) is None


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([], "has 0 keys"),
        ([{"name": "a"}], "give key, or sha256"),
        ([{"name": "a", "key": ""}], "give key, or sha256"),
        ([{"name": "a", "sha256": "abc"}], "64 hexadecimal digits"),
        ([{"name": "a", "key": "x"}, {"name": "a", "key": "y"}], "another of this name"),
        ([{"name": "a", "key": "x"}, {"name": "b", "key": "x"}], "the same key"),
        ([{"name": "a", "key": "x", "adapters": ["*a"]}], "end with one"),
        ([{"name": "a", "key": "x", "max_running": 0}], "at least 1"),
        ([{"name": "a", "key": "x", "memory_share": 2}], "at most 1"),
        ([{"name": "a", "key": "x", "quota": 1}], "unknown field"),
    ],
)
def test_a06_a_keys_file_that_can_not_work_is_refused(
    tmp_path: Path, keys: list[dict[str, Any]], reason: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    with pytest.raises(ConfigError, match=reason):
        load_tenants(str(file))


def test_a06_labels_of_usage_are_bounded() -> None:
    registry = CollectorRegistry()
    counts = UsageCounts(registry, max_pairs=3)
    for number in range(10):
        facts = RequestFacts("id", "m", 1, [], tenant=f"key{number}")
        facts.num_output_tokens = 5
        counts.take(facts)
    text = generate_latest(registry).decode()
    assert 'adapter="(other)",key="key9"' in text
    assert text.count('key_requests_total{adapter="(base)"') == 3
