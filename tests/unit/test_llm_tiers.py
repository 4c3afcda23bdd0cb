"""Tiers below the device with real bytes, through the engine: what comes back is what went."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import path_units
from manyroots.cache.planes import ABSENT
from manyroots.errors import ConfigError
from manyroots.ids import Namespace, Tier
from manyroots.messages import CacheUse, SelfCheckStats
from manyroots.step import Copy
from manyroots.store.host_link import HostErrand, HostLink
from manyroots.store.layer_arrivals import LayerArrivals
from manyroots.store.tier_copies import TierCopies
from tests.helpers.patience import PATIENCE_S
from tests.helpers.quick_tiers import quick_tiers
from tests.helpers.tiny_adapters import TinyAdapters
from tests.soaks.differential import PAGE
from tests.unit.models.tiny import save_tiny
from tests.unit.test_llm_windows import serve
from tests.unit.text.tiny_tokenizer import tiny_backend

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
COLD = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
"""Prompts whose log-probabilities are asked for are computed, whatever is cached."""
NUM_PROMPTS, PROMPT_LEN, NUM_CACHED = 5, 90, 88
Bits = dict[tuple[int, int], bytes]
"""By (family, page)."""


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_tiers():
        yield


def prompts(seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(PROMPT_LEN)] for _ in range(NUM_PROMPTS)]


def ask(llm: LLM, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    [answer] = llm.generate([prompt], GREEDY, **more)
    return answer.outputs[0].token_ids, answer.num_cached_tokens


def units_on_device(llm: LLM, prompt: list[int]) -> list[int]:
    """Of the first family, page by page."""
    cache: Any = llm._loop._scheduler._cache  # type: ignore[attr-defined]
    walk = cache.lookup(PrefixKey(Namespace(None, None)), np.array(prompt, np.int32)).walk
    units: list[int] = path_units(walk.nodes, walk.depth, cache.layout.device[0]).tolist()
    return units


def pages_on_device(llm: LLM, prompt: list[int]) -> Bits:
    """The bits of a prompt's pages that the index has on the device."""
    cache: Any = llm._loop._scheduler._cache  # type: ignore[attr-defined]
    arenas: Any = llm._loop._runner._arenas  # type: ignore[attr-defined]
    key = PrefixKey(Namespace(None, None))
    walk = cache.lookup(key, np.array(prompt, np.int32)).walk
    found: Bits = {}
    for family, plane in enumerate(cache.layout.device):
        for page, unit in enumerate(path_units(walk.nodes, walk.depth, plane).tolist()):
            if unit != ABSENT:
                rows = arenas[family].data
                found[family, page] = rows[unit].contiguous().numpy().tobytes()
    return found


@pytest.mark.parametrize(("mix", "num_pages"), [("full", 70), ("window", 24), ("five to one", 24)])
def test_t01_pages_come_back_from_the_host_bit_by_bit(
    mix: str, num_pages: int, tmp_path: Path
) -> None:
    """T01: the device holds a part of the prompts; the rest comes from the host, with the tokens
    of a cold run."""
    with serve(tmp_path, mix, num_host_pages=600, num_gpu_blocks_override=num_pages) as llm:
        bits, cold = [], []
        for prompt in prompts():
            [answer] = llm.generate([prompt], COLD)
            assert answer.num_cached_tokens == 0
            cold.append(answer.outputs[0].token_ids)
            bits.append(pages_on_device(llm, prompt))
        for prompt, before, tokens in zip(prompts(), bits, cold, strict=True):
            assert ask(llm, prompt) == (tokens, NUM_CACHED)
            now = pages_on_device(llm, prompt)
            both = now.keys() & before.keys()
            assert both, "nothing to compare"
            assert all(now[page] == before[page] for page in both)
        assert llm.stats().total_host_hit_tokens > 0
        assert llm.stats().num_held_pages == 0


