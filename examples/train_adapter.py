"""Teach the default model a way of speaking, as a small LoRA adapter, on a CPU, in minutes.

    pip install -e '.[train]'
    python examples/train_adapter.py --style pirate --output my-pirate

What happens: the default model (SmolLM2-135M-Instruct) is fetched if it is not there, some
hundred plain answers are rewritten in the style (`speech/styles.py`), and PEFT trains low-rank
matrices beside the frozen weights until the model gives such answers itself. The folder then
holds `adapter_config.json` and `adapter_model.safetensors` (bfloat16), which is what the server
loads. At the end the adapter answers questions it has never seen, so that you can hear it.

Nothing else is downloaded; order and weights follow --seed. Sixty steps cost about six minutes of
CPU time, in two threads.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from rich.progress import Progress

from check_adapter import report
from speech.base_model import BASE_NAME, Chat, Message, base_model_file, load_base, load_chat
from speech.plain_answers import Pair, plain_answers
from speech.styles import STYLES, Style

SYSTEM_PROMPTS = (
    None,
    None,
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly, in plain words.",
)
"""None is the template's own. The style must not hang on one system prompt."""
IGNORED = -100
"""The label that torch's cross entropy leaves out."""

Sample = tuple[list[int], list[int]]


def conversations(style: Style, rng: random.Random) -> Iterator[list[Message]]:
    """All pairs once, in random order, as chats of one or two questions."""
    pairs = plain_answers()
    rng.shuffle(pairs)
    while pairs:
        turns = [pairs.pop() for _ in range(min(len(pairs), rng.choice((1, 1, 2))))]
        yield messages_of(turns, style, rng.choice(SYSTEM_PROMPTS))


def messages_of(turns: list[Pair], style: Style, system: str | None) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": style.restyle(answer)})
    return messages


def encode(messages: list[Message], chat: Chat) -> Sample:
    """Token ids and labels: only what the assistant says, and where it stops, is learned."""
    ids: list[int] = []
    labels: list[int] = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = chat.prompt(messages[:position])
        # The template opens each prompt with all that came before, so only its end is new.
        assert prompt[: len(ids)] == ids
        answer = [*chat.encode(message["content"]), chat.end_token]
        labels += [IGNORED] * (len(prompt) - len(labels)) + answer
        ids = prompt + answer
    return ids, labels


def batches(style: Style, chat: Chat, size: int, seed: int) -> Iterator[list[Sample]]:
    """Batches without end."""
    rng = random.Random(seed)
    batch: list[Sample] = []
    while True:
        for messages in conversations(style, rng):
            batch.append(encode(messages, chat))
            if len(batch) == size:
                yield batch
                batch = []


def loss_of(model: Any, batch: list[Sample], pad: int) -> torch.Tensor:
    """Cross entropy of the learned tokens."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
    labels = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in batch])
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = labels[:, 1:]
    learned = wanted != IGNORED
    # Most tokens are the prompt's: not asking for their logits saves a tenth of the time.
    logits = causal.lm_head(hidden[:, :-1][learned])
    return F.cross_entropy(logits, wanted[learned])


def with_adapter(base: Any, style: Style) -> Any:
    """The base model with fresh matrices that change nothing yet."""
    config = LoraConfig(
        r=style.rank,
        lora_alpha=style.alpha,
        target_modules=list(style.target_modules),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    config = model.peft_config["default"]
    # PEFT writes where the weights lay on this machine; others need the public name.
    config.base_model_name_or_path = BASE_NAME
    # PEFT keeps a set, whose order changes from run to run.
    config.target_modules = list(style.target_modules)
    return model


def train(model: Any, data: Iterator[list[Sample]], pad: int, options: argparse.Namespace) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=options.steps, pct_start=0.1
    )
    model.train()
    with Progress() as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(1, options.steps + 1):
            loss = loss_of(model, next(data), pad)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update(task, advance=1)
            if step % 10 == 0 or step == options.steps:
                progress.console.print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()


def save(model: Any, folder: Path) -> None:
    """The two files that make an adapter, in bfloat16."""
    # Rounded before it is heard, so that the check below hears what was saved.
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    # PEFT leaves an empty form of a model card.
    (folder / "README.md").unlink(missing_ok=True)
    for weight in model.parameters():
        weight.data = weight.data.float()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--style", required=True, choices=sorted(STYLES), help="how to speak")
    parser.add_argument("--output", required=True, type=Path, help="folder for the adapter; new")
    parser.add_argument("--model", help=".gguf file of the base model (default: the default model)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--batch-size", type=int, default=8, help="chats per step (default 8)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak (default 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of order and weights (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"--output {options.output} exists; name a new folder.")
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    style = STYLES[options.style]
    path = base_model_file(options.model)
    chat = load_chat(path)
    model = with_adapter(load_base(path), style)
    data = batches(style, chat, options.batch_size, options.seed)
    train(model, data, chat.end_token, options)
    save(model, options.output)
    print(f"saved {options.output} after {time.perf_counter() - began:.0f} s")
    report(model, chat, style)


if __name__ == "__main__":
    main()
