"""Configs with anything in them are served rightly or refused by name, before memory is asked for.

The fuzz tests change one to three fields of a good config, generation config or GGUF file to
hostile values, by seeds of their own, and take two endings: a ModelError, or a model that loads.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

from manyroots.config import ModelSettings
from manyroots.distributed.shard import WHOLE, Shard
from manyroots.errors import ModelError
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe, load_model
from manyroots.models.sharding import rank_spec
from manyroots.models.source import resolve_source
from manyroots.models.spec import MAX_POSITIONS
from manyroots.models.weight_bytes import check_fits, device_bytes, num_weights
from manyroots.text.generation_config import sampling_defaults
from tests.unit.models.gguf_writing import write_gguf
from tests.unit.models.tiny import MODELS, save_tiny, tiny_config, tiny_spec

CPU = torch.device("cpu")
BY_LAYER = {
    kind: {"rope_type": "default", "rope_theta": 1e4}
    for kind in ("full_attention", "sliding_attention")
}


def write(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(tiny_config(kind).to_json_string())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def open_model(folder: Path) -> Any:
    source = resolve_source(ModelSettings(model=str(folder), load_format="dummy"))
    describe(source)
    return load_model(source, dtype=torch.float32, device=CPU, load_format="dummy", seed=0)


NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": BY_LAYER}, "rope_parameters.*by type of layer.*full_attention"),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta.*is 0; .*above 0"),
    ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta.*is 'x'"),
    ("mistral", {"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'.*'mistral'.*Correct"),
    ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM'.*'llama'"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures of .* is 'Llama.*a list"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings of .* is 0; .*at least 1"),
    ("llama", {"max_position_embeddings": -1}, "max_position_embeddings of .* is -1"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; .*at least 1"),
    ("mistral", {"sliding_window": -4}, "sliding_window is -4"),
    ("llama", {"eos_token_id": [2, "</s>"]}, "eos_token_id of .*'</s>'.*list of token ids"),
    ("llama", {"eos_token_id": "2"}, "eos_token_id of .* is '2'"),
    ("llama", {"eos_token_id": -1}, "eos_token_id of .* is -1"),
    ("llama", {"vocab_size": 10**12}, "vocab_size of .* is 1000000000000"),
    ("llama", {"vocab_size": 0}, "vocab_size of .* is 0"),
    ("llama", {"vocab_size": 2 * 10**9}, "GiB of weights .*all memory of cpu"),
    ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers of .* is 1000000000; .*10000"),
    ("llama", {"num_hidden_layers": 9999, "intermediate_size": 10**7}, "GiB of weights"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads of .* is 0"),
    ("llama", {"head_dim": 5}, "head_dim of .* is 5; .*even"),
    ("qwen2", {"num_attention_heads": 48, "num_key_value_heads": 2}, "48 attention heads.*even"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps of .* is nan"),
    ("llama", {"text_config": {"hidden_size": 3}}, "has a text_config"),
    ("llama", {"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers of the text_"),
    ("llama", {"is_causal": False}, "is_causal of .* is False; .*can't generate"),
    ("qwen3", {"is_causal": None}, "is_causal of .* is None"),
    ("qwen3-moe", {"per_layer_config": {"0": {"intermediate_size": 16}}}, "per_layer_config of"),
    ("llama", {"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config of .*skip"),
    ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights of .*other"),
    ("qwen3-moe", {"num_experts": 10**12}, "num_experts of .* is 1000000000000"),
    ("qwen3-moe", {"num_local_experts": 10**12}, "num_local_experts of .* is 1000000000000"),
    ("qwen3-moe", {"num_local_experts": 10**7}, "GiB of weights"),
]  # fmt: skip


@contextmanager
def little_memory() -> Iterator[None]:
    """Code that asks for more than a few GiB gets a MemoryError, which differs from every
    refusal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm").read_text().split()
    now = int(status[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("kind", "changes", "saying"), NAMED)
def test_an_odd_config_is_refused_by_name_and_value(
    kind: str, changes: dict[str, Any], saying: str, tmp_path: Path
) -> None:
    with little_memory(), pytest.raises(ModelError, match=saying):
        open_model(write(tmp_path, kind, **changes))


LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "num_attention_heads": 32,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
USUAL: dict[str, tuple[dict[str, Any], int]] = {
    "a Llama 3.1": (LLAMA_3_1, 131072),
    "a Llama of long ago": (
        {**LLAMA_3_1, "rope_scaling": None, "eos_token_id": 2, "pad_token_id": -1,
         "max_position_embeddings": 4096}, 4096,
    ),
    "a Mistral": (
        {**LLAMA_3_1, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
         "rope_scaling": None, "sliding_window": 4096, "max_position_embeddings": 32768}, 32768,
    ),
    "a Qwen2.5": (
        {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
         "sliding_window": 131072, "max_window_layers": 28, "num_hidden_layers": 28}, 40960,
    ),
    "a Qwen3 with yarn": (
        {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
         "attention_bias": False, "rope_scaling": {
             "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
         }}, 131072,
    ),
    "a Qwen3-MoE": (
        {**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
         "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": [],
         "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
         "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None,
         "router_aux_loss_coef": 0.001}, 40960,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_configs_as_checkpoints_have_them_are_taken(name: str, tmp_path: Path) -> None:
    config, longest = USUAL[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = describe(resolve_source(ModelSettings(model=str(tmp_path))))
    assert spec.max_len == longest
    assert spec.vocab_size == config["vocab_size"]


@pytest.mark.parametrize("longest", [10**18, 10**30, MAX_POSITIONS + 1])
def test_a_config_without_an_end_of_positions_is_served_up_to_where_they_are_exact(
    longest: int, tmp_path: Path
) -> None:
    """It is how some say "no limit"; angles are exact up to a limit of their own."""
    spec = describe(
        resolve_source(ModelSettings(model=str(write(tmp_path, max_position_embeddings=longest))))
    )
    assert spec.max_position_embeddings == longest
    assert spec.max_len == MAX_POSITIONS


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}, 800),
        ({"rope_type": "yarn", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 1.1, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        (None, 256),
    ],
    ids=["as Qwen advises", "without a length", "shorter", "linear", "none"],
)
def test_a_context_that_yarn_stretches_is_as_long(
    scaling: dict[str, Any] | None, longest: int, tmp_path: Path
) -> None:
    """Such configs keep the original length, and requests could use no more. Makers disagree on
    `linear`: the length of Gemma 3's and DeepSeek's configs already includes it."""
    folder = write(tmp_path, max_position_embeddings=256, rope_scaling=scaling)
    assert describe(resolve_source(ModelSettings(model=str(folder)))).max_len == longest


@pytest.mark.parametrize("kind", ["gemma3", "olmo3"])
@pytest.mark.parametrize("more", [{}, {"original_max_position_embeddings": 200}])
def test_f01_yarn_beside_the_rotations_of_each_type_of_layer_stretches_nothing(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """F01: transformers looks only at those of a type of layer, too."""
    flat = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **more}
    folder = write(tmp_path, kind, max_position_embeddings=256, rope_parameters=flat)
    assert describe(resolve_source(ModelSettings(model=str(folder)))).max_len == 256


def test_f01_a_base_of_olmo_3_on_which_versions_disagree_is_refused(tmp_path: Path) -> None:
    """F01: older versions of transformers rotate all layers by it, newer ones some."""
    folder = write(tmp_path, "olmo3", rope_parameters=None, rope_theta=1e6)
    with pytest.raises(ModelError, match=r"rope_theta is 1000000\.0.*each type of layer"):
        open_model(folder)
    describe(resolve_source(ModelSettings(model=str(write(tmp_path, "olmo3", rope_theta=5e5)))))


def test_layers_without_positions_are_stretched_by_nothing(tmp_path: Path) -> None:
    """Nor is what their config says of rotations looked at."""
    config = json.loads(tiny_config("granite-h").to_json_string())
    config |= {"position_embedding_type": "nope", "max_position_embeddings": 256}
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": "four"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(resolve_source(ModelSettings(model=str(tmp_path)))).max_len == 256


def test_an_end_token_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path, eos_token_id=[2, 97, 5])
    assert describe(resolve_source(ModelSettings(model=str(folder)))).eos_token_ids == (2, 5)


def test_a_config_that_is_huge_or_deep_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"a": "' + "x" * (17 << 20) + '"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json can't be used"):
            resolve_source(ModelSettings(model=str(tmp_path)))
        write(tmp_path)
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            resolve_source(ModelSettings(model=str(tmp_path)))
        (tmp_path / "generation_config.json").unlink()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_weights_are_counted_as_they_are_made(kind: str, shard: Shard) -> None:
    """So that what is counted before is what would be asked for."""
    spec = tiny_spec(kind)
    own = rank_spec(spec, shard)
    model = Decoder(own, dtype=torch.float32, device=torch.device("meta"), shard=shard)
    rows = shard.part(spec.vocab_size)
    made = sum(fill.place.numel() for fill in model.weights().values())
    assert num_weights(own, rows.stop - rows.start) == made


def test_weights_larger_than_all_memory_are_refused_with_both_sizes() -> None:
    most = device_bytes(CPU)
    check_fits(most, "it", torch.float32, CPU)
    with pytest.raises(ModelError, match=r"it has .* GiB of weights as torch.float32.*--dtype"):
        check_fits(most + 2**30, "it", torch.float32, CPU)


HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 97, 10**6, 2**31, 2**63, 10**12, 10**18, 10**30,
    -(10**18), 0.0, 0.5, -1.5, 1e300, float("nan"), float("inf"), "", "x", "0", "silu", "default",
    "llama3", "yarn", [], [0], ["a"], [None], [[]], [-1], [10**18], list(range(3)), {}, {"a": 1},
    {"rope_theta": 1e4}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0,
     "high_freq_factor": 1.0, "original_max_position_embeddings": 32},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": float("nan")},
    {"rope_type": ["x"], "rope_theta": 1e4}, BY_LAYER, "full_attention", ["full_attention"] * 3,
    ["sliding_attention"] * 3, ["x"] * 3, "x" * 10_000, "\ud800", "../../etc", "MistralForCausalLM",
]  # fmt: skip
MORE_NAMES = [
    "rope_scaling", "rope_theta", "text_config", "quantization_config", "torch_dtype", "dtype",
    "auto_map", "use_sliding_window", "sliding_window", "layer_types", "max_window_layers",
    "head_dim", "mlp_bias", "attention_bias", "partial_rotary_factor", "is_encoder_decoder",
]  # fmt: skip
SECONDS = 20.0
"""For one config, on a busy machine; most take milliseconds."""


