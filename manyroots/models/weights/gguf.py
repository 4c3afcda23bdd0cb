"""Tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint.

Takes an open `GGUFFile`, its architecture's form and the model's spec; gives (checkpoint name,
float32 tensor) pairs. Undoes the conversion to GGUF: the names, and the numbers by the
architecture's `restore`. Experts stay stacked, as in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models.architecture import GgufForm
from manyroots.models.spec import ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: divides the rotary frequencies. Read with the config."""
_NO_WEIGHTS = ("rope_freqs.", "rope_factors_")
"""Read with the config."""
_OF_PREDICTION = ".nextn."
"""In names around the layer that predicts tokens ahead (MTP), which is not read from such files."""
OF_TOKENS = ("token_embd.weight", "output.weight")
"""Embedding and head; models that tie them have only the first."""

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


def tensors(file: GGUFFile, form: GgufForm, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the file."""
    for name in file.tensors:
        if name.startswith(_NO_WEIGHTS) or _OF_PREDICTION in name:
            continue
        own_name = checkpoint_name(name, file, form.in_block)
        tensor = torch.from_numpy(file.read(name))
        try:
            yield own_name, form.restore(name.split(".")[-2], tensor, spec)
        except ValueError as error:
            raise ModelError(
                f"{name} of {file.path} {error}; the file's metadata belongs to another model."
            ) from error


def checkpoint_name(name: str, file: GGUFFile, in_block: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. `in_block`: parts with
    other names in an architecture."""
    match name.split("."):
        case ["blk", index, part, kind] if part in in_block or part in _IN_BLOCK:
            return f"model.layers.{index}.{in_block.get(part) or _IN_BLOCK[part]}.{kind}"
        case [part, kind] if part in _TOP:
            return f"{_TOP[part]}.{kind}"
    raise ModelError(
        f"{file.path} has a tensor {name!r}, which models of architecture "
        f"{file.metadata.get('general.architecture')!r} don't have here; convert the model again."
    )


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the output rows of each head.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; this engine, like transformers,
    rotates row i with row i + head_dim / 2.
    """
    if rows.shape[0] % (2 * num_heads):
        raise ValueError(f"has {rows.shape[0]} rows, which {num_heads} heads can't share in pairs")
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
