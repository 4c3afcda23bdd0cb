"""Train an adapter with TRL's GRPOTrainer while manyroots generates the completions.

    pip install -e '.[train]' trl==1.16.0
    python examples/trl_grpo.py

The model has random weights and a tokenizer of single bytes, so this runs on a CPU in seconds. Each
training step publishes the adapter's current weights from memory, then samples with them. The
reward is the share of vowels in a completion.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from manyroots import LLM, LoRARequest, SamplingParams
from rl_loop import make_model

NUM_GENERATIONS, MAX_TOKENS = 4, 16
PROMPTS = ["Once upon a time", "In the beginning"]


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward of each completion."""
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


class Rollouts:
    """`rollout_func` of the trainer: publish the newest weights, then sample from them."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.revisions: list[str] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        policy = trainer.model
        tensors = get_peft_model_state_dict(policy)
        reply = self._llm.publish_adapter("policy", tensors, policy.peft_config["default"])
        self.revisions.append(reply.digest)
        # The trainer repeats each prompt once per generation, so each gets one completion here.
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
        outputs = self._llm.generate(prompts, params, lora_request=LoRARequest("policy"))
        chosen = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
            "completion_ids": [list(choice.token_ids) for choice in chosen],
            "logprobs": [_logprobs(choice) for choice in chosen],
        }


def _logprobs(choice: Any) -> list[float]:
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return [position[token].logprob for token, position in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        tokenizer.pad_token = tokenizer.eos_token = "Ġ"  # a token that the vocabulary has
        rollouts = Rollouts(LLM(str(folder), dtype="float32", enable_lora=True))
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            processing_class=tokenizer,
            reward_funcs=vowels,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"]),
            rollout_func=rollouts,
            args=GRPOConfig(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=2 * NUM_GENERATIONS,
                num_generations=NUM_GENERATIONS,
                max_completion_length=MAX_TOKENS,
                max_steps=steps,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
        )
        trainer.train()
        print(f"{len(set(rollouts.revisions))} revisions in {steps} steps")


if __name__ == "__main__":
    main()
