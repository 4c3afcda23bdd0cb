"""The composition root: the only module that knows every room of the engine.

In: settings. Out: a loop that is ready to run, and the facts that the input processor needs.
Everything that depends on the model or the machine is computed once, in `worker.py`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyroots.cache.cache import PrefixCache
from manyroots.cache.keys import framed
from manyroots.cache.planes import CacheLayout
from manyroots.cache.policies import CachePolicies
from manyroots.config import EngineSettings
from manyroots.engine.adapter_directory import AdapterDirectory
from manyroots.engine.adapter_folders import check_folders
from manyroots.engine.adapter_runtime import adapter_limits, slot_bytes
from manyroots.engine.connectors import ConnectorInfo, open_connectors
from manyroots.engine.grammar_compiles import GrammarCompiles
from manyroots.engine.loop import EngineLoop, EventSink, TakeWeights
from manyroots.engine.memory import Sizes
from manyroots.engine.page_report import PageReport
from manyroots.engine.self_check import SelfCheck
from manyroots.engine.snapshots import EngineMemory, EngineParts
from manyroots.engine.tiers import check_tiers, model_identity, tier_policies
from manyroots.engine.weight_folders import file_states, find_weights
from manyroots.engine.worker import Executor, execute_alone
from manyroots.errors import ConfigError, ManyrootsError, UnavailableError
from manyroots.lora.residency import Residency
from manyroots.messages import EngineInfo, Submit
from manyroots.models.decoder import Decoder
from manyroots.models.families import LayerFamily, model_families, pages_in, with_pages_in
from manyroots.models.load import describe, refill, rehearse
from manyroots.models.source import ModelSource, resolve_source
from manyroots.process.progress import stage
from manyroots.runner.logprobs import same_within
from manyroots.scheduler.one_memory import OneMemory, SharedSizes
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import Runner

TOLD_LENGTHS = (1_000, 10_000, 100_000)
"""Tokens of requests whose memory the metrics show."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loop, and the facts that the input processor needs."""

    loop: EngineLoop
    info: EngineInfo
    parts: EngineParts
    """The parts that snapshots read."""
    pages: PageReport | None
    """Reports added and removed pages, if a gateway needs them."""


def build_engine(
    settings: EngineSettings, watch: Callable[[Runner], Runner] | None = None
) -> Engine:
    """Load the model, size the cache and connect all parts. `watch`: wraps the runner, for code
    that observes each step."""
    _check_step(settings)
    check_tiers(settings)
    with stage("model files"):
        source = resolve_source(settings.model)
    base_names = {source.name, settings.model.served_model_name or source.name}
    check_folders(settings.lora, base_names)
    executor = _make_executor(settings, source)
    model, page_size = executor.worker.model, settings.cache.block_size
    memory, max_model_len = executor.worker.memory, executor.sizes.max_model_len
    layout = CacheLayout.of(page_size, executor.worker.capacities(settings, executor.sizes))
    policies = _policies(settings, source, model, page_size)
    cache = PrefixCache(layout, policies)
    limits = adapter_limits(settings.lora, executor.sizes.adapter_room, model)
    adapters = Residency(limits)
    shared = _make_memory(settings, executor.sizes, cache, adapters)
    scheduler = Scheduler(
        settings.scheduler, cache, adapters, max_model_len=max_model_len, memory=shared
    )
    logger.info("%s: %s on %s, context %d", source.name, model.dtype, model.device, max_model_len)
    for line in memory.told(executor.sizes, model.shard.size):
        logger.info("%s", line)
    info = EngineInfo(
        model_path=str(source.path),
        model_name=source.name,
        vocab_size=model.spec.vocab_size,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=executor.num_pages,
        max_num_seqs=settings.scheduler.max_num_seqs,
        eos_token_ids=model.spec.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        scheduling_policy=settings.scheduler.scheduling_policy,
        max_loras=limits.max_loras or min(limits.num_slots or 0, settings.scheduler.max_num_seqs),
        page_identity=policies.identity,
        request_bytes=tuple(
            (length, model.shard.size * memory.request_bytes(length))
            for length in sorted({*TOLD_LENGTHS, max_model_len})
            if length <= max_model_len
        ),
    )
    directory = None
    if executor.adapters is not None:
        files = executor.adapters.files
        directory = AdapterDirectory(settings.lora, scheduler, files, base_names=base_names)
    compiles = GrammarCompiles(executor.grammars)
    pages, events = None, _make_events(settings, scheduler)
    if settings.reports_pages:
        pages = events = PageReport(adapters.registry.name_of, events)
    loop = EngineLoop(
        scheduler,
        executor.runner if watch is None else watch(executor.runner),
        directory=directory,
        compiles=compiles,
        alarm=executor.alarm,
        events=events,
        connectors=open_connectors(
            settings.tiers, ConnectorInfo(source.name, page_size, executor.num_pages)
        ),
        make_check=_make_check(settings, scheduler, executor),
        take_weights=_take_weights(settings, model, page_size),
    )
    ranks = model.shard.size
    parts = EngineParts(
        scheduler,
        cache,
        adapters,
        EngineMemory(
            ranks * model.num_bytes,
            ranks * (slot_bytes(settings.lora, model, model.dtype) if directory else 0),
            [ranks * size for size in memory.unit_bytes],
            ranks * (0 if limits.blocks is None else limits.blocks.block_bytes),
        ),
        settings.scheduler.max_num_seqs,
        settings.scheduler.max_num_batched_tokens,
    )
    return Engine(loop, info, parts, pages)