@pytest.mark.parametrize("write_back", ["through", "reused", "eviction"])
def test_t01_when_pages_go_to_the_host_is_a_setting(write_back: str, tmp_path: Path) -> None:
    """T01: at once, when found again, or when the device runs out; the answers are the same."""
    with serve(
        tmp_path, "full", num_gpu_blocks_override=70, num_host_pages=600, write_back=write_back
    ) as llm:
        cold = [ask(llm, prompt)[0] for prompt in prompts() for _ in range(2)][::2]
        warm = [ask(llm, prompt) for prompt in prompts()]
        assert [tokens for tokens, _ in warm] == cold
        assert llm.stats().total_host_hit_tokens > 0


@pytest.mark.parametrize("host", [{}, {"num_host_pages": 300}], ids=["without", "with host"])
@pytest.mark.parametrize("mix", ["full", "five to one"])
def test_t06_t07_a_new_engine_finds_what_another_has_stored(
    mix: str, host: dict[str, int], tmp_path: Path
) -> None:
    """T02, T06, T07: device, host, files, a new engine, device: the same bits and tokens."""
    settings = {"kv_storage": f"file://{tmp_path}/kv", "num_gpu_blocks_override": 200, **host}
    with serve(tmp_path / "model", mix, **settings) as llm:
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
        bits = [pages_on_device(llm, prompt) for prompt in prompts()]
    with serve(tmp_path / "same", mix, **settings) as llm:
        for prompt, tokens, before in zip(prompts(), cold, bits, strict=True):
            assert ask(llm, prompt) == (tokens, NUM_CACHED)
            now = pages_on_device(llm, prompt)
            both = now.keys() & before.keys()
            assert both, "nothing to compare"
            assert all(now[page] == before[page] for page in both)


@pytest.mark.parametrize("kind", ["lfm2", "falcon-h1", "granite-h", "qwen3.5", "qwen3-next"])
def test_t06_saved_states_come_back_from_storage(kind: str, tmp_path: Path) -> None:
    """T02, T06, F05: recurrent layers beside attention; a new engine resumes from their
    checkpoints, which have the bits that they were saved with, by way of host and files."""
    save_tiny(tmp_path / "model", kind, vocab_size=300)
    tiny_backend().save(str(tmp_path / "model" / "tokenizer.json"))

    def start() -> LLM:
        return LLM(
            str(tmp_path / "model"), dtype="float32", block_size=4, max_model_len=240,
            num_gpu_blocks_override=90, num_host_pages=600, kv_storage=f"file://{tmp_path}/kv",
        )  # fmt: skip

    cold, bits = [], []
    with start() as llm:
        for prompt in prompts():
            cold.append(ask(llm, prompt)[0])
            bits.append(pages_on_device(llm, prompt))
    num_states = 0
    with start() as llm:
        for prompt, tokens, before in zip(prompts(), cold, bits, strict=True):
            found, cached = ask(llm, prompt)
            assert found == tokens
            assert cached > 0
            now = pages_on_device(llm, prompt)
            both = now.keys() & before.keys()
            assert all(now[unit] == before[unit] for unit in both)
            num_states += sum(family > 0 for family, _ in both)
        assert num_states >= NUM_PROMPTS
        assert llm.stats().total_storage_hit_tokens > 0
        assert llm.stats().num_held_pages == 0


def test_t07_other_weights_find_nothing(tmp_path: Path) -> None:
    """T02, T07: the same layout with one changed weight is another model."""
    settings = {"kv_storage": f"file://{tmp_path}/kv", "load_format": "dummy"}
    with serve(tmp_path / "model", "full", seed=1, **settings) as llm:
        mine = [ask(llm, prompt)[0] for prompt in prompts()]
    with serve(tmp_path / "other", "full", seed=2, **settings) as llm:
        others = [ask(llm, prompt) for prompt in prompts()]
    assert [cached for _, cached in others] == [0] * NUM_PROMPTS
    assert [tokens for tokens, _ in others] != mine
    with serve(tmp_path / "again", "full", seed=1, **settings) as llm:
        assert [ask(llm, prompt) for prompt in prompts()] == [(t, NUM_CACHED) for t in mine]


