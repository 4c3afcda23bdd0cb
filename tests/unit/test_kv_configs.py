"""Tiers and events as vLLM's users write them: mapped, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyroots.config import TierSettings, engine_settings
from manyroots.errors import ConfigError
from manyroots.kv_configs import EventsChoice, TransferChoice, parse_events, parse_transfer


def transfer(connector: str, extra: dict[str, Any], **more: Any) -> str:
    body = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return json.dumps(body | more)


def test_connectors_that_mean_tiers_are_mapped() -> None:
    text = transfer("OffloadingConnector", {"cpu_bytes_to_use": 10**9})
    assert parse_transfer(text) == TransferChoice(host_bytes=10**9)
    text = transfer("OffloadingConnector", {"num_cpu_blocks": 77, "eviction_policy": "lru"})
    assert parse_transfer(text) == TransferChoice(num_host_pages=77)
    text = transfer("SharedStorageConnector", {"shared_storage_path": "/var/kv"})
    settings = TierSettings(kv_transfer_config=text)
    assert settings.storage_url == "file:///var/kv"
    assert settings.is_on
    assert not settings.has_host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--kv-transfer-config is no JSON"),
        ("[]", "must be an object"),
        (transfer("NixlConnector", {}), "'NixlConnector', which is not served"),
        (transfer("LMCacheConnectorV1", {}), "--kv-storage file:///path"),
        (transfer("OffloadingConnector", {}), "cpu_bytes_to_use or num_cpu_blocks"),
        (transfer("OffloadingConnector", {"cpu_bytes_to_use": 0}), "at least 1"),
        (transfer("OffloadingConnector", {"cpu_bytes_to_use": 5, "x": 1}), "has x,"),
        (
            transfer("OffloadingConnector", {"num_cpu_blocks": 5, "spec_name": "Tiering"}),
            "spec_name 'Tiering'",
        ),
        (
            transfer("OffloadingConnector", {"num_cpu_blocks": 5, "eviction_policy": "arc"}),
            "eviction_policy 'arc'",
        ),
        (transfer("OffloadingConnector", {"num_cpu_blocks": 5}, kv_port=1), "has kv_port"),
        (
            transfer("OffloadingConnector", {"num_cpu_blocks": 5}, kv_role="kv_producer"),
            "kv_role 'kv_producer'",
        ),
        (transfer("ExampleConnector", {"shared_storage_path": "x"}), "an absolute path"),
    ],
)
def test_what_is_not_served_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierSettings(kv_transfer_config=text)


def test_events_are_configured_as_in_vllm() -> None:
    """K01: the flag's fields and defaults."""
    assert parse_events("{}") is None
    assert parse_events('{"enable_kv_cache_events": true}') == EventsChoice()
    given = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:6000",
        "replay_endpoint": "tcp://*:6001", "buffer_steps": 5, "hwm": 6, "max_queue_size": 7,
        "topic": "kv",
    }  # fmt: skip
    chosen = EventsChoice("tcp://*:6000", "tcp://*:6001", 5, 6, 7, "kv")
    assert engine_settings({"kv_events_config": given}).tiers.events() == chosen
    assert parse_events('{"enable_kv_cache_events": true, "publisher": "null"}') is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"publisher": "kafka"}, "publisher 'kafka'"),
        ({"endpoint": "http://x"}, "endpoint 'http://x'"),
        ({"endpoint": ""}, "no endpoint"),
        ({"hwm": "many"}, "hwm 'many'"),
        ({"batch": 1}, "has batch"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events 'yes'"),
    ],
)
def test_events_that_can_not_be_published_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierSettings(kv_events_config=json.dumps({"enable_kv_cache_events": True} | given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_offloading_size": 0}, "--kv-offloading-size is 0"),
        ({"kv_offloading_size": 1.0, "num_host_pages": 4}, "say the same thing twice"),
        ({"kv_offloading_backend": "lmcache"}, "--kv-offloading-backend is 'lmcache'"),
        ({"kv_storage": "/var/cache/kv"}, "--kv-storage is '/var/cache/kv'; it must be a URL"),
        ({"kv_storage_size": 1.0}, "without --kv-storage"),
        ({"kv_storage": "file:///x", "kv_storage_timeout_s": 0.0}, "--kv-storage-timeout-s is 0"),
        ({"kv_check_share": 1.5}, "--kv-check-share is 1.5"),
        ({"num_host_pages": 0}, "--num-host-pages is 0"),
        ({"write_back": "never"}, "--write-back is 'never'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_settings(given)