def attempt(folder: Path) -> bool:
    """Whether it loaded; anything but a ModelError is the test's failure."""
    begin = time.thread_time()
    try:
        open_model(folder)
        sampling_defaults(str(folder), "auto")
        return True
    except ModelError:
        return False
    finally:
        assert time.thread_time() - begin < SECONDS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_a_config_with_hostile_values_loads_or_is_refused(kind: str, tmp_path: Path) -> None:
    good = json.loads(tiny_config(kind).to_json_string())
    names = sorted({*good, *MORE_NAMES})
    num_loaded = 0
    with little_memory():
        for seed in range(120):
            rng = random.Random(f"{kind} {seed}")
            config = dict(good)
            for name in rng.sample(names, rng.randint(1, 3)):
                config[name] = rng.choice(HOSTILE)
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                num_loaded += attempt(tmp_path)
            except BaseException as error:
                changed = {n: v for n, v in config.items() if good.get(n, ...) != v}
                raise AssertionError(f"seed {seed}: {str(changed)[:500]}") from error
    assert 5 < num_loaded < 115


def test_a_generation_config_with_hostile_values_loads_or_is_refused(tmp_path: Path) -> None:
    names = ["eos_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
             "max_new_tokens", "do_sample", "bos_token_id"]  # fmt: skip
    write(tmp_path)
    num_loaded = 0
    for seed in range(150):
        rng = random.Random(seed)
        config = {name: rng.choice(HOSTILE) for name in rng.sample(names, rng.randint(1, 2))}
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        try:
            source = resolve_source(ModelSettings(model=str(tmp_path)))
            assert all(type(token) is int for token in describe(source).eos_token_ids)
            sampling_defaults(str(tmp_path), "auto")
            num_loaded += 1
        except ModelError:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {config}") from error
    assert 5 < num_loaded < 145


