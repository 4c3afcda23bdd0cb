"""PEFT's options, by what they mean for serving: honoured, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyroots.errors import AdapterError
from manyroots.lora.files.folder import CONVERT_MLX

_HONOURED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "ensure_weight_tying",
        "lora_alpha",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
"""Read in `config.py`."""

_WITHOUT_EFFECT = frozenset(
    {
        # Which modules were trained: the weights in the file tell.
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        # Only while training, or before it.
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "runtime_config",
        # Said about the adapter, or only with an option that is refused when set.
        "auto_mapping",
        "base_model_name_or_path",
        "megatron_core",
        "model_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
        "unsloth_fixed",
        # Read below.
        "bias",
        "init_lora_weights",
        "peft_type",
    }
)

_REFUSED = {
    "arrow_config": "routes between adapters (Arrow)",
    "enable_lora": "is an option of long ago",
    "fan_in_fan_out": "is for layers with transposed weights, which no model here has",
    "invocation_string": "is an aLoRA of before PEFT; give alora_invocation_tokens instead",
    "kasa_config": "adds singular values to the adapter (KaSA)",
    "layer_replication": "repeats layers of the base model",
    "lora_bias": "adds biases to the adapter",
    "megatron_config": "is for Megatron's parallel layers",
    "modules_to_save": "replaces whole modules of the base model",
    "monteclora_config": "samples the adapter's weights (MonteCLoRA)",
    "trainable_token_indices": "changes single tokens of the embedding",
    "use_bdlora": "has block-diagonal matrices",
    "use_dora": "is DoRA, which rescales the base weights",
    "use_mora": "is MoRA",
    "use_qalora": "is QALoRA, which pools its input",
    "velora_config": "is VeLoRA",
}

_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""The adapter is a difference to base weights that its start has changed."""
_OTHER_INITS = ("gaussian", "eva", "orthogonal", "mica")


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse what would change the output and is not honoured."""
    kind = fields.get("peft_type")
    if kind is None and "lora_parameters" in fields:
        raise AdapterError(f"lora_parameters is an option of MLX; {CONVERT_MLX}")
    if kind is None:
        raise AdapterError(
            "peft_type is None; only LORA adapters are served. If this is one, say so in the "
            'config: "peft_type": "LORA".'
        )
    if kind != "LORA":
        raise AdapterError(
            f"peft_type is {_short(kind)}; only LORA adapters are served. Train one of that kind, "
            "or merge this one into the base model and serve that."
        )
    bias = fields.get("bias", "none")
    if bias not in ("none", None):
        raise AdapterError(
            f"bias is {_short(bias)}: the adapter changes biases of the base model, which is not "
            "served. Train with bias='none'."
        )
    _refuse_changed_base(fields.get("init_lora_weights", True))
    for name, value in fields.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or not value:
            continue
        if name in _REFUSED:
            raise AdapterError(
                f"{name} is {_short(value)}: it {_REFUSED[name]}, which is not served. Train "
                "without it, or merge the adapter into the base model and serve that."
            )
        raise AdapterError(
            f"the option {name[:100]!r} is {_short(value)}, and this version does not know what "
            "it changes. Remove it from the config if the adapter computes the same without."
        )


def _refuse_changed_base(init: Any) -> None:
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise AdapterError(
            f"init_lora_weights is {_short(init)}: training began by changing the base weights, so "
            "on the base model itself this adapter would compute something else. Save it "
            "converted (PEFT: save_pretrained with path_initial_model_for_weight_conversion)."
        )
    if not (init is None or isinstance(init, bool)) and str(init).lower() not in _OTHER_INITS:
        raise AdapterError(
            f"init_lora_weights is {_short(init)}, and this version does not know whether that "
            "changes the base weights. If it does not, set it to true in the config."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
