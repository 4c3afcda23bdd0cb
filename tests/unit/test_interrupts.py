"""Ctrl-C (R08): a real SIGINT at random moments ends the call, and the engine answers the next."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.patience import PATIENCE_S
from tests.helpers.slow_steps import slow_steps
from tests.helpers.tiny_adapters import TinyAdapters
from tests.unit.text.tiny_tokenizer import TEMPLATE

SCRIPT = """
import os, random, signal, sys, threading, time
from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.errors import NotFoundError

model, adapter, seed = sys.argv[1:]
rng = random.Random(int(seed))
llm = LLM(model, enable_lora=True, dtype="float32", block_size=4, num_gpu_blocks_override=256)
prompts = [[(7 * i + j) % 200 for j in range(5 + 3 * i)] for i in range(6)]
loras = [LoRARequest("few", 1, adapter) if i % 2 else None for i in range(6)]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
endless = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
chat = [{"role": "user", "content": "hello world"}]


def right():
    return [r.outputs[0].token_ids for r in llm.generate(prompts, greedy, lora_request=loras)]


def stream():
    for piece in llm.stream_chat(chat, endless):
        pass


works = [
    lambda: llm.generate(prompts, endless, lora_request=loras),
    stream,
    lambda: llm.load_adapter("more", adapter, load_inplace=True),
]
is_working = False


def interrupt(number, frame):
    global is_working
    if is_working:  # the others of three signals may come when the work is over
        is_working = False
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt)
wanted = right()
num_interrupted = 0
for turn in range(9):
    begun = threading.Event()

    def strike():
        begun.wait()
        time.sleep(rng.random() * 0.05)
        for _ in range(rng.choice((1, 1, 3))):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        is_working = True
        begun.set()
        while True:
            works[turn % 3]()
    except KeyboardInterrupt:
        num_interrupted += 1
    thread.join()
    assert right() == wanted, turn
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == stats.num_held_pages == 0, stats
assert signal.getsignal(signal.SIGINT) is interrupt
assert num_interrupted == 9
llm.close()
print("fine")
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    tiny = TinyAdapters(tmp_path_factory.mktemp("tiny"))
    (tiny.model / "chat_template.jinja").write_text(TEMPLATE)
    return tiny


def test_r08_an_interrupted_llm_gives_pages_back_and_right_tokens(tiny: TinyAdapters) -> None:
    """R08: 9 signals, in generate, in a stream and while adapters load."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny.model), tiny.path("few"), "1"],
        capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("fine")


def heed_interrupts() -> None:
    """A suite that runs in the background ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command in a terminal of its own, at which a person can press Ctrl-C."""

    def __init__(self, env: dict[str, str], *command: str) -> None:
        self._here, there = pty.openpty()
        os.set_blocking(self._here, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyroots.cli", *command],
            stdin=there, stdout=there, stderr=there, start_new_session=True,
            env={**env, "TERM": "dumb"}, preexec_fn=heed_interrupts,
        )  # fmt: skip
        os.close(there)
        self.shown = ""

    def read_until(self, pattern: str) -> None:
        """Wait until the pattern shows; forgets everything up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            try:
                self.shown += os.read(self._here, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
            except OSError as error:  # the other end is closed
                raise AssertionError(f"no {pattern!r} in {self.shown!r}") from error
        self.shown = self.shown[found.end() :]

    def write(self, text: str) -> None:
        os.write(self._here, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._here)


def test_r08_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(tiny: TinyAdapters) -> None:
    """R08: and what is asked after it is answered."""
    env = slow_steps(tiny.model.parent)
    terminal = Terminal(env, "chat", str(tiny.model), "--max-tokens", "200")
    try:
        terminal.read_until("> ")
        for _ in range(3):
            terminal.write("hello\n")
            terminal.read_until("step 3")
            terminal.interrupt()
            terminal.read_until("interrupted")
            terminal.write("/reset\n")
            terminal.read_until("(?s)> .*> ")
        terminal.interrupt()
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()


def test_r08_an_interrupted_generate_exits_130_without_a_traceback(tiny: TinyAdapters) -> None:
    """R08"""
    process = subprocess.Popen(
        [sys.executable, "-m", "manyroots.cli", "generate", "hello", "--model", str(tiny.model),
         "--max-tokens", "200"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=slow_steps(tiny.model.parent), preexec_fn=heed_interrupts,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while process.stderr.readline() != "step 3\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
