"""Tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint.

Takes an open `GGUFFile`; gives (checkpoint name, float32 tensor) pairs. Undoes what the
conversion to GGUF did: names; for the llama architecture the order of the rows of q and k; for
Gemma the 1 that was added to the weights of norms. Experts stay stacked, as the file has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models.weights.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: divides the rotary frequencies. Read with the config."""
OF_TOKENS = ("token_embd.weight", "output.weight")
"""Embedding and head; models that tie them have the first alone."""

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

_GEMMA_IN_BLOCK = _IN_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def tensors(file: GGUFFile, *, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the file."""
    heads = {}
    arch = file.metadata.get("general.architecture")
    if arch == "llama":
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
        if arch == "gemma3" and part.endswith("_norm"):
            tensor = tensor - 1.0  # in float32, as transformers takes it off
        yield own_name, tensor


def checkpoint_name(name: str, file: GGUFFile) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    is_gemma = file.metadata.get("general.architecture") == "gemma3"
    in_block = _GEMMA_IN_BLOCK if is_gemma else _IN_BLOCK
    match name.split("."):
        case ["blk", index, part, kind] if part in in_block:
            return f"model.layers.{index}.{in_block[part]}.{kind}"
        case [part, kind] if part in _TOP:
            return f"{_TOP[part]}.{kind}"
    raise ModelError(
        f"{file.path} has a tensor {name!r}, which no architecture served here has; "
        "use a file of a llama, qwen2, qwen3, qwen3moe or gemma3 model."
    )


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the output rows of each head.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; this engine, like transformers,
    rotates row i with row i + head_dim / 2.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
