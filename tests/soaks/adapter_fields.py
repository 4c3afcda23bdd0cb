"""Every option of an adapter's config, one at a time, and every kind of adapter: ours against PEFT.

    python -m tests.soaks.adapter_fields [--field NAME]

PEFT makes an adapter of a tiny model with the option, draws its weights, saves it and loads it
again onto the model's own weights. We must serve the folder with the logits that this gives, or
refuse it in words that name the option. Then the same of folders that other programs write. Prints
a line for each, and a count of how they ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.ids import AdapterSlot
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_pool import AdapterPool
from tests.soaks.config_fields import Ending, is_fault
from tests.soaks.odd_models import Theirs
from tests.unit.models.paged import PagedModel
from tests.unit.models.tiny import load_tiny, save_tiny

MAX_RANK = 64
TOKENS = {"a": [(i * 37 + i * i) % 90 for i in range(37)], "b": [5]}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
USUAL: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]}

OPTIONS: dict[str, list[Any]] = {
    "r": [1, 3, 64, 65],
    "lora_alpha": [0, 1, 7.5, -4, 1000],
    "lora_dropout": [0.5],
    "use_rslora": [True],
    "use_dora": [True],
    "bias": ["none", "lora_only", "all"],
    "lora_bias": [True],
    "fan_in_fan_out": [True, False],
    "modules_to_save": [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"], ["norm"]],
    "init_lora_weights": [
        True, False, "gaussian", "eva", "olora", "pissa", "pissa_niter_2", "corda", "loftq",
        "orthogonal", "lora_ga", "mica",
    ],
    "layers_to_transform": [0, 1, [0, 2], [1]],
    "layers_pattern": ["layers", ["layers"]],
    "rank_pattern": [
        {"q_proj": 2}, {"^model.layers.1.self_attn.q_proj": 2}, {r".*\.mlp\..*": 3},
        {r"layers\.[01]\.self_attn\.(q|k)_proj": 9}, {"proj": 2}, {"layers.0.mlp.up_proj": 1},
        {r"(?<!x)q_proj": 2}, {r"(q|k)_proj$": 2, "q_proj": 5}, {"": 3}, {".*": 3},
    ],
    "alpha_pattern": [
        {"q_proj": 2}, {"^model.layers.1.self_attn.q_proj": 2}, {r".*\.mlp\..*": 0.5},
        {r"(q|k)_proj$": 2, "q_proj": 5}, {"layers.0.mlp.up_proj": 0}, {".*": 3},
    ],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "megatron_core": ["megatron.core"],
    "trainable_token_indices": [[1, 5], {"embed_tokens": [1, 5]}],
    "use_qalora": [True],
    "qalora_group_size": [4],
    "layer_replication": [[(0, 2), (1, 3)]],
    "exclude_modules": [["q_proj"], "model.layers.0.*", ["down_proj", "k_proj"]],
    "target_modules": [
        "all-linear", ["q_proj"], [r"model.layers.0.self_attn.q_proj"], r".*\.(q|v)_proj",
        ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"],
        ["layers.1.mlp.up_proj"],
        r"model\.layers\.[02]\..*_proj", ["self_attn.q_proj", "mlp.down_proj"], ["norm"],
    ],
    "target_parameters": [
        ["self_attn.q_proj.weight"], ["mlp.up_proj.weight", "self_attn.k_proj.weight"],
        ["q_proj.weight"], ["lm_head.weight"],
    ],
    "alora_invocation_tokens": [[5, 6], [1]],
    "ensure_weight_tying": [True],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "loftq_config": [{"loftq_bits": 4, "loftq_iter": 1}],
    "revision": ["main"],
    "inference_mode": [True],
    "task_type": ["CAUSAL_LM", "FEATURE_EXTRACTION", None, "SEQ_CLS", "TOKEN_CLS"],
    "base_model_name_or_path": ["another/model", "", None],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}],
    "peft_version": ["0.99.0", None],
}  # fmt: skip
"""What LoraConfig takes."""
WRITTEN: dict[str, list[Any]] = {
    **{name: [{"a": 1}] for name in ("eva_config", "corda_config", "lora_ga_config")},
    **{name: [{"a": 1}, True] for name in (
        "velora_config", "monteclora_config", "kasa_config", "arrow_config", "use_bdlora",
    )},
    "peft_type": ["lora", "Lora", None, *sorted(kind.value for kind in peft.PeftType)],
    "an_option_of_tomorrow": [True, 1, "x", None, False],
    "lora_plus": [True], "unsloth_fixed": [True], "enable_lora": [[True, False, True]],
    "merge_weights": [True], "use_mora": [True], "init_lora_weights": ["an init of tomorrow"],
    "bias": ["some"], "use_rslora": ["yes", 1], "r": ["4", 4.0, True, 0, None],
    "lora_alpha": ["8", None], "rank_pattern": [None, [], {"q_proj": "2"}],
    "target_modules": [
        ["q_proj"], ["nothing"], ["q_proj", "x_proj"], ["layers.0.mlp.up_proj"], None,
        "all-linear", r".*_proj", r".*\.(q|v)_proj", r"q_proj",
    ],
    "layers_to_transform": [[0], 1], "exclude_modules": [["q_proj"], r".*\.q_proj", "q_proj"],
    "modules_to_save": [None, []], "scaling": [3.0], "lora_scale": [3.0],
}  # fmt: skip
"""What any tool may write into the file of an otherwise usual adapter: the weights stay as they
are, and PEFT reads the file as we do."""


class Bench:
    """A tiny model, PEFT's and ours, on which adapters are tried."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        # Of sizes that tell an expert's gate and up from its down.
        has_experts = "moe" in kind or kind == "qwen3-next"
        sizes = {"moe_intermediate_size": 20} if has_experts else {}
        self._base = save_tiny(folder, kind, **sizes)
        if hasattr(self._base.config, "num_experts_per_tok"):
            self._base.set_experts_implementation("eager")
        self._ours = load_tiny(folder)
        self._plain = Theirs(self._base).logits(TOKENS["a"])

    def make(self, folder: Path, options: Mapping[str, Any]) -> None:
        """PEFT's adapter of these options, with random weights, as it saves it."""
        torch.manual_seed(0)
        config = LoraConfig(**{"task_type": "CAUSAL_LM", **USUAL, **options})
        self.save(get_peft_model(deepcopy(self._base), config), folder)

    def save(self, adapted: Any, folder: Path) -> None:
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and parameter.dim() >= 1:
                parameter.data += torch.randn_like(parameter) * (0.02 if "embed" in name else 0.1)
        adapted.save_pretrained(folder, save_embedding_layers=False)

    def model(self) -> Any:
        return deepcopy(self._base)

    def _loaded(self, folder: Path) -> Any:
        return PeftModel.from_pretrained(deepcopy(self._base), folder).eval()

    def _can_load(self, folder: Path) -> bool:
        try:
            self._loaded(folder)
        except Exception:
            return False
        return True

    def compare(self, field: str, folder: Path, good: Path | None = None) -> Ending:
        """What we make of a folder, and what PEFT does of it, or of one with the same adapter that
        it can read."""
        try:
            spec, weights = read_adapter(
                folder, self._ours.adapter_targets(), max_rank=MAX_RANK, dtype=torch.float32,
                vocab_size=self._ours.spec.vocab_size,
            )  # fmt: skip
        except AdapterError as error:
            words = str(error)
            if any(part in words for part in NAMES.get(field, (field,))):
                return Ending("refused by name", words[:400])
            how = "REFUSED, NOT BY NAME" if self._can_load(folder) else "refused, by PEFT as well"
            return Ending(how, words[:400])
        try:
            theirs = Theirs(self._loaded(good or folder))
            wanted = theirs.logits(TOKENS["a"])
        except Exception as error:
            return Ending("served, not by PEFT", f"{type(error).__name__} {error}"[:300])
        pool = AdapterPool(
            self._ours.lora_parts(), num_slots=2, max_rank=MAX_RANK, dtype=torch.float32,
            device=self._ours.device,
        )  # fmt: skip
        pool.load(AdapterSlot(1), weights)
        paged = PagedModel(self._ours, pool)
        paged.slot_of = dict.fromkeys(TOKENS, 1)
        if spec.invocation_tokens is not None:
            return Ending("served from its invocation on, which other tests compare")
        try:
            theirs.compare(paged.step(TOKENS), TOKENS)
        except AssertionError as error:
            return Ending("DIFFERS", " ".join(str(error).split())[:200])
        return Ending("same" if not torch.allclose(wanted, self._plain) else "same as the base")


