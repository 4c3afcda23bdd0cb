"""Adapters in Python (S05): one or one per prompt, loaded and unloaded, equal to PEFT's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.errors import NotFoundError, RequestError
from tests.helpers.adapter_folders import rewrite_config
from tests.helpers.tiny_adapters import RECIPES, TinyAdapters

COUNT = 10
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


def start(tiny: TinyAdapters, **settings: Any) -> LLM:
    given = {"enable_lora": True, "dtype": "float32", "block_size": 4, **settings}
    return LLM(str(tiny.model), num_gpu_blocks_override=128, **given)


@pytest.fixture
def llm(tiny: TinyAdapters) -> Iterator[LLM]:
    with start(tiny, max_loras=2) as llm:
        yield llm


def tokens(llm: LLM, prompts: list[list[int]], adapters: Any) -> list[list[int]]:
    results = llm.generate(prompts, GREEDY, lora_request=adapters)
    return [result.outputs[0].token_ids for result in results]


def request(tiny: TinyAdapters, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1, tiny.path(name))


def test_s05_each_prompt_has_its_own_adapter_and_peft_agrees(tiny: TinyAdapters, llm: LLM) -> None:
    """S05, N19: more adapters than slots, base among them, twice, so that the cache answers too."""
    names = ["all", None, "few", "stable", "other", "all", None]
    adapters = [request(tiny, name) for name in names]
    wanted = [tiny.greedy(PROMPT, name, COUNT) for name in names]
    assert len({tuple(line) for line in wanted}) == 5, "the adapters are not told apart"
    for _ in range(2):
        assert tokens(llm, [PROMPT] * len(names), adapters) == wanted
    assert llm.stats().total_hit_tokens > 0
    assert llm.stats().num_held_pages == 0


def test_s05_one_adapter_for_all_prompts(tiny: TinyAdapters, llm: LLM) -> None:
    """S05: and its name alone is enough afterwards."""
    wanted = tiny.greedy(PROMPT, "few", COUNT)
    assert tokens(llm, [PROMPT, PROMPT], request(tiny, "few")) == [wanted] * 2
    assert tokens(llm, [PROMPT], LoRARequest("few")) == [wanted]


def test_n20_a_name_with_new_weights_never_hits_the_old_pages(tiny: TinyAdapters, llm: LLM) -> None:
    """N20, S03: in place, and after an unload."""
    for name in ("all", "stable"):
        llm.load_adapter("it", tiny.path(name), load_inplace=True)
        assert tokens(llm, [PROMPT], LoRARequest("it")) == [tiny.greedy(PROMPT, name, COUNT)]
    assert llm.unload_adapter("it").num_pages > 0
    with pytest.raises(NotFoundError, match="'it'"):
        tokens(llm, [PROMPT], LoRARequest("it"))
    llm.load_adapter("it", tiny.path("other"))
    assert tokens(llm, [PROMPT], LoRARequest("it")) == [tiny.greedy(PROMPT, "other", COUNT)]


def test_loading_says_what_was_loaded(tiny: TinyAdapters, llm: LLM) -> None:
    reply = llm.load_adapter("few", tiny.path("few"), pinned=True)
    assert (reply.rank, set(reply.modules)) == (3, {"q_proj", "down_proj"})
    with pytest.raises(RequestError, match="exists already"):
        llm.load_adapter("few", tiny.path("few"))
    assert llm.load_adapter("few", tiny.path("few"), load_inplace=True).is_unchanged
    with pytest.raises(NotFoundError, match=r"'unknown' is not loaded; loaded: .*'few'"):
        llm.unload_adapter("unknown")


def test_s03_a_pinned_adapter_is_on_the_device_again_after_sleep(
    tiny: TinyAdapters, llm: LLM
) -> None:
    """S03: as soon as steps run, before any request names it; one that is not pinned is not."""
    llm.load_adapter("few", tiny.path("few"), pinned=True)
    llm.load_adapter("all", tiny.path("all"))
    llm.sleep()
    llm.wake_up()
    tokens(llm, [PROMPT], None)
    adapters = llm.stats().adapters
    assert adapters is not None
    assert adapters.num_on_device == 1
    assert tokens(llm, [PROMPT], LoRARequest("few")) == [tiny.greedy(PROMPT, "few", COUNT)]
    assert tokens(llm, [PROMPT], LoRARequest("all")) == [tiny.greedy(PROMPT, "all", COUNT)]


def test_w10_a_broken_adapter_fails_with_the_reason_and_the_others_go_on(
    tiny: TinyAdapters, llm: LLM
) -> None:
    """W10: and once mended it loads."""
    folder = tiny.write("broken", RECIPES["few"])
    rewrite_config(folder, use_dora=True)
    with pytest.raises(RequestError, match="dora"):
        tokens(llm, [PROMPT, PROMPT], [None, request(tiny, "broken")])
    assert tokens(llm, [PROMPT], None) == [tiny.greedy(PROMPT, None, COUNT)]
    rewrite_config(folder, use_dora=False)
    assert tokens(llm, [PROMPT], request(tiny, "broken")) == [tiny.greedy(PROMPT, "few", COUNT)]


def test_adapters_named_at_start(tiny: TinyAdapters) -> None:
    modules = [f"{name}={tiny.path(name)}" for name in RECIPES]
    with start(tiny, lora_modules=modules) as llm:
        assert tokens(llm, [PROMPT], LoRARequest("stable")) == [
            tiny.greedy(PROMPT, "stable", COUNT)
        ]
        [result] = llm.generate("hello", GREEDY, lora_request=LoRARequest("all"))
        assert len(result.outputs[0].token_ids) == COUNT


def test_a_rank_over_the_limit_is_refused(tiny: TinyAdapters) -> None:
    with start(tiny, max_lora_rank=4) as llm, pytest.raises(RequestError, match="--max-lora-rank"):
        tokens(llm, [PROMPT], request(tiny, "all"))


def test_an_engine_without_lora_takes_no_adapter(tiny: TinyAdapters) -> None:
    with start(tiny, enable_lora=False) as llm:
        with pytest.raises(RequestError, match="--enable-lora"):
            tokens(llm, [PROMPT], request(tiny, "all"))
        with pytest.raises(RequestError, match="--enable-lora"):
            llm.load_adapter("a", tiny.path("all"))


def test_lora_requests_must_be_one_or_one_per_prompt(tiny: TinyAdapters, llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 1 entries of lora_request"):
        tokens(llm, [PROMPT, PROMPT], [request(tiny, "all")])


def test_s05_another_number_or_folder_says_that_a_name_has_other_weights(
    tiny: TinyAdapters, llm: LLM
) -> None:
    """N20: as loops that train do it, into a folder for each step or into one. The number had no
    effect, so that files that were written over gave the old weights' answers."""
    out = tiny.dirs / "out"
    for number, name in enumerate(("all", "other", "stable"), start=1):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tiny.dirs / name, out)
        wanted = [tiny.greedy(PROMPT, name, COUNT)]
        assert tokens(llm, [PROMPT], LoRARequest("policy", number, str(out))) == wanted
        assert tokens(llm, [PROMPT], LoRARequest("policy", number, tiny.path(name))) == wanted
        assert tokens(llm, [PROMPT], LoRARequest("policy")) == wanted
    again = LoRARequest("policy", lora_path=tiny.path("few"), load_inplace=True)
    assert tokens(llm, [PROMPT], again) == [tiny.greedy(PROMPT, "few", COUNT)]
    two = [LoRARequest("policy", number, tiny.path("few")) for number in (7, 8)]
    with pytest.raises(RequestError, match="lora_int_id 7 and 8 in one call"):
        tokens(llm, [PROMPT, PROMPT], two)