def test_t03_t12_a_folder_without_room_takes_nothing_and_that_is_said(tmp_path: Path) -> None:
    """T03, T12: not one page fits below the limit. Pages count as unwritten, the engine writes
    no more, and the next engine finds nothing."""
    settings = {
        "kv_storage": f"file://{tmp_path}/kv", "kv_storage_size": 1e-6, "num_host_pages": 300,
        "num_gpu_blocks_override": 200,
    }  # fmt: skip
    with serve(tmp_path / "model", "full", **settings) as llm:
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
        storage = llm.stats().storage
    assert storage is not None
    assert storage.total_unwritten_units > 0
    assert (storage.is_read, storage.is_written, storage.total_outages) == (True, False, 1)
    with serve(tmp_path / "again", "full", **settings) as llm:
        assert [ask(llm, prompt) for prompt in prompts()] == [(tokens, 0) for tokens in cold]


def test_t02_t07_the_same_weights_with_another_config_find_nothing(tmp_path: Path) -> None:
    """T02, T07: a rotation of another base turns the same weights into another model, although
    nothing of it is in the files of weights or in the layout of a page."""
    folder, prompt = tmp_path / "model", prompts()[0]
    save_tiny(folder, "llama", vocab_size=300)
    tiny_backend().save(str(folder / "tokenizer.json"))
    config = folder / "config.json"
    texts = {"mine": config.read_text()}
    changed = json.loads(texts["mine"])
    changed["rope_parameters"]["rope_theta"] *= 2
    texts["other"] = json.dumps(changed)
    said = []
    for name in ("mine", "other", "mine", "other"):
        config.write_text(texts[name])
        with LLM(
            str(folder), dtype="float32", block_size=PAGE, max_model_len=200,
            num_gpu_blocks_override=60, kv_storage=f"file://{tmp_path}/kv",
        ) as llm:  # fmt: skip
            said.append(ask(llm, prompt))
    assert [num_cached for _, num_cached in said] == [0, 0, NUM_CACHED, NUM_CACHED]
    mine, other = said[0][0], said[1][0]
    assert mine != other
    assert [tokens for tokens, _ in said] == [mine, other, mine, other]


def test_t07_adapters_and_salts_stay_apart_in_every_tier(tmp_path: Path) -> None:
    """T07, N04: one prompt for the base model and two adapters, with salts and without: each finds
    its own pages on the host and, after a restart, in storage."""
    tiny = TinyAdapters(tmp_path)
    prompt = prompts()[0]
    owners: list[tuple[str | None, str | None]] = [
        (name, salt) for name in (None, "all", "few") for salt in (None, "", "one", "two")
    ]

    def start() -> LLM:
        return LLM(
            str(tiny.model), dtype="float32", block_size=4, max_model_len=200, enable_lora=True,
            num_gpu_blocks_override=60, num_host_pages=600, kv_storage=f"file://{tmp_path}/kv",
        )  # fmt: skip

    def run(llm: LLM, name: str | None, salt: str | None) -> tuple[list[int], int]:
        lora = None if name is None else LoRARequest(name, 1, tiny.path(name))
        return ask(llm, prompt, lora_request=lora, cache_salt=salt)

    with start() as llm:
        cold = [run(llm, *owner) for owner in owners]
        assert [cached for _, cached in cold] == [0] * len(owners)
        warm = [(tokens, NUM_CACHED) for tokens, _ in cold]
        assert [run(llm, *owner) for owner in owners] == warm
        assert llm.stats().total_host_hit_tokens > 0
    with start() as llm:
        assert [run(llm, *owner) for owner in reversed(owners)] == warm[::-1]
        assert run(llm, "all", "three")[1] == 0


