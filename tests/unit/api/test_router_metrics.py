"""/metrics as routers of others read it: names and labels of llm-d's endpoint picker and AIBrix."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from manyroots.engine.client import NO_COUNTS
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import Stats
from manyroots.observe.metrics import Metrics


def samples() -> dict[str, list[Sample]]:
    from dataclasses import replace

    stats: Stats = replace(NO_COUNTS, num_running=3, num_waiting=2, page_usage=0.25)
    config = {"block_size": "16", "num_gpu_blocks": "400"}
    metrics = Metrics(
        "tiny",
        lambda: stats,
        max_loras=4,
        request_bytes=((1000, 7), (100_000, 500)),
        cache_config=config,
    )
    running = metrics.sequence(RequestId(1), 10, AdapterName("pirate"))
    metrics.sequence(RequestId(2), 10, AdapterName("butler"))
    running.tokens(1)
    text = metrics.render(read_timeouts={}, num_api_restarts=0, with_adapters=True).decode()
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_m05_llm_ds_endpoint_picker_finds_queue_cache_and_adapters() -> None:
    """M05: it takes the adapters' newest sample, by its value, and splits the labels at commas."""
    found = samples()
    assert found["vllm:num_requests_waiting"][0].value == 2
    assert found["vllm:num_requests_running"][0].value == 3
    assert found["vllm:kv_cache_usage_perc"][0].value == 0.25
    newest = max(found["vllm:lora_requests_info"], key=lambda sample: sample.value)
    assert newest.labels["max_lora"] == "4"
    assert newest.labels["running_lora_adapters"].split(",") == ["pirate"]
    assert newest.labels["waiting_lora_adapters"].split(",") == ["butler"]
    config = found["vllm:cache_config_info"][0].labels
    assert (int(config["block_size"]), int(config["num_gpu_blocks"])) == (16, 400)


def test_f10_the_memory_of_requests_is_shown_by_their_length() -> None:
    """F10: beside the cache's sizes, so that a router can tell how many requests fit."""
    found = {
        sample.labels["num_tokens"]: sample.value
        for sample in samples()["manyroots:request_cache_bytes"]
    }
    assert found == {"1000": 7.0, "100000": 500.0}


def test_m05_aibrix_finds_its_gauges_and_histograms_by_model() -> None:
    """M05: each is looked up by the name of the model."""
    found = samples()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_sum",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_sum",
    ):
        assert found[name][0].labels["model_name"] == "tiny", name
