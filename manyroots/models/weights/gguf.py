"""Tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint.

Takes an open `GGUFFile`; gives (checkpoint name, float32 tensor) pairs. Undoes what the
conversion to GGUF did: names, and for the llama architecture the order of the rows of q and k.
Experts stay stacked, as the file has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models.weights.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: divides the rotary frequencies. Read with the config."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def tensors(file: GGUFFile, *, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the file."""
    heads = {}
    if file.metadata.get("general.architecture") == "llama":
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        own_name = checkpoint_name(name, file)
        tensor = torch.from_numpy(file.read(name))
        part = name.split(".")[-2]
        if part in heads:
            if tensor.shape[0] % (2 * heads[part]):
                raise ModelError(
                    f"{name} of {file.path} has {tensor.shape[0]} rows, which {heads[part]} heads "
                    "can't share in pairs; the file's metadata belongs to another model."
                )
            tensor = halves_from_pairs(tensor, heads[part])
        yield own_name, tensor


def checkpoint_name(name: str, file: GGUFFile) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", index, part, kind] if part in _IN_BLOCK:
            return f"model.layers.{index}.{_IN_BLOCK[part]}.{kind}"
        case [part, kind] if part in _TOP:
            return f"{_TOP[part]}.{kind}"
    raise ModelError(
        f"{file.path} has a tensor {name!r}, which no architecture served here has; "
        "use a file of a llama, qwen2, qwen3 or qwen3moe model."
    )


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the output rows of each head.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; this engine, like transformers,
    rotates row i with row i + head_dim / 2.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