def test_a_number_that_does_not_change_reads_nothing(tiny: TinyAdapters, llm: LLM) -> None:
    """And a folder that can't be read leaves the name what it was."""
    it = LoRARequest("it", 1, tiny.path("few"))
    wanted = [tiny.greedy(PROMPT, "few", COUNT)]
    assert tokens(llm, [PROMPT], it) == wanted
    num_reads = len(llm._loop.take_loads())
    assert num_reads > 0
    assert tokens(llm, [PROMPT, PROMPT], [it, LoRARequest("it")]) == wanted * 2
    assert llm._loop.take_loads() == []
    with pytest.raises(RequestError, match="nowhere"):
        tokens(llm, [PROMPT], LoRARequest("it", 2, "/nowhere"))
    assert tokens(llm, [PROMPT], LoRARequest("it")) == wanted


def test_s05_a_stream_keeps_what_comes_while_an_adapter_is_loaded(
    tiny: TinyAdapters, tmp_path: Path
) -> None:
    """Those tokens were lost, and the text continued after them."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    chat = [{"role": "user", "content": "hello"}]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with start(tiny, chat_template=str(template)) as llm:
        wanted = llm.chat(chat, long)[0].outputs[0].text
        stream = llm.stream_chat(chat, long)
        text = next(stream)
        llm.load_adapter("few", tiny.path("few"))
        llm.unload_adapter("few")
        assert text + "".join(stream) == wanted
