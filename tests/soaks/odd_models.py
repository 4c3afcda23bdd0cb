"""Unnamed models of random sizes and options: ours against transformers and PEFT.

    python -m tests.soaks.odd_models [--kind NAME] [--models 100] [--seed 0]

Each seed is a config of plausible values (odd widths, vocabularies and counts of heads, every kind
of rotation, windows, biases, experts), saved by transformers in one file or several, in any dtype;
an adapter that PEFT made, with options drawn as well; and prompts that are cut at random and share
steps. Logits must be transformers' and PEFT's, or the model or adapter must be refused by name.
Where float32 is not enough to tell, float64 does. Prints a line for each, and what differed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from manyroots.errors import AdapterError, ModelError
from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from manyroots.models.decoder import Decoder
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_pool import AdapterPool
from tests.helpers.seeded import Draw
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import load_tiny, save_tiny

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "lfm2", "qwen3-next",
    "qwen3.5", "qwen3.5-moe", "granite-h", "falcon-h1",
)  # fmt: skip
MAX_RANK = 128
ROUNDING = 1e-3
"""What it may move single logits by, of the largest: some models are all but unstable, and what is
wrong is wrong by far more."""


def config_of(kind: str, draw: Draw) -> dict[str, Any]:
    """Fields for a config of this kind, to be laid over those of `tiny.MODELS`."""
    layers = draw.randint(1, 5)
    kv_heads = draw.choice([1, 1, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 2, 3, 5, 8])
    head_dim = draw.choice([2, 4, 6, 8, 10, 16, 22, 32, 40, 64, 80])
    own_size = heads * head_dim > 160 or draw.flag()
    unit = heads if kind in ("llama", "gemma3") else 1
    hidden = unit * draw.randint(3, 90 // unit + 3) if own_size else heads * head_dim
    fields: dict[str, Any] = {
        "vocab_size": draw.choice([5, 31, 64, 97, 129, 251]),
        "hidden_size": hidden,
        "intermediate_size": draw.randint(1, 130),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": draw.choice([64, 256, 4096]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": draw.random() < 0.5,
        "eos_token_id": draw.choice([None, 2, [1, 3]]),
        "rope_parameters": rope(draw),
    }
    if kind in ("llama", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "granite-h", "falcon-h1"):
        fields["attention_bias"] = draw.random() < 0.5
    if kind in ("llama", "falcon-h1"):
        fields["mlp_bias"] = draw.random() < 0.5
    if kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe"):
        fields["hidden_act"] = draw.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh", "relu"])
    fields |= OF_KIND.get(kind, nothing)(draw, fields)
    return {name: value for name, value in fields.items() if value is not ...}


def nothing(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def rope(draw: Draw) -> dict[str, Any]:
    """Every kind that is served."""
    kind = draw.choice(["default", "default", "linear", "llama3", "yarn", "yarn"])
    own: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 1e4, 5e5])}
    if kind == "default":
        return own
    own["factor"] = draw.choice([1.0, 2.0, 3.5, 8.0, 32.0])
    if kind == "llama3":
        own["low_freq_factor"] = draw.choice([1.0, 1.5])
        own["high_freq_factor"] = draw.choice([2.0, 4.0])
        own["original_max_position_embeddings"] = draw.choice([8, 32, 64])
    if kind == "yarn":
        if draw.flag():
            own["original_max_position_embeddings"] = draw.choice([8, 32, 64])
        if draw.flag():
            own |= {"beta_fast": draw.choice([8.0, 32.0]), "beta_slow": draw.choice([1.0, 2.0])}
        extra: list[dict[str, Any]] = [
            {}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7},
            {"truncate": False},
        ]  # fmt: skip
        own |= draw.choice(extra)
    return own


def windows(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of Qwen2 and Qwen3: by a switch and a number of layers, or layer by layer."""
    layers = fields["num_hidden_layers"]
    own: dict[str, Any] = {
        "use_sliding_window": draw.random() < 0.7,
        "sliding_window": draw.choice([1, 2, 4, 7, 16, 200]),
        "max_window_layers": draw.randint(0, layers),
    }
    if own["use_sliding_window"] and draw.flag():
        own["layer_types"] = [draw.choice([FULL, SLIDING]) for _ in range(layers)]
    return own


