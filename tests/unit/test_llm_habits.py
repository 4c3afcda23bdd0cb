"""`LLM` as scripts written for vLLM use it (S05): their names, forms of prompts and outputs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.config import engine_settings
from manyroots.errors import ConfigError, RequestError, UnavailableError
from manyroots.flag_aliases import translate_settings
from tests.helpers.tiny_adapters import TinyAdapters

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41, 42, 43]
CHAT = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if loud %}LOUD{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


def start(tiny: TinyAdapters, **more: Any) -> LLM:
    template = tiny.model.parent / "chat.jinja"
    template.write_text(TEMPLATE)
    return LLM(
        model=tiny.model, tokenizer=str(tiny.model), dtype=torch.float32, seed=0, enable_lora=True,
        max_lora_rank=16, max_loras=2, tensor_parallel_size=1, gpu_memory_utilization=0.8,
        trust_remote_code=True, enforce_eager=True, disable_log_stats=True, swap_space=4,
        enable_sleep_mode=True, enable_chunked_prefill=True, max_logprobs=20, block_size=4,
        max_model_len=64, num_gpu_blocks_override=128, weights_dirs=[str(tiny.model.parent)],
        chat_template=str(template), **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(tiny: TinyAdapters) -> Iterator[LLM]:
    with start(tiny) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, **more: Any) -> list[list[int]]:
    results = llm.generate(prompts, GREEDY, use_tqdm=False, **more)
    return [result.outputs[0].token_ids for result in results]


def settled(**given: Any) -> Any:
    return engine_settings(translate_settings(given)[0])


def test_s05_names_of_theirs_are_taken_renamed_or_told() -> None:
    """What the command line takes, Python takes."""
    assert settled(dtype="half").model.dtype == "float16"
    assert settled(dtype=torch.bfloat16).model.dtype == "bfloat16"
    assert settled(model_path=Path("a"), context_length=99).model.max_model_len == 99
    assert not settled(disable_radix_cache=True).cache.enable_prefix_caching
    assert settled(max_model_len=-1, seed=None, speculative_config=None).model.seed == 0
    assert settled(skip_tokenizer_init=False)
    _, notes = translate_settings({"trust_remote_code": True, "compilation_config": {"level": 3}})
    assert len(notes) == 2
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size is '2'; only 1"):
        settled(pipeline_parallel_size=2)
    assert settled(speculative_config={"method": "ngram"}).scheduler.speculation()
    with pytest.raises(ConfigError, match="method 'eagle3'; this engine serves 'suffix'"):
        settled(speculative_config={"method": "eagle3"})
    with pytest.raises(ConfigError, match="unknown setting 'max_modle_len'"):
        settled(max_modle_len=5)


def test_s05_prompts_come_in_every_form(shared: LLM) -> None:
    [wanted] = tokens(shared, PROMPT)
    many: list[Any] = [
        PROMPT, tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT),
        {"prompt_token_ids": PROMPT}, {"prompt_token_ids": torch.tensor(PROMPT), "prompt": "x"},
    ]  # fmt: skip
    assert tokens(shared, many) == [wanted] * len(many)
    assert tokens(shared, np.array([PROMPT, PROMPT])) == [wanted] * 2
    assert tokens(shared, None, prompt_token_ids=[PROMPT]) == [wanted]
    assert (
        tokens(shared, {"prompt": "hello"}) == tokens(shared, "hello") == tokens(shared, ["hello"])
    )
    assert tokens(shared, []) == []
    salted = shared.generate([{"prompt_token_ids": PROMPT, "cache_salt": "mine"}] * 2, GREEDY)
    assert [result.outputs[0].token_ids for result in salted] == [wanted] * 2
    for wrong, why in (
        ([{"multi_modal_data": {}, "prompt": "x"}], "text alone"), ({}, "neither prompt"),
        (5, "must be a text"), ([5.5], "must be a text"), ([[1.5]], "token id is an integer"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=why):
            tokens(shared, wrong)


def test_s05_a_salt_of_one_prompt_is_its_own(tiny: TinyAdapters) -> None:
    with start(tiny) as llm:
        tokens(llm, {"prompt_token_ids": PROMPT, "cache_salt": "mine"})
        mine, nobodys = llm.generate(
            [{"prompt_token_ids": PROMPT, "cache_salt": "mine"}, PROMPT], GREEDY
        )
        assert (mine.num_cached_tokens, nobodys.num_cached_tokens) == (12, 0)


def test_s05_logprobs_are_those_of_transformers_by_token(tiny: TinyAdapters, shared: LLM) -> None:
    """Of prompt and output: what a trainer compares with its own forward pass."""
    params = SamplingParams(
        temperature=1.0, n=3, max_tokens=6, logprobs=2, prompt_logprobs=1, seed=5, ignore_eos=True
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    for _ in range(2):  # the second time from the cache
        [result] = shared.generate([PROMPT], params)
        assert (result.request_id, result.finished) == ("0", True)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(PROMPT)
        for output in result.outputs:
            whole = [*PROMPT, *output.token_ids]
            with torch.no_grad():
                theirs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
            assert output.logprobs is not None
            ours = [*result.prompt_logprobs[1:], *output.logprobs]
            assert len(ours) == len(whole) - 1
            for at, (token, scores) in enumerate(zip(whole[1:], ours, strict=True)):
                assert scores is not None
                assert next(iter(scores)) == token
                for other, score in scores.items():
                    assert score.logprob == pytest.approx(float(theirs[at, other]), abs=2e-4)
                    assert score.decoded_token == shared.tokenizer.token_text(other)
                assert {1} <= {score.rank for score in scores.values()}
            total = math.fsum(
                scores[token].logprob
                for token, scores in zip(output.token_ids, output.logprobs, strict=True)
            )
            assert output.cumulative_logprob == pytest.approx(total)
    [plain] = shared.generate([PROMPT], GREEDY)
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_s05_a_long_prompt_of_many_ends_early_alone(shared: LLM) -> None:
    """max_tokens is for all prompts, and one of them failed the whole batch."""
    long = SamplingParams(temperature=0, max_tokens=40, min_tokens=35, ignore_eos=True)
    results = shared.generate([PROMPT, PROMPT * 4], long)
    assert [len(result.outputs[0].token_ids) for result in results] == [40, 12]
    assert [result.outputs[0].finish_reason for result in results] == ["length"] * 2
    with pytest.raises(RequestError, match="maximum context length"):
        shared.generate([PROMPT, PROMPT * 5], long)


def test_s05_chats_take_what_templates_know(shared: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    answer = {"role": "assistant", "content": "I am"}

    def prompt(chat: Any, **more: Any) -> str:
        [result] = shared.chat(chat, GREEDY, use_tqdm=False, **more)
        assert shared.tokenizer.encode(str(result.prompt), add_special_tokens=False) == (
            result.prompt_token_ids
        )
        return str(result.prompt)

    assert prompt(CHAT) == "<user>hello</><assistant>"
    assert prompt(CHAT, tools=[tool]) == "<user>hello</>look<assistant>"
    assert prompt(CHAT, chat_template_kwargs={"loud": True}) == "<user>hello</>LOUD<assistant>"
    assert prompt(CHAT, add_generation_prompt=False) == "<user>hello</>"
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt([*CHAT, answer], **goes_on) == "<user>hello</><assistant>I am"
    assert prompt(CHAT, chat_template="{{ messages[0].content }}") == "hello"


def test_s05_their_tokenizer_is_the_engines(shared: LLM) -> None:
    theirs = shared.get_tokenizer()
    assert theirs.encode("hello there") == shared.tokenizer.encode(
        "hello there", add_special_tokens=True
    )
    theirs.chat_template = TEMPLATE
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<user>hello</><assistant>"


def test_g06_a_loop_that_trains_sleeps_wakes_and_takes_weights(tiny: TinyAdapters) -> None:
    """G06, in Python: nothing of the old weights is found, and what was taken outlives a sleep."""
    folder = tiny.model.parent / "trained"
    shutil.copytree(tiny.model, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std())
    model.save_pretrained(folder)
    few = LoRARequest("few", 1, tiny.path("few"))
    with start(tiny) as llm:
        [old] = tokens(llm, PROMPT)
        assert tokens(llm, PROMPT, lora_request=few) == [tiny.greedy(PROMPT, "few", 5)]
        assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 12
        assert llm.reset_prefix_cache()
        assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0
        llm.update_weights(str(folder))
        [result] = llm.generate([PROMPT], GREEDY)
        new = result.outputs[0].token_ids
        assert result.num_cached_tokens == 0
        assert new != old
        llm.sleep(level=2)
        with pytest.raises(UnavailableError, match="asleep"):
            tokens(llm, PROMPT)
        llm.wake_up(tags=["weights", "kv_cache"])
        llm.wake_up()
        assert tokens(llm, PROMPT) == [new]
        with pytest.raises(RequestError, match="weights-dirs"):
            llm.update_weights("/elsewhere")
        llm.update_weights(str(tiny.model))
        assert tokens(llm, PROMPT, lora_request=few) == [tiny.greedy(PROMPT, "few", 5)]
        llm.sleep()
    llm.close()