def free_memory() -> None:
    """Free memory of closed engines that no code references any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _make_memory(
    settings: EngineSettings, sizes: Sizes, cache: PrefixCache, adapters: Residency
) -> OneMemory | None:
    """What pages and adapters share; None where either has its own."""
    if not sizes.lent_units:
        return None
    page_size = settings.cache.block_size
    shared = SharedSizes(
        unit_bytes=sizes.lent_unit_bytes,
        num_lent_units=sizes.lent_units,
        least_units=min(
            -(-sizes.max_model_len // page_size), sizes.num_units[0] - sizes.lent_units
        ),
        num_step_units=-(-settings.scheduler.max_num_batched_tokens // page_size),
    )
    return OneMemory(cache, adapters, shared)


def _make_check(
    settings: EngineSettings, scheduler: Scheduler, executor: Executor
) -> Callable[[Callable[[Submit], None]], SelfCheck] | None:
    share = settings.tiers.kv_check_share
    if not share:
        return None
    tolerance = same_within(executor.worker.model.dtype)

    def drop(submit: Submit) -> str:
        hashes = scheduler.drop_prefix(submit)
        executor.forget(hashes)
        return f"{len(hashes)} pages, {' '.join(h.hex()[:16] for h in hashes)}, are"

    return lambda submit: SelfCheck(share, tolerance, submit, drop, settings.model.seed)


def _make_events(settings: EngineSettings, scheduler: Scheduler) -> EventSink | None:
    choice = settings.tiers.events()
    if choice is None:
        return None
    # Imported here, because an engine that publishes nothing must run without ZMQ and msgspec.
    from manyroots.engine.kv_events import EventPublisher

    return EventPublisher(choice, settings.cache.block_size, scheduler.adapters.registry.name_of)


def _policies(
    settings: EngineSettings, source: ModelSource, model: Decoder, page_size: int
) -> CachePolicies:
    policies = tier_policies(settings.tiers, is_gpu=model.device.type == "cuda")
    with stage("model identity"):
        identity = _identity(settings, source, model, page_size)
    return replace(
        policies,
        reuse=settings.cache.enable_prefix_caching,
        identity=identity,
        records_events=policies.records_events or settings.reports_pages,
    )


def _identity(
    settings: EngineSettings, source: ModelSource, model: Decoder, page_size: int
) -> bytes:
    """Identifies the weights and what they compute, if pages have names outside of this process."""
    policies = tier_policies(settings.tiers)
    if not policies.uses_storage and not policies.records_events:
        return b""
    weights = model_identity(source, settings.model.load_format, settings.model.seed)
    layout = layout_identity(_whole_families(source, model), page_size, model.dtype)
    kept = settings.model.quantization.encode()
    parts = (weights, layout, model.device.type.encode(), kept)
    factor = settings.model.yarn_factor
    return framed(*parts) if factor is None else framed(*parts, f"yarn {factor}".encode())


def _whole_families(source: ModelSource, model: Decoder) -> Sequence[LayerFamily]:
    """Families of the whole model, for any number of ranks, so that a page has one hash everywhere.
    The key of a unit in storage also has the rank and the number of ranks."""
    if model.shard.is_whole:
        return model.families
    return model_families(with_pages_in(describe(source), pages_in(model.spec)))


def _take_weights(settings: EngineSettings, model: Decoder, page_size: int) -> TakeWeights | None:
    """None with several ranks, because each would need its part. None for quantized weights, which
    are not filled twice."""
    if not model.shard.is_whole or settings.model.quantization != "auto":
        return None

    def take(path: str) -> bytes:
        folder = find_weights(path, settings.model.weights_dirs)
        chosen = replace(settings.model, model=str(folder), load_format="auto")
        source = resolve_source(chosen)
        before = file_states(source.path)
        rehearse(model, source)
        try:
            refill(model, source)
            identity = _identity(replace(settings, model=chosen), source, model, page_size)
            has_changed = file_states(source.path) != before
        except (ManyrootsError, OSError) as error:
            raise UnavailableError(_changed_meanwhile(folder)) from error
        if has_changed:
            raise UnavailableError(_changed_meanwhile(folder))
        return identity

    return take


def _changed_meanwhile(folder: Path) -> str:
    return (
        f"the files in {folder} changed while they were read, so the weights may be mixed; "
        "write a folder completely before you name it."
    )


def layout_identity(families: Sequence[LayerFamily], page_size: int, dtype: torch.dtype) -> bytes:
    """Identifies the contents of a page, by family, in hashes that other engines and later ones
    use. A page with any difference here must never be read as the same page."""
    parts = [f"page of {page_size} tokens in {dtype}"]
    parts += [f"layers {family.layers}: {family.memory}" for family in families]
    return "; ".join(parts).encode()


def _make_executor(settings: EngineSettings, source: ModelSource) -> Executor:
    if settings.model.tensor_parallel_size == 1:
        return execute_alone(settings, source)
    # Imported here, because one rank needs neither processes nor a wire, and must run without them.
    from manyroots.engine.tensor_parallel import execute_with_ranks

    return execute_with_ranks(settings, source)


def _check_step(settings: EngineSettings) -> None:
    scheduler = settings.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}) is below "
            f"--max-num-seqs ({scheduler.max_num_seqs}): a step could not give every running "
            "request one token. Raise the first or lower the second."
        )
