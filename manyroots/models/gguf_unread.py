"""GGUF metadata that changes what a model computes and that this version does not support.

Takes an open `GGUFFile`; raises a ModelError that names the key and its value, unless the value
changes nothing. Descriptive keys, and those of other rooms, pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyroots.errors import ModelError
from manyroots.models.architecture import GgufForm
from manyroots.models.fields import shown
from manyroots.models.weights.gguf_file import GGUFFile

_ONE = (1, 1.0)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (),
    "attention.kv_lora_rank": (),
    "attention.max_alibi_bias": (),
    "attention.output_scale": _ONE,
    "attention.q_lora_rank": (),
    "attention.scale": (),
    "attention.shared_kv_layers": (),
    "attention.temperature_length": (),
    "attention.temperature_scale": (),
    "attn_logit_softcapping": (),
    "embedding_scale": _ONE,
    "expert_gating_func": _ONE,
    "expert_group_count": _ONE,
    "expert_group_scale": _ONE,
    "expert_group_used_count": _ONE,
    "expert_shared_count": (),
    "expert_weights_scale": _ONE,
    "final_logit_softcapping": (),
    "interleave_moe_layer_step": _ONE,
    "leading_dense_block_count": (),
    "logit_scale": _ONE,
    "moe_every_n_layers": _ONE,
    "nextn_predict_layers": (),
    "residual_scale": _ONE,
    "rope.scaling.alpha": _ONE,
    "rope.scaling.attn_factor": _ONE,
    "rope.scaling.yarn_attn_factor": _ONE,
    "rope.scaling.yarn_ext_factor": (*_ONE, -1.0),
    "rope.scaling.yarn_log_multiplier": (),
    "router_logit_softcapping": (),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
    "use_parallel_residual": (),
}
"""By key, without the architecture's prefix: values besides zero that change nothing."""
_HEAD_SIZES = (
    "attention.key_length_swa",
    "attention.value_length",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
"""Keys with only one supported size."""


def refuse_unread(file: GGUFFile, form: GgufForm, head_dim: int) -> None:
    """Refuse metadata that would otherwise be ignored."""
    neutral = _NEUTRAL | dict.fromkeys(_HEAD_SIZES, (head_dim,))
    neutral["attention.scale"] = (_as_float32(head_dim**-0.5),)
    if file.metadata.get(f"{form.name}.rope.scaling.type") == "yarn":
        del neutral["rope.scaling.yarn_attn_factor"]  # read with the other fields of YaRN
    for key, values in neutral.items():
        value = file.metadata.get(f"{form.name}.{key}")
        if value and value not in values and key not in form.reads:
            raise ModelError(
                f"{form.name}.{key} of {file.path} is {shown(value)}, which this version does not "
                "compute. Use the model as safetensors, or a file without it."
            )


def _as_float32(number: float) -> float:
    """The number as a file stores it."""
    return float(np.float32(number))