def mistral(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": draw.choice([None, 1, 3, 8, 17])}


def experts(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    count = draw.choice([1, 2, 3, 5, 8, 17])
    return {
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.randint(2, 50),
        "norm_topk_prob": draw.flag(),
        "decoder_sparse_step": draw.choice([1, 1, 2]),
        "mlp_only_layers": draw.choice([[], [0], [0, 2]]),
        "num_hidden_layers": draw.randint(2, 5),  # so that one has experts
    }


def qwen3_moe(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {"use_sliding_window": draw.flag(), "sliding_window": draw.choice([1, 5, 12])}
    return experts(draw, fields) | own


def gemma3(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    types = [draw.choice([FULL, SLIDING]) for _ in range(fields["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4])}
    return {
        "layer_types": draw.choice([None, types]),
        "sliding_window": draw.choice([1, 3, 8, 17]),
        "query_pre_attn_scalar": draw.choice([1, 8, 24, 256]),
        "rope_parameters": {FULL: rope(draw), SLIDING: local},
        "hidden_activation": draw.choice(["gelu_pytorch_tanh", "gelu", "silu", "relu"]),
    }


def gpt_oss(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    count = draw.choice([1, 2, 3, 8])
    types = [draw.choice([FULL, SLIDING]) for _ in range(fields["num_hidden_layers"])]
    return {
        "num_local_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "sliding_window": draw.choice([1, 3, 8, 17]),
        "layer_types": draw.choice([None, types]),
    }


def lfm2(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    types = [draw.choice(["conv", FULL]) for _ in range(fields["num_hidden_layers"])]
    heads = fields["num_attention_heads"]
    return {
        "layer_types": types,
        "hidden_size": heads * draw.choice([2, 4, 6, 8]),
        "head_dim": ...,
        "conv_L_cache": draw.choice([2, 3, 4, 5, 9]),
        "conv_bias": draw.flag(),
        "norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "block_auto_adjust_ff_dim": draw.flag(),
        "block_multiple_of": draw.choice([1, 8, 32]),
        "block_ffn_dim_multiplier": draw.choice([1.0, 0.7, 1.3]),
    }


def delta(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    key_heads = draw.choice([1, 2, 3])
    head_dim = draw.choice([8, 16, 24, 32])
    part = draw.choice([0.25, 0.5, 0.75, 1.0])
    return {
        "head_dim": head_dim,
        "layer_types": [draw.choice([RECURRENT, FULL]) for _ in range(fields["num_hidden_layers"])],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([2, 8, 12, 16]),
        "linear_value_head_dim": draw.choice([2, 8, 12, 16]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4, 6]),
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": part},
    }


def qwen3_next(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": draw.randint(1, 50)}
    own = experts(draw, fields)
    return delta(draw, {**fields, **own}) | own | shared


def mamba(draw: Draw) -> dict[str, Any]:
    groups = draw.choice([1, 2, 3])
    return {
        "mamba_n_groups": groups,
        "mamba_n_heads": groups * draw.choice([1, 2, 3]),
        "mamba_d_head": draw.choice([4, 8, 12, 16]),
        "mamba_d_state": draw.choice([2, 8, 12, 16]),
        "mamba_d_conv": draw.choice([2, 3, 4, 6]),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(),
        "mamba_chunk_size": draw.choice([4, 16]),
    }


def granite(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = mamba(draw)
    width = own["mamba_n_heads"] * own["mamba_d_head"]
    expand = draw.choice([1, 2])
    if width % expand:
        expand = 1
    count = draw.choice([0, 1, 2, 5])
    heads = draw.choice([n for n in range(1, 9) if width // expand % (2 * n) == 0] or [1])
    return own | {
        "mamba_expand": expand,
        "hidden_size": width // expand,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": ...,
        "layer_types": [draw.choice([RECURRENT, FULL]) for _ in range(fields["num_hidden_layers"])],
        "position_embedding_type": draw.choice(["rope", "nope", None]),
        "num_local_experts": count,
        "num_experts_per_tok": draw.randint(1, max(count, 1)),
        "shared_intermediate_size": draw.randint(1, 60),
        **{
            name: draw.choice([0.3, 1.0, 2.5])
            for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        },
    }


def falcon(draw: Draw, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = mamba(draw)
    own["mamba_d_ssm"] = own["mamba_n_heads"] * own["mamba_d_head"]
    return own | {
        "mamba_rms_norm": draw.flag(),
        "mamba_norm_before_gate": draw.flag(),
        "projectors_bias": draw.flag(),
        "mlp_multipliers": [draw.uniform(0.3, 2), draw.uniform(0.3, 2)],
        "ssm_multipliers": [draw.uniform(0.3, 2) for _ in range(5)],
    }


OF_KIND = {
    "mistral": mistral,
    "qwen2": windows,
    "qwen3": windows,
    "qwen3-moe": qwen3_moe,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "qwen3-next": qwen3_next,
    "qwen3.5": delta,
    "qwen3.5-moe": qwen3_next,
    "granite-h": granite,
    "falcon-h1": falcon,
}


def adapter_of(draw: Draw, model: Any) -> dict[str, Any]:
    """Options of PEFT's for a random adapter."""
    leaves = sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        }
    )
    is_falcon = model.config.model_type == "falcon_h1"
    if is_falcon:
        leaves.remove("out_proj")  # which PEFT refuses
    chosen = draw.sample(leaves, draw.randint(1, len(leaves)))
    if {"gate_proj", "up_proj"} & set(chosen) and hasattr(model.config, "num_experts"):
        chosen = sorted({*chosen, "gate_proj", "up_proj"})  # which PEFT wants together
    options: dict[str, Any] = {
        "r": draw.choice([1, 2, 7, 16, 64]),
        "lora_alpha": draw.choice([1, 16, 33]),
        "use_rslora": draw.flag(),
    }
    form = draw.choice(["names", "names", "ends", "expression", "all-linear"])
    if form == "all-linear" and not is_falcon:
        return options | {"target_modules": form}
    if form == "expression":
        return options | {"target_modules": rf".*layers\.[0-2]\..*({'|'.join(chosen)})"}
    if form == "ends":
        chosen += ["embed_tokens", "lm_head"]
    elif draw.flag():
        options["layers_to_transform"] = [0]
    if draw.flag():
        options["rank_pattern"] = {draw.choice(chosen): draw.choice([1, 3, 20])}
        options["alpha_pattern"] = {draw.choice(chosen): 5}
    return options | {"target_modules": chosen}


class Theirs:
    """A model of transformers', with or without an adapter of PEFT's."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: list[int]) -> Tensor:
        if tuple(tokens) not in self._known:
            self._known[tuple(tokens)] = self._logits(tokens, torch.float32)
        return self._known[tuple(tokens)]

    @torch.no_grad()
    def _logits(self, tokens: list[int], dtype: torch.dtype) -> Tensor:
        model = self._model if dtype is torch.float32 else deepcopy(self._model).to(dtype)
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def compare(self, got: Mapping[str, Tensor], tokens: Mapping[str, list[int]]) -> None:
        """Raise where they differ by more than rounding."""
        for name, logits in got.items():
            wanted = self.logits(tokens[name])
            try:
                assert_close("logits", logits, wanted, torch.float32)
            except AssertionError:
                exact = self._logits(tokens[name], torch.float64)
                ours, theirs = (float((one - exact).abs().max()) for one in (logits, wanted))
                if not ours <= max(4 * theirs, ROUNDING * float(exact.abs().max())):
                    raise


def compare(folder: Path, kind: str, seed: int) -> str:
    """How a model ended, in a few words; raises where it differs."""
    draw = Draw(f"{kind} {seed}")
    fields = config_of(kind, draw)
    try:
        made: Any = save_tiny(folder / "made", kind, seed=seed, **fields)
        if hasattr(made.config, "num_experts_per_tok"):
            made.set_experts_implementation("eager")
        lengths = {"a": draw.randint(30, 60), "b": 1, "c": draw.randint(2, 29)}
        tokens = {
            name: [draw.randrange(fields["vocab_size"]) for _ in range(length)]
            for name, length in lengths.items()
        }
        Theirs(made).logits(tokens["b"])
    except Exception as error:
        return f"not by transformers: {str(error)[:300]}"
    save(made, folder / "model", draw)
    try:
        ours = load_tiny(folder / "model")
    except ModelError as error:
        return f"refused: {str(error)[:300]}"
    theirs = Theirs(made)
    pages = {"page_size": draw.choice([1, 2, 3, 4, 16]), "num_pages": 300}
    theirs.compare(PagedModel(ours, **pages).step(tokens), tokens)
    theirs.compare(in_random_steps(PagedModel(ours, **pages), tokens, draw), tokens)
    return "same, " + with_adapter(folder / "adapter", made, ours, tokens, draw)


@torch.no_grad()
def save(model: Any, folder: Path, draw: Draw) -> None:
    """In some dtype, of which the model has the numbers then, and in one file or several."""
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    kept: dict[int, Tensor] = {}
    for parameter in model.parameters():
        kept[parameter.data_ptr()] = parameter.to(dtype)
        parameter.copy_(kept[parameter.data_ptr()])
    state = {
        name: kept.get(tensor.data_ptr(), tensor) for name, tensor in model.state_dict().items()
    }
    size = draw.choice(["5GB", "20KB"])
    model.save_pretrained(folder, state_dict=state, max_shard_size=size)


def with_adapter(
    folder: Path, base: Any, ours: Decoder, tokens: Mapping[str, list[int]], draw: Draw
) -> str:
    options = adapter_of(draw, base)
    torch.manual_seed(draw.randrange(1000))
    try:
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        adapted = get_peft_model(base, config)
    except Exception as error:
        return f"no adapter by PEFT: {str(error)[:300]}"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_embedding_A" in name:
                parameter.mul_(0.1)  # else they drown the model's own embedding
    adapted.save_pretrained(folder, save_embedding_layers=draw.choice(["auto", False]))
    try:
        _, weights = read_adapter(
            folder, ours.adapter_targets(), max_rank=MAX_RANK, dtype=torch.float32,
            vocab_size=ours.spec.vocab_size,
        )  # fmt: skip
    except AdapterError as error:
        return f"adapter refused: {str(error)[:300]} {options}"
    pool = AdapterPool(
        ours.lora_parts(), num_slots=2, max_rank=MAX_RANK, dtype=ours.dtype, device=ours.device
    )
    pool.load(AdapterSlot(1), weights)
    paged = PagedModel(ours, pool, num_pages=300)
    paged.slot_of = dict.fromkeys(tokens, 1)
    Theirs(adapted).compare(in_random_steps(paged, tokens, draw), tokens)
    return "adapter same"


def in_random_steps(
    paged: PagedModel, tokens: Mapping[str, list[int]], draw: Draw
) -> dict[str, Tensor]:
    """The logits of all tokens; prompts are cut anywhere and share steps with decodes."""
    rest, got = dict(tokens), {name: list[Tensor]() for name in tokens}
    while rest:
        now = {n: left[: 1 if draw.flag() else draw.randint(1, 33)] for n, left in rest.items()}
        for name, logits in paged.step(now).items():
            got[name].append(logits)
        rest = {name: left for name, t in rest.items() if (left := t[len(now[name]) :])}
    return {name: torch.cat(parts) for name, parts in got.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    endings: Counter[str] = Counter()
    kinds = options.kind or KINDS
    for seed in range(options.seed, options.seed + options.models):
        kind = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            try:
                ending = compare(Path(folder), kind, seed)
            except Exception as error:
                fields = config_of(kind, Draw(f"{kind} {seed}"))
                ending = f"DIFFERS: {type(error).__name__} {error} {fields}"
        endings[ending.partition(":")[0]] += 1
        print(f"{kind} {seed}: {ending}", flush=True)
    print(json.dumps(dict(endings)))
    return int(bool(endings["DIFFERS"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
