"""Tiny random models, made by transformers and saved as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from manyroots.config import ModelSettings
from manyroots.kernels.choice import Kernels
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe, load_model
from manyroots.models.source import ModelSource, SourceKind, resolve_source
from manyroots.models.spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    # Wider than usual, so that attention is far from uniform and mistakes show.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
WINDOW = 11
"""A little more than two pages of four; sequences are several times as long."""
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,  # not that of the heads' size
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", "conv"],
    "block_multiple_of": 8,
    "tie_word_embeddings": True,
}
OLMO3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 5e4},
    FULL: {**YARN, "rope_theta": 5e4},
}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 6,  # fewer than any prompt has
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.0, 1.25],
        "long_factor": [1.0, 1.5, 4.0],
    },
}
GLM: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
LATENT_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 6,
    "short_factor": [1.0, 1.0, 1.25],
    "long_factor": [1.0, 1.5, 4.0],
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
INDEX: dict[str, Any] = {"index_n_heads": 13, "index_head_dim": 14, "index_topk": 6}
DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 22,
    "qk_rope_head_dim": 6,
    "q_lora_rank": 19,
    "intermediate_size": 20,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "o_groups": 2,
    "o_lora_rank": 5,
    "index_n_heads": 9,
    "index_head_dim": 10,
    "index_topk": 5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "sliding_window": WINDOW,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "num_hash_layers": 2,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,  # low enough to change much
    "final_logit_softcapping": 2.0,
}
RECURRENT = "linear_attention"
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
GRANITE: dict[str, Any] = {
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "shared_intermediate_size": 56,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    **FACTORS,
}
FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mlp_multipliers": [1.3, 0.8],
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.6,
    "embedding_multiplier": 2.1,
    "lm_head_multiplier": 0.4,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mlp", RECURRENT, FULL, "mlp", RECURRENT, "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.3,  # so that some steps are below it
    "use_bias": True,
    "mlp_bias": True,
}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
ZERO_CENTRED = ("gemma2", "gemma3", "qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Whose norms' weights are stored less one, but for those of delta nets."""

MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "ministral": (
        MinistralConfig,
        MinistralForCausalLM,
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3-window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW,
         "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen3-moe-window": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, GPT_OSS),
    "granite-h": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, {**GRANITE, **MAMBA}),
    "granite-h-dense": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {**GRANITE, **MAMBA, "num_local_experts": 0, "position_embedding_type": "rope",
         "mamba_n_groups": 2, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "falcon-h1": (FalconH1Config, FalconH1ForCausalLM, {**FALCON, **MAMBA}),
    "falcon-h1-norm": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {**FALCON, **MAMBA, "mamba_rms_norm": True, "mamba_n_groups": 2, "projectors_bias": True},
    ),
    "qwen3-next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**DELTA, **EXPERTS, **SHARED}),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, DELTA),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        # A field of its forerunner's, which it has no more and which counts for nothing.
        {**DELTA, **EXPERTS, **SHARED, "norm_topk_prob": False},
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, FACTORS),
    "smollm3": (
        SmolLM3Config, SmolLM3ForCausalLM, {"num_hidden_layers": 4, "pad_token_id": None}
    ),
    "mixtral": (
        MixtralConfig, MixtralForCausalLM, {"num_local_experts": 8, "num_experts_per_tok": 3}
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"pad_token_id": None}),
    "olmo3": (
        Olmo3Config, Olmo3ForCausalLM,
        {"sliding_window": WINDOW, "pad_token_id": None, "num_hidden_layers": 4,
         "layer_types": [SLIDING, FULL, SLIDING, SLIDING], "rope_parameters": OLMO3_ROPES},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": None, "sliding_window": WINDOW}),
    "phi3-long": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": None, **LONGROPE}),
    "glm4-moe": (Glm4MoeConfig, Glm4MoeForCausalLM, GLM),
    "glm4-moe-norm": (
        Glm4MoeConfig, Glm4MoeForCausalLM,
        {**GLM, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False},
    ),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA2),
    "deepseek-v2": (
        DeepseekV2Config, DeepseekV2ForCausalLM,
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "rope_parameters": LATENT_YARN},
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config, DeepseekV2ForCausalLM,
        {**DEEPSEEK, "q_lora_rank": None, "mlp_bias": True},
    ),
    "deepseek-v3": (
        DeepseekV3Config, DeepseekV3ForCausalLM,
        {**DEEPSEEK, "num_mtp_layers": 0, "rope_parameters": LATENT_YARN},
    ),
    "deepseek-v3-biased": (
        DeepseekV3Config, DeepseekV3ForCausalLM,
        {**DEEPSEEK, "num_mtp_layers": 0, "attention_bias": True, "rope_interleave": False,
         "norm_topk_prob": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v32": (
        DeepseekV32Config, DeepseekV32ForCausalLM,
        {**DEEPSEEK, **INDEX, "rope_parameters": LATENT_YARN},
    ),
    "glm-moe-dsa": (
        GlmMoeDsaConfig, GlmMoeDsaForCausalLM,
        {**DEEPSEEK, **INDEX, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
         "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"],
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "deepseek-v4": (DeepseekV4Config, DeepseekV4ForCausalLM, DEEPSEEK_V4),
    "glm4-moe-lite": (
        Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM,
        {**DEEPSEEK, "n_shared_experts": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "minicpm3": (
        MiniCPM3Config, MiniCPM3ForCausalLM,
        {**LATENT, "scale_emb": 3, "dim_model_base": 24, "rope_parameters": LATENT_LONGROPE},
    ),
    "kimi-linear": (
        KimiLinearConfig, KimiLinearForCausalLM,
        {**LATENT, "q_lora_rank": None, "layer_types": [RECURRENT, FULL, RECURRENT],
         "linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 20,
         "num_local_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
         "pad_token_id": None, "bos_token_id": None},
    ),
    "nemotron-h": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, LFM2),
    "lfm2-biased": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {**LFM2, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


def tiny_config(kind: str = "llama", **changes: Any) -> Any:
    config_class, model_class, extra = MODELS[kind]
    return config_class(
        **{**SIZES, **extra, **changes}, architectures=[model_class.__name__], dtype="float32"
    )


def save_tiny(
    folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Save a random checkpoint of `kind`; give the transformers model it came from."""
    torch.manual_seed(seed)
    config = tiny_config(kind, **changes)
    model: PreTrainedModel = MODELS[kind][1]._from_config(config, attn_implementation="eager")
    model.eval()
    randomise(model, kind, torch.default_generator)  # seeded above
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, kind: str, rng: torch.Generator) -> None:
    """Numbers that show whether they are read: biases and norms start as zeros and ones, which
    would hide it."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.2, generator=rng)
        elif "norm" in name:
            is_centred = kind in ZERO_CENTRED and "linear_attn" not in name
            parameter.normal_(mean=0.0 if is_centred else 1.0, std=0.2, generator=rng)
        elif name.endswith(".A_log"):
            # So that states remember hundreds of tokens.
            parameter.normal_(mean=-3.0, std=0.5, generator=rng)
        elif name.endswith(".D"):
            parameter.normal_(std=0.5, generator=rng)
        elif name.endswith("sinks"):
            parameter.normal_(std=2.0, generator=rng)
        elif name.endswith("experts.gate_up_proj") and kind in ("gpt-oss", "deepseek-v4"):
            parameter.mul_(5.0)  # so that some are cut off
        elif name.endswith(("hc.base", "hc_base")):
            parameter.normal_(std=0.5, generator=rng)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2, generator=rng)
        elif name.endswith("tid2eid"):
            scores = torch.rand(len(buffer), model.config.n_routed_experts, generator=rng)
            buffer.copy_(scores.argsort(dim=1)[:, : buffer.shape[1]])


def load_tiny(
    folder: Path, dtype: torch.dtype = torch.float32, *, kernels: Kernels | None = None
) -> Decoder:
    source = resolve_source(ModelSettings(model=str(folder)))
    return load_model(
        source, dtype=dtype, device=torch.device("cpu"), load_format="auto", seed=0, kernels=kernels
    )


def tiny_source(kind: str = "llama", **changes: Any) -> ModelSource:
    """A source with a config and no files."""
    return ModelSource(
        kind=SourceKind.FOLDER,
        path=Path("nowhere"),
        config=tiny_config(kind, **changes),
        name="tiny",
        eos_token_ids=(2,),
        rope_factors=None,
    )


def tiny_spec(kind: str = "llama", **changes: Any) -> ModelSpec:
    return describe(tiny_source(kind, **changes))


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """A model's weights, by the names of a checkpoint."""
    return {name: fill.place for name, fill in model.weights().items()}
