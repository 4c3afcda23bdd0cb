"""`LLM` with wrong arguments, by several threads, after a fork and after `close` (S05)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.errors import RequestError, UnavailableError
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.text.tiny_tokenizer import TEMPLATE

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    return TinyAdapters(tmp_path_factory.mktemp("tiny"))


def start(tiny: TinyAdapters) -> LLM:
    template = tiny.model.parent / "chat.jinja"
    template.write_text(TEMPLATE)
    return LLM(
        tiny.model, dtype="float32", enable_lora=True, num_gpu_blocks_override=256, block_size=4,
        chat_template=str(template),
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny: TinyAdapters) -> Iterator[LLM]:
    with start(tiny) as llm:
        yield llm


def tokens(llm: LLM, prompt: Any, sampling: SamplingParams = GREEDY, **more: Any) -> list[int]:
    return llm.generate([prompt], sampling, **more)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prompts": b"hello"}, "prompts is b'hello'; it must be a text"),
        ({"prompts": [b"hello"]}, r"prompts\[0\] is b'hello'; it must be a text"),
        ({"prompts": {"prompt": ["a"]}}, r"prompts\[0\]\['prompt'\] is \['a'\]; it must be a text"),
        ({"prompts": ["a", [5, 999]], "sampling_params": GREEDY}, r"prompts\[1\] holds the token"),
        ({"sampling_params": [{"n": 1}]}, r"sampling_params\[0\] is .* of type SamplingParams"),
        ({"lora_request": ["all"]}, r"lora_request\[0\] is 'all'; .* of type LoRARequest"),
        ({"priority": ["low"]}, r"priority\[0\] is 'low'; it must be of type int"),
        ({"cache_salt": 5}, "cache_salt is 5; it must be of type str or None"),
        ({"prompts": {"prompt": "a", "cache_salt": 5}}, "cache_salt is 5; it must be of type str"),
        ({"retention": [5]}, r"retention\[0\] is 5; it must be of type KeepRange"),
        ({"retention": 5}, "retention is 5; it must be of type Sequence"),
    ],
)
def test_s05_a_wrong_argument_is_refused_by_name(
    llm: LLM, wrong: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        llm.generate(**{"prompts": ["a"], "sampling_params": [GREEDY], **wrong})


def test_s05_wrong_chats_and_adapters_are_refused_by_name(llm: LLM) -> None:
    chat: Any = CHAT
    number: Any = 5
    with pytest.raises(RequestError, match=r"messages is \{'role'.*; it must be a list"):
        llm.chat(chat[0], GREEDY)
    with pytest.raises(RequestError, match="chat_template_kwargs is 5; it must be of type"):
        llm.chat(chat, GREEDY, chat_template_kwargs=number)
    with pytest.raises(RequestError, match="n is 2; a stream is of one answer"):
        next(llm.stream_chat(chat, SamplingParams(n=2)))
    with pytest.raises(RequestError, match="name is 5; it must be of type str"):
        llm.unload_adapter(number)
    with pytest.raises(RequestError, match=r"path is 5; it must be of type str or os\.PathLike"):
        llm.load_adapter("five", number)
    with pytest.raises(RequestError, match="a is a int; give a torch tensor"):
        llm.publish_adapter("five", {"a": number}, {"peft_type": "LORA"})


def test_s05_none_among_the_parameters_means_the_default(llm: LLM) -> None:
    params: Any = [GREEDY, None]
    greedy, default = llm.generate([[1, 2], [3, 4]], params)
    assert len(greedy.outputs[0].token_ids) == 5
    assert default.finished


def test_s05_calls_of_several_threads_run_one_after_the_other(llm: LLM, tiny: TinyAdapters) -> None:
    """Their steps would mix, and the engine would not serve any call afterwards."""
    few = LoRARequest("few", 1, tiny.path("few"))
    prompts = [[i + 1, 7, 9] for i in range(4)]
    wanted = [tokens(llm, prompt, LONGER, lora_request=few) for prompt in prompts]
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        found[index] = tokens(llm, prompts[index], LONGER, lora_request=few)

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [found.get(i) for i in range(4)] == wanted


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_s05_a_forked_process_is_told_to_make_its_own(llm: LLM) -> None:
    """It has none of the engine's threads, and would wait for them without end."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends this process, should it wait
        status = 1
        try:
            llm.close()  # closes nothing of its parent's
            llm.generate([[1, 2]], GREEDY)
        except UnavailableError as error:
            status = 0 if f"belongs to process {os.getppid()}" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert len(tokens(llm, [1, 2])) == 5


def test_s05_a_closed_llm_says_so(tiny: TinyAdapters) -> None:
    """Calls would wait for the engine's threads without end."""
    llm = start(tiny)
    stream = llm.stream_chat(CHAT, LONGER)
    next(stream)
    llm.close()
    llm.close()
    llm.sleep()
    for call in (
        lambda: llm.generate("a", GREEDY),
        lambda: llm.chat(CHAT, GREEDY),
        lambda: next(llm.stream_chat(CHAT, GREEDY)),
        lambda: llm.load_adapter("few", tiny.path("few")),
        llm.reset_prefix_cache,
        llm.wake_up,
        llm.stats,
    ):
        with pytest.raises(UnavailableError, match="this LLM is closed; make another one"):
            call()
    stream.close()


def test_s05_a_stream_can_be_left_while_its_llm_is_asleep(tiny: TinyAdapters) -> None:
    with start(tiny) as llm:
        stream = llm.stream_chat(CHAT, LONGER)
        next(stream)
        llm.sleep()
        stream.close()
        llm.wake_up()
        assert len(tokens(llm, [1, 2])) == 5