def test_s07_each_answer_says_where_its_cached_tokens_were_and_why_the_rest_was_computed(
    tmp_path: Path,
) -> None:
    """S07: with the first token, by tier; and the totals agree."""
    settings = {
        "kv_storage": f"file://{tmp_path}/kv", "num_gpu_blocks_override": 70, "num_host_pages": 600,
    }  # fmt: skip
    one, *others = prompts()

    def use(llm: LLM, prompt: list[int], **more: Any) -> CacheUse | None:
        return llm.generate([prompt], GREEDY, **more)[0].cache_use

    with serve(tmp_path / "model", "full", **settings) as llm:
        assert use(llm, one) == CacheUse(0, 0, "cold")
        assert use(llm, one) == CacheUse(0, 0, "nothing")
        assert use(llm, one, cache_salt="mine") == CacheUse(0, 0, "cold")
        for other in others:
            use(llm, other)
        assert use(llm, one) == CacheUse(NUM_CACHED, 0, "nothing")
        [scored] = llm.generate([one], COLD)
        assert scored.cache_use == CacheUse(0, 0, "off")
    with serve(tmp_path / "again", "full", **settings) as llm:
        assert use(llm, one[:60]) == CacheUse(0, 56, "nothing")
        assert use(llm, one) == CacheUse(0, NUM_CACHED - 60, "nothing")
        assert llm.stats().total_storage_hit_tokens == 56 + NUM_CACHED - 60
        assert llm.stats().total_hit_tokens == 56 + NUM_CACHED
        assert use(llm, one[:50] + others[0][:30]) == CacheUse(0, 0, "cold")