NAMES: dict[str, tuple[str, ...]] = {
    "lora_alpha": ("alpha",),
    "r": ("rank", "r is"),
    "task_type": ("task_type", "modules_to_save", "classifier", "score"),
    "peft_type": ("peft_type",),
    "lora_bias": ("lora_bias", "bias"),
    "modules_to_save": ("modules_to_save",),
    "trainable_token_indices": ("trainable_token_indices",),
    "target_modules": ("target_modules", "norm"),
}
"""What a refusal may call an option."""


def of_options(
    bench: Bench, folder: Path, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    """Options that PEFT honours or knows."""
    known = {one.name for one in dataclasses.fields(LoraConfig)}
    for field in sorted({*OPTIONS, *known} - {"peft_type"}):
        if fields is not None and field not in fields:
            continue
        for number, value in enumerate(OPTIONS.get(field, [])):
            own = folder / f"{field}{number}"
            try:
                bench.make(own, {field: value})
            except Exception as error:
                yield field, value, Ending("not by PEFT", f"{type(error).__name__} {error}"[:120])
                continue
            yield field, value, bench.compare(field, own)


def of_modules(
    bench: Bench, folder: Path, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    """Every module of the architecture, alone and with all others, in some layers or in all."""
    if fields is not None and "modules" not in fields:
        return
    modules = bench.model().named_modules()
    leaves = {name.rpartition(".")[2] for name, one in modules if isinstance(one, torch.nn.Linear)}
    leaves = sorted(leaves - ({"out_proj"} if "falcon" in bench.kind else set()))  # not by PEFT
    choices: list[dict[str, Any]] = [{"target_modules": [leaf]} for leaf in leaves]
    choices += [
        {"target_modules": "all-linear"},
        {"target_modules": [*leaves, "embed_tokens"]},
        {"target_modules": leaves, "layers_to_transform": [0]},
        {"target_modules": leaves, "exclude_modules": leaves[:1]},
    ]
    for number, options in enumerate(choices):
        own = folder / str(number)
        try:
            bench.make(own, options)
        except Exception as error:
            yield "modules", options, Ending("not by PEFT", f"{type(error).__name__} {error}"[:120])
            continue
        yield "modules", options, bench.compare("modules", own)


def of_written(
    bench: Bench, folder: Path, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    """The same where the file says so and the weights are of a usual adapter."""
    bench.make(folder / "usual", {})
    usual = json.loads((folder / "usual" / CONFIG_FILE).read_text())
    for field, values in WRITTEN.items():
        if fields is not None and field not in fields:
            continue
        for value in values:
            if usual.get(field, ...) == value:
                continue
            (folder / "usual" / CONFIG_FILE).write_text(json.dumps({**usual, field: value}))
            yield field, value, bench.compare(field, folder / "usual")


def of_kinds(
    bench: Bench, folder: Path, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    """Adapters of every other kind that PEFT has."""
    if fields is not None and "peft_type" not in fields:
        return
    for kind, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind == "LORA":
            continue
        known = {one.name for one in dataclasses.fields(config_class)}
        wanted = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "feedforward_modules": [],
                  "num_virtual_tokens": 3, "total_step": 10, "init_weights": False}  # fmt: skip
        own = folder / str(kind.value)
        try:
            config = config_class(**{n: v for n, v in wanted.items() if n in known})
            get_peft_model(bench.model(), config).save_pretrained(own)
        except Exception as error:
            yield "peft_type", kind.value, Ending("not by PEFT", f"{error}"[:120])
            continue
        yield "peft_type", kind.value, bench.compare("peft_type", own)


Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]


def renamed(old: str, new: str) -> Change:
    return lambda tensors, config: ({n.replace(old, new): t for n, t in tensors.items()}, config)


def cast(dtype: torch.dtype) -> Change:
    return lambda tensors, config: ({n: t.to(dtype) for n, t in tensors.items()}, config)


def times(factor: float) -> Change:
    return lambda tensors, config: ({n: t * factor for n, t in tensors.items()}, config)


def with_tensor(name: str, *shape: int) -> Change:
    return lambda tensors, config: ({**tensors, name: torch.ones(*shape)}, config)


def without(part: str) -> Change:
    return lambda tensors, config: ({n: t for n, t in tensors.items() if part not in n}, config)


def transposed(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    return {name: tensor.T for name, tensor in tensors.items()}, config


def with_another_layer(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    more = {n.replace("layers.2", "layers.3"): t for n, t in tensors.items() if "layers.2" in n}
    return {**tensors, **more}, config


P = "base_model.model."
Q = P + "model.layers.0.self_attn.q_proj"
FILES: dict[str, tuple[Change, str]] = {
    "default name": (renamed(".weight", ".default.weight"), ""),
    "without prefix": (renamed(P, ""), ""),
    "compiled": (renamed(P, P + "_orig_mod."), ""),
    "prefix of DDP": (renamed(P, "module." + P), "module."),
    "wrapped by FSDP": (renamed("layers.0", "layers.0._fsdp_wrapped_module"), "_fsdp"),
    "checkpointed": (renamed("layers.0", "layers.0._checkpoint_wrapped_module"), "_checkpoint"),
    "mlx": (renamed("lora_A.weight", "lora_a"), "lora_a"),
    "megatron": (renamed("self_attn.q_proj", "self_attention.linear_qkv"), "linear_qkv"),
    "kohya": (renamed("lora_A", "lora_down"), "lora_down"),
    "fp16": (cast(torch.float16), ""),
    "bf16": (cast(torch.bfloat16), ""),
    "fp64": (cast(torch.float64), "F64"),
    "int8": (cast(torch.int8), "I8"),
    "fp8": (cast(torch.float8_e4m3fn), "F8_E4M3"),
    "with a head": (with_tensor(P + "lm_head.weight", 97, 48), "lm_head"),
    "with an embedding": (with_tensor(P + "model.embed_tokens.weight", 99, 48), "embed_tokens"),
    "with a magnitude": (with_tensor(Q + ".lora_magnitude_vector", 48), "DoRA"),
    "with a bias": (with_tensor(Q + ".lora_B.bias", 48), "bias"),
    "with a base bias": (with_tensor(Q + ".bias", 48), "bias"),
    "of more tokens": (with_tensor(P + "model.embed_tokens.base_layer.weight", 99, 48), "vocab"),
    "with an optimizer": (with_tensor("optimizer.state", 3), "optimizer.state"),
    "one half missing": (without("layers.0.self_attn.q_proj.lora_A"), "lora_B without lora_A"),
    "one layer missing": (without("layers.1"), "layers.1"),
    "a layer too many": (with_another_layer, "layers.3"),
    "transposed": (transposed, "shape|fit no reading"),
    "another rank": (lambda tensors, config: (tensors, {**config, "r": 8}), "shape|fit no"),
    "empty": (lambda tensors, config: ({}, config), "no "),
    "not a number": (times(float("nan")), "NaN|finite"),
}
"""What other programs make of the file of a usual adapter, and what a refusal must say; "": it must
be served as PEFT serves the usual one."""


def of_files(
    bench: Bench, folder: Path, fields: list[str] | None
) -> Iterator[tuple[str, Any, Ending]]:
    if fields is not None and "files" not in fields:
        return
    bench.make(folder / "good", {})
    good = folder / "good"
    for name, (change, words) in FILES.items():
        own = folder / name.replace(" ", "_")
        own.mkdir()
        config = json.loads((good / CONFIG_FILE).read_text())
        tensors, config = change(load_file(good / WEIGHTS_FILE), config)
        save_file({n: t.clone().contiguous() for n, t in tensors.items()}, own / WEIGHTS_FILE)
        (own / CONFIG_FILE).write_text(json.dumps(config))
        rounded = name in ("fp16", "bf16", "fp64")
        ending = bench.compare("files", own, None if rounded else good)
        if "efused" in ending.how.lower():
            said = words and any(word in ending.words for word in words.split("|"))
            ending = Ending("refused by name" if said else "REFUSED, NOT BY NAME", ending.words)
        elif words:
            ending = Ending("SERVED", f"{ending.how} {ending.words}")
        yield "files", name, ending


OF_ALL_OPTIONS = ("llama", "llama-tied", "llama-biased", "qwen3-moe")
OF_MODULES = (
    "mistral", "qwen2", "qwen3", "gemma3", "gpt-oss", "lfm2", "qwen3-next", "qwen3.5",
    "qwen3.5-moe", "granite-h", "granite-h-dense", "falcon-h1",
)  # fmt: skip
"""Models whose modules alone are tried; options mean the same in all."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--field", action="append")
    parser.add_argument("--kind", action="append")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    endings: Counter[str] = Counter()
    for kind in options.kind or (*OF_ALL_OPTIONS, *OF_MODULES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench = Bench(folder / "base", kind)
            rest = () if kind in OF_MODULES else (of_options, of_written, of_kinds, of_files)
            for part in (of_modules, *rest):
                for field, value, ending in part(bench, folder / part.__name__, options.field):
                    endings[ending.how] += 1
                    shown = json.dumps(value, default=str)[:100]
                    print(
                        f"{kind} {part.__name__} {field}={shown}: {ending.how} {ending.words}",
                        flush=True,
                    )
    print(json.dumps(dict(endings)))
    return int(any(map(is_fault, endings)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
