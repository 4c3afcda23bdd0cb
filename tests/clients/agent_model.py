"""A small random model with a long context, for agents whose prompts are long.

The default model's tokenizer and chat template, so that prompts have their real lengths; two
narrow layers, so that 20,000 tokens take seconds on a CPU. Its weights give the end of a turn one
chance in 25 at temperature 1, so that answers end.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manyroots.config import ModelSettings
from manyroots.models.source import resolve_source
from manyroots.text.tokenizer_files import load_tokenizer

CONTEXT = 65_536
_VOCABULARY, _WIDTH, _END = 49_152, 64, 2
_MEAN_TOKENS = 25


def write_agent_model(folder: Path, tokenizer: Path) -> None:
    """`tokenizer`: the default model's, as a folder of transformers'."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    own = load_tokenizer(str(resolve_source(ModelSettings()).path))
    config["chat_template"] = own.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=_WIDTH, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
            eos_token_id=_END, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        # One large value in every embedding: after the last norm it is the square root of the
        # width, and the head sees it as a constant.
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[_END] = 0.0
        model.lm_head.weight[_END, 0] = math.log(_VOCABULARY / _MEAN_TOKENS) / math.sqrt(_WIDTH)
    model.save_pretrained(folder)
