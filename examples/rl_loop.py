"""Train a policy while it is served: 20 revisions of an adapter, published under running streams.

    pip install -e '.[train]'
    python examples/rl_loop.py

A server of a tiny random model runs in a process of its own. Workers stream greedy answers from
`policy` all the time. Meanwhile each round samples answers of the newest revision, takes a step of
REINFORCE towards answers with many even tokens, and uploads the new weights. No stream stops.
At the end every answer is held against PEFT: each of its tokens must be the likeliest one by the
weights of the revision that the answer names. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import random
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
ADMIN_KEY = "only-on-this-machine"
NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS = 12, 32
BATCH = 32


def make_model(folder: Path) -> None:
    """A model of random weights, with a tokenizer of single bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    revision: str


class Server:
    """`manyroots serve`, and the two requests that this loop needs."""

    def __init__(self, model: Path, work: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "manyroots", "serve", str(model), "--port", str(self.port),
                "--served-model-name", "base", "--dtype", "float32", "--block-size", "4",
                "--num-gpu-blocks-override", "2048", "--enable-lora", "--enable-lora-endpoints",
                "--admin-key", ADMIN_KEY, "--lora-dirs", str(work), "--lora-cache-dir", str(work),
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        while True:
            if self._process.poll() is not None:
                raise SystemExit("the server ended; its log is above")
            try:
                with self._ask("GET", "/ready") as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.2)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def publish(self, folder: Path) -> str:
        """Upload a revision; gives its name."""
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as archive:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                archive.add(folder / name, arcname=name)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/x-tar"}
        path = "/v1/upload_lora_adapter?lora_name=policy"
        with self._ask("POST", path, body.getvalue(), headers) as answer:
            said = json.load(answer)
        if answer.status != 200:
            raise SystemExit(f"the upload was refused: {said}")
        return str(said["revision"])

    def stream(self, prompt: list[int]) -> Answer:
        """One greedy answer; the first event of a stream names the revision that gives it."""
        tokens: list[int] = []
        revisions: list[str] = []
        for choice in self._complete(prompt, {"temperature": 0.0, "stream": True}):
            tokens += choice.get("token_ids", [])
            if "adapter_revision" in choice:
                revisions.append(choice["adapter_revision"])
        [revision] = revisions
        return Answer(prompt, tokens, revision)

    def sample(self, prompts: list[list[int]], seed: int) -> list[Answer]:
        """Answers as likely as the policy has them."""
        choices = self._complete(prompts, {"temperature": 1.0, "seed": seed})
        return [
            Answer(prompt, choice["token_ids"], choice["adapter_revision"])
            for prompt, choice in zip(prompts, choices, strict=True)
        ]

    def _complete(self, prompt: object, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {
            "model": "policy", "prompt": prompt, "max_tokens": NUM_ANSWER_TOKENS,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        asked = json.dumps(body | more).encode()
        with self._ask("POST", "/v1/completions", asked, headers) as answer:
            if answer.status != 200:
                raise SystemExit(f"a request was refused: {answer.read()!r}")
            if "stream" not in more:
                yield from json.load(answer)["choices"]
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    yield from json.loads(line[6:])["choices"]

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, body, headers or {})
        return connection.getresponse()


@dataclass
class Workers:
    """Threads that stream greedy answers until they are told to stop."""

    server: Server
    answers: list[Answer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def start(self, count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self.is_over.is_set():
                self.answers.append(self.server.stream(random_prompt(rng)))
        except BaseException as error:
            self.failures.append(error)


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(NUM_PROMPT_TOKENS)]


def train_step(policy: Any, optimizer: torch.optim.Optimizer, samples: list[Answer]) -> float:
    """One step of REINFORCE; gives the mean reward: the share of even tokens."""
    tokens = torch.tensor([sample.prompt + sample.tokens for sample in samples])
    answered = tokens[:, NUM_PROMPT_TOKENS:]
    rewards = (answered % 2 == 0).float().mean(1)
    logits = policy(tokens).logits[:, NUM_PROMPT_TOKENS - 1 : -1]
    chosen = torch.log_softmax(logits, -1).gather(-1, answered[..., None])[..., 0]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    loss = -(advantages[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


@torch.no_grad()
def check(policy: Any, weights: dict[str, dict[str, torch.Tensor]], answers: list[Answer]) -> None:
    """Every token of every answer is the likeliest one by the revision that it names."""
    for revision, state in weights.items():
        mine = [answer for answer in answers if answer.revision == revision]
        if not mine:
            continue
        set_peft_model_state_dict(policy, state)
        tokens = torch.tensor([answer.prompt + answer.tokens for answer in mine])
        likeliest = policy(tokens).logits[:, NUM_PROMPT_TOKENS - 1 : -1].argmax(-1)
        wrong = (likeliest != tokens[:, NUM_PROMPT_TOKENS:]).any(1).sum().item()
        if wrong:
            raise SystemExit(f"{wrong} answers of revision {revision} are another's")


def run(num_revisions: int, num_workers: int, work: Path) -> None:
    model_folder = work / "model"
    make_model(model_folder)
    server = Server(model_folder, work)
    base = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    policy = get_peft_model(base, config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    weights: dict[str, dict[str, torch.Tensor]] = {}
    rng = random.Random(1)

    def publish() -> str:
        policy.save_pretrained(str(work / "policy"))
        revision = server.publish(work / "policy")
        state = get_peft_model_state_dict(policy)
        weights[revision] = {name: tensor.clone() for name, tensor in state.items()}
        return revision

    try:
        server.wait_until_ready()
        newest = publish()
        workers = Workers(server)
        threads = workers.start(num_workers)
        for number in range(1, num_revisions + 1):
            prompts = [random_prompt(rng) for _ in range(BATCH)]
            samples = server.sample(prompts, rng.randrange(2**31))
            stale = sum(sample.revision != newest for sample in samples)
            if stale:
                raise SystemExit(f"{stale} samples are of an older revision than {newest}")
            reward = train_step(policy, optimizer, samples)
            newest = publish()
            print(f"revision {number:2} {newest}: mean reward before it {reward:.3f}", flush=True)
        workers.is_over.set()
        for thread in threads:
            thread.join()
        if workers.failures:
            raise workers.failures[0]
    finally:
        server.stop()
    check(policy, weights, workers.answers)
    seen = {answer.revision for answer in workers.answers}
    print(f"{len(workers.answers)} streamed answers of {len(seen)} revisions, all as PEFT has them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--revisions", type=int, default=20)
    parser.add_argument("--streams", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        run(arguments.revisions, arguments.streams, Path(work))


if __name__ == "__main__":
    main()
