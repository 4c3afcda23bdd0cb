"""Cost models by name, each with where its numbers come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyroots.errors import ConfigError
from manyroots.simulate.costs import CostModel


@dataclass(frozen=True, slots=True)
class Preset:
    """A cost model and where it comes from."""

    title: str
    costs: CostModel
    origin: str
    """Which numbers were measured, how, and which were not."""


H200_QWEN3_8B = Preset(
    title="Qwen3-8B in bf16 on one H200, as measured with this engine",
    costs=CostModel(
        step_overhead_s=4.1e-3,
        unoverlapped_step_s=1.05e-3,
        prefill_tokens_per_s=46_300,
        prefill_pair_s=1.0e-9,
        decode_row_s=11e-6,
        decode_context_token_s=35e-9,
        kv_bytes_per_token=2 * 8 * 128 * 2 * 36,
        kv_memory_bytes=109 * 2**30,
        host_bytes_per_s=55e9,
        host_latency_s=10e-6,
        storage_bytes_per_s=5e9,
        storage_latency_s=100e-6,
        adapter_bytes=87e6,
        adapter_storage_load_s=0.053,
    ),
    origin=(
        "Measured by `bench decode` on 2026-11-16, prompts of 512 tokens: decode steps of 4.32, "
        "6.10, 7.79 and 12.6 ms at batch 8, 64, 128 and 256 (this model: within 5%); prompts of "
        "32768, 65536 and 131072 tokens in 0.738, 1.473 and 2.955 s; a cold rank-16 adapter of 87 "
        "MB in 0.053 s; 55 GB/s to pinned host memory. Reading keys and values (4.2 TB/s) and "
        "attention within a prompt (590 TFLOP/s) agree with single kernels; 5 GB/s storage and the "
        "two latencies are assumed; 109 GiB for pages is 0.9 of the GPU less weights and "
        "activations. Steps that check four guesses of each row took 5.25 and 6.31 ms at batch 1 "
        "and 8 on 2026-11-18, prompts of 256 tokens (this model: within 15%)."
    ),
)

H200_QWEN3_8B_VLLM = Preset(
    title="Qwen3-8B in bf16 on one H200, as measured with vLLM 0.25.1",
    costs=replace(
        H200_QWEN3_8B.costs,
        step_overhead_s=5.25e-3,
        prefill_tokens_per_s=43_500,
        decode_row_s=6.7e-6,
        decode_context_token_s=37e-9,
        adapter_storage_load_s=0.25,
    ),
    origin=(
        "CUDA graphs, prompts of 512 tokens: decode steps of 5.18, 5.57, 6.11 and 6.94 ms at batch "
        "1, 8, 32 and 64 (this model: within 2%); prompts of 4096, 16384 and 32768 tokens in "
        "0.108, 0.381 and 0.767 s; a cold adapter in 0.25 s. The rest as in the other preset."
    ),
)

ROUND_NUMBERS = Preset(
    title="no machine at all",
    costs=CostModel(
        step_overhead_s=0.01,
        unoverlapped_step_s=0.002,
        prefill_tokens_per_s=10_000,
        prefill_pair_s=0.0,
        decode_row_s=0.001,
        decode_context_token_s=1e-6,
        kv_bytes_per_token=1000,
        kv_memory_bytes=100e6,
        host_bytes_per_s=10e9,
        host_latency_s=0.001,
        storage_bytes_per_s=1e9,
        storage_latency_s=0.01,
        adapter_bytes=100e6,
        adapter_storage_load_s=0.5,
    ),
    origin="invented: numbers that can be checked in the head",
)

PRESETS = {
    "h200-qwen3-8b": H200_QWEN3_8B,
    "h200-qwen3-8b-vllm": H200_QWEN3_8B_VLLM,
    "round-numbers": ROUND_NUMBERS,
}
DEFAULT_PRESET = "h200-qwen3-8b"


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"--preset is {name!r}; choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