def test_t01_a_working_set_of_ten_devices_hits_on_a_host_of_twelve(tmp_path: Path) -> None:
    """T01: at least 0.95 of what an endless cache would find, over random requests."""
    rng = random.Random(4)
    num_pages, length = 70, 90
    working = [
        [rng.randrange(3, 300) for _ in range(length)] for _ in range(10 * num_pages * 4 // length)
    ]
    seen: set[int] = set()
    found = endless = 0
    with serve(
        tmp_path, "full", num_gpu_blocks_override=num_pages, num_host_pages=12 * num_pages
    ) as llm:
        for _ in range(2 * len(working)):
            index = rng.randrange(len(working))
            _, cached = ask(llm, working[index])
            found += cached
            endless += NUM_CACHED if index in seen else 0
            seen.add(index)
    assert found >= 0.95 * endless, f"{found} of {endless} tokens"


def test_t09_t11_a_prefix_on_the_host_is_copied_once_for_all_who_want_it(tmp_path: Path) -> None:
    """T09, T11: three requests at once; and an engine without work has nothing under way."""
    real, loads = TierCopies.start, []

    def start(self: TierCopies, copy: Copy) -> None:
        if copy.target is Tier.DEVICE:
            loads.extend(copy.source_units.tolist())
        real(self, copy)

    with (
        mock.patch.object(TierCopies, "start", start),
        serve(tmp_path, "full", num_gpu_blocks_override=70, num_host_pages=600) as llm,
    ):
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
        loads.clear()
        answers = llm.generate([prompts()[0]] * 3, GREEDY)
        assert [answer.outputs[0].token_ids for answer in answers] == [cold[0]] * 3
        assert len(loads) == len(set(loads)) == NUM_CACHED // 4
        assert not llm._loop.has_work
        assert llm.stats().num_held_pages == 0


@pytest.mark.parametrize(("mix", "num_pages"), [("full", 70), ("window", 24), ("five to one", 24)])
def test_t10_a_load_overlaps_its_own_requests_computation(
    mix: str, num_pages: int, tmp_path: Path
) -> None:
    """T10: layer by layer, each waiting for its own part, which comes late: the tokens and bits of
    a cold run."""
    slowly, waited, is_asked = HostLink._parts, [], threading.Event()

    def parts(self: HostLink, errand: HostErrand) -> Iterator[list[tuple[Copy, slice]]]:
        for group in slowly(self, errand):
            if errand.arrivals is not None:
                assert is_asked.wait(PATIENCE_S), "the computation waits for the whole load"
                time.sleep(0.01)
            yield group

    def before(self: LayerArrivals, layer: int) -> None:
        waited.append((layer, self._is_told[self._groups.group_of(layer)].is_set()))
        is_asked.set()
        real(self, layer)

    real = LayerArrivals.before_layer
    settings = {"num_gpu_blocks_override": num_pages, "num_host_pages": 600}
    with (
        mock.patch.object(HostLink, "_parts", parts),
        mock.patch.object(LayerArrivals, "before_layer", before),
        serve(tmp_path, mix, kv_load_overlap="on", **settings) as llm,
    ):
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
        bits = [pages_on_device(llm, prompt) for prompt in prompts()]
        waited.clear()
        is_asked.clear()
        for prompt, tokens, before_bits in zip(prompts(), cold, bits, strict=True):
            assert ask(llm, prompt) == (tokens, NUM_CACHED)
            now = pages_on_device(llm, prompt)
            assert all(now[p] == before_bits[p] for p in now.keys() & before_bits.keys())
        assert any(not is_told for _, is_told in waited), "no layer had to wait for its part"
        assert llm.stats().num_held_pages == 0


def test_t10_a_request_whose_pages_do_not_come_fails_alone(tmp_path: Path) -> None:
    """T10: its step has begun, so that it can't be computed instead; the next one is served."""

    def parts(self: HostLink, errand: HostErrand) -> Iterator[list[tuple[Copy, slice]]]:
        group, *others = slowly(self, errand)
        yield group
        if errand.arrivals is not None:
            raise OSError("planted")
        yield from others

    slowly = HostLink._parts
    settings = {"num_gpu_blocks_override": 70, "num_host_pages": 600}
    with serve(tmp_path, "full", kv_load_overlap="on", **settings) as llm:
        cold = [ask(llm, prompt)[0] for prompt in prompts()]
        with (
            mock.patch.object(HostLink, "_parts", parts),
            pytest.raises(RuntimeError, match="planted"),
        ):
            ask(llm, prompts()[0])
        assert [ask(llm, prompt)[0] for prompt in prompts()] == cold
        assert llm.stats().num_held_pages == 0


def test_r09_hits_are_computed_again_and_what_differs_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R09: every hit is checked; pages that were changed without the engine's knowledge are found,
    dropped on every tier, and computed again. Callers are told nothing of the checks."""
    settings = {
        "kv_storage": f"file://{tmp_path}/kv", "num_host_pages": 300, "kv_check_share": 1.0,
        "num_gpu_blocks_override": 200,
    }  # fmt: skip
    one, other = prompts()[:2]
    with serve(tmp_path / "model", "full", **settings) as llm:
        cold = [ask(llm, one)[0], ask(llm, other)[0]]
        assert [ask(llm, one), ask(llm, other)] == [(tokens, NUM_CACHED) for tokens in cold]
        checks = llm.stats().self_check
        assert checks == SelfCheckStats(2, 0)
        stored = len(list((tmp_path / "kv").glob("v1/??/*")))
        arenas: Any = llm._loop._runner._arenas  # type: ignore[attr-defined]
        for row in units_on_device(llm, one):
            arenas[0].data[row] *= -3.0
        ask(llm, one)
        assert llm.stats().self_check == SelfCheckStats(3, 1)
        assert "cached pages differ from computed ones" in caplog.text
        assert ask(llm, one) == (cold[0], 0)
        assert ask(llm, other) == (cold[1], NUM_CACHED)
        assert llm.stats().num_held_pages == 0
        assert stored > 0


def test_tiers_that_can_not_be_had_are_refused_by_name(tmp_path: Path) -> None:
    for settings, message in (
        ({"num_host_pages": 5, "enable_prefix_caching": False}, "prefix cache"),
        ({"kv_offloading_size": 100000.0}, "--kv-offloading-size"),
        ({"kv_storage": "file:///proc/nothing"}, "can't be made"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve(tmp_path, "full", **settings)