@pytest.mark.parametrize(("kind", "num_seeds"), [("llama", 150), ("qwen3-moe", 40)])
def test_a_gguf_file_with_hostile_numbers_loads_or_is_refused(
    kind: str, num_seeds: int, tmp_path: Path
) -> None:
    """Its header's numbers and bytes, changed in place."""
    theirs = save_tiny(tmp_path / "folder", kind)
    file = write_gguf(tmp_path / "model.gguf", theirs.config, dict(theirs.state_dict()))
    good = file.read_bytes()
    fields = [field for field in GGUFReader(file).fields.values() if field.offset > 0]
    end = max(field.offset for field in fields) + 4000  # the tensors' names and shapes follow
    places = [field.offset + sum(p.nbytes for p in field.parts[:-1]) for field in fields]
    numbers = [0, 1, 2, 3, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1]
    num_loaded = 0
    with little_memory():
        for seed in range(num_seeds):
            rng = random.Random(f"{kind} {seed}")
            data = bytearray(good)
            if seed % 3:
                at = rng.choice(places)
                data[at : at + 4] = rng.choice(numbers).to_bytes(4, "little")
            else:
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(4, end)] = rng.choice((0, 1, 127, 128, 255))
            file.write_bytes(data)
            begin = time.thread_time()
            try:
                source = resolve_source(ModelSettings(model=str(file)))
                load_model(source, dtype=torch.float32, device=CPU, load_format="auto", seed=0)
                num_loaded += 1
            except ModelError:
                pass
            except BaseException as error:
                raise AssertionError(f"seed {seed}") from error
            assert time.thread_time() - begin < SECONDS
    assert 2 < num_loaded < num_seeds - 5
