"""Tiny transformers models with PEFT adapters on them, and the same adapters as our host copies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.lora.spec import AdapterSpec
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights
from tests.unit.models.tiny import load_tiny, save_tiny

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EVERYTHING = [*ATTENTION, *MLP, "embed_tokens", "lm_head"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2, "target_modules": ATTENTION + MLP},
    "rank 4, queries alone": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]},
    "rank 8, keys and down": {"r": 8, "lora_alpha": 32, "target_modules": ["k_proj", "down_proj"]},
    "rank 16": {"r": 16, "lora_alpha": 16, "target_modules": ATTENTION + MLP},
    "rank 64, rank-stabilised": {
        "r": 64,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ATTENTION + MLP,
    },
    "patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 17},
        "alpha_pattern": {"v_proj": 24, "layers.0.mlp.up_proj": 1},
    },
    "embedding and head": {"r": 6, "lora_alpha": 3, "target_modules": ["embed_tokens", "lm_head"]},
    "everything": {"r": 5, "lora_alpha": 10, "target_modules": EVERYTHING},
}


@dataclass(frozen=True)
class Pair:
    """PEFT's model and ours, with the same adapters by slot."""

    theirs: PeftModel
    ours: Decoder
    pool: AdapterPool
    slot_of: dict[str, int]

    @torch.no_grad()
    def expected(self, adapter: str | None, tokens: list[int]) -> Tensor:
        """PEFT's logits [num_tokens, vocabulary]."""
        if adapter is not None:
            self.theirs.set_adapter(adapter)
        with self.theirs.disable_adapter() if adapter is None else nullcontext():
            logits: Tensor = self.theirs(input_ids=torch.tensor([tokens])).logits[0]
        return logits


def make_pair(folder: Path, kind: str, adapters: dict[str, dict[str, Any]], **changes: Any) -> Pair:
    """Everything passes through files: the model's, and each adapter's as PEFT saves it."""
    base = save_tiny(folder / "base", kind, **changes)
    ours = load_tiny(folder / "base")
    pool = pool_for(ours, num_slots=len(adapters))
    theirs: Any = None
    for name, options in adapters.items():
        torch.manual_seed(len(name))
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        if theirs is None:
            theirs = get_peft_model(base, config, adapter_name=name)
        else:
            theirs.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_embedding_A" in name:
                # Drawn from a normal distribution, these would drown the model's own embedding.
                parameter.mul_(0.1)
    theirs.save_pretrained(folder, save_embedding_layers=False)
    slot_of = {name: slot for slot, name in enumerate(adapters)}
    for name, slot in slot_of.items():
        pool.load(AdapterSlot(slot), read(folder / name, ours)[1])
    return Pair(theirs.eval(), ours, pool, slot_of)


def pool_for(model: Decoder, *, num_slots: int) -> AdapterPool:
    return AdapterPool(
        model.lora_parts(),
        num_slots=num_slots,
        max_rank=64,
        dtype=model.dtype,
        device=model.device,
    )


def read(folder: Path, model: Decoder) -> tuple[AdapterSpec, AdapterWeights]:
    return read_adapter(
        folder,
        model.adapter_targets(),
        max_rank=64,
        dtype=torch.float32,
        vocab_size=model.spec.vocab_size,
    )
