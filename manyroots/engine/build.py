"""The composition root: the only place that knows every room of the engine.

In: settings. Out: a loop ready to run, and what the door must know of it. What depends on the
model or the machine is worked out once, in `part.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity, Layout
from manyroots.cache.policies import CachePolicies
from manyroots.config import EngineSettings
from manyroots.engine.adapter_desk import AdapterDesk
from manyroots.engine.adapter_folders import check_folders
from manyroots.engine.adapter_half import adapter_limits
from manyroots.engine.loop import EngineLoop
from manyroots.engine.part import ExecuteHalf, execute_alone
from manyroots.errors import ConfigError
from manyroots.lora.residency import Residency
from manyroots.messages import EngineInfo
from manyroots.models.source import ModelSource, resolve_source
from manyroots.progress import stage
from manyroots.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loop and what the door must know of it."""

    loop: EngineLoop
    info: EngineInfo


def build_engine(settings: EngineSettings) -> Engine:
    """Load the model, size the cache and wire everything up."""
    _check_step(settings)
    with stage("model files"):
        source = resolve_source(settings.model)
    base_names = {source.name, settings.model.served_model_name or source.name}
    check_folders(settings.lora, base_names)
    half = _execute_half(settings, source)
    part, spec, page_size = half.part, half.part.model.spec, settings.cache.block_size
    num_pages, max_model_len = half.sizes.num_pages, half.sizes.max_model_len
    cache = PrefixCache(
        Layout.of(page_size, (Capacity(FULL_ATTENTION, num_pages),)),
        CachePolicies(reuse=settings.cache.enable_prefix_caching),
    )
    adapters = Residency(adapter_limits(settings.lora))
    scheduler = Scheduler(settings.scheduler, cache, adapters, max_model_len=max_model_len)
    logger.info(
        "%s: %s on %s, %d pages of %d tokens (%.2f GiB), context %d",
        source.name, part.dtype, part.device, num_pages, page_size,
        num_pages * part.bytes_per_page * part.shard.size / 2**30, max_model_len,
    )  # fmt: skip
    info = EngineInfo(
        model_path=str(source.path),
        model_name=source.name,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=settings.scheduler.max_num_seqs,
        eos_token_ids=spec.eos_token_ids,
        dtype=str(part.dtype).removeprefix("torch."),
        device=str(part.device),
        scheduling_policy=settings.scheduler.scheduling_policy,
    )
    desk = None
    if half.adapters is not None:
        files = half.adapters.files
        desk = AdapterDesk(settings.lora, scheduler, files, base_names=base_names)
    return Engine(EngineLoop(scheduler, half.runner, desk=desk, alarm=half.alarm), info)


def _execute_half(settings: EngineSettings, source: ModelSource) -> ExecuteHalf:
    if settings.model.tensor_parallel_size == 1:
        return execute_alone(settings, source)
    # Here, because one rank needs neither processes nor a wire, and must run without them.
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
