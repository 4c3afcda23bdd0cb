"""Every adapter that can't be served is refused, with the file, the value and the remedy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.adapter_names import name_fault
from manyroots.errors import AdapterError, RequestError
from manyroots.lora.files.folder import check_folder
from manyroots.lora.files.opened import AdapterFile
from manyroots.store.adapter_files import read_adapter
from tests.helpers.adapter_folders import (
    CONFIG,
    WEIGHTS,
    ExpertFormat,
    Recipe,
    rewrite_config,
    rewrite_header,
    rewrite_weights,
    tiny_targets,
    write_adapter,
)

DENSE = tiny_targets()
MOE = tiny_targets(num_experts=3)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def refused(
    folder: Path,
    saying: str,
    *,
    targets: Any = DENSE,
    max_rank: int = 16,
    dtype: torch.dtype = torch.float32,
    allowed_dirs: list[Path] | None = None,
) -> None:
    with pytest.raises(AdapterError, match=saying) as caught:
        read_adapter(
            folder,
            targets,
            max_rank=max_rank,
            dtype=dtype,
            vocab_size=64,
            allowed_dirs=allowed_dirs,
        )
    assert isinstance(caught.value, RequestError)
    assert 400 <= caught.value.status < 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good adapter, to be broken."""
    path = tmp_path / "adapter"
    write_adapter(path, DENSE)
    return path


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    path = tmp_path / "moe"
    write_adapter(path, MOE)
    return path


# The config

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r is 0"),
    ({"r": -4}, "r is -4"),
    ({"r": 4.0}, "r is 4.0"),
    ({"r": True}, "r is True"),
    ({"r": "4"}, "r is '4'"),
    ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a finite number"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000.*finite"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
    ({"rank_pattern": [4]}, "rank_pattern is"),
    ({"rank_pattern": {"(": 4}}, r"rank_pattern has the key '\(', which is not a regular"),
    ({"rank_pattern": {"a{99999999999}": 4}}, "not a regular expression"),
    ({"rank_pattern": {"(?=q)": 4}}, "RE2 does not take"),
    ({"rank_pattern": {"q_prj": 4}}, "rank_pattern has 'q_prj', which matches no module"),
    ({"alpha_pattern": {"q_proj": 4, "proj": 4}}, "alpha_pattern has 'proj', which matches no"),
    ({"alpha_pattern": {"(a+)+b": 4}}, r"alpha_pattern has '\(a\+\)\+b', which matches no module"),
    ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] is None"),
    ({"target_modules": [7]}, "target_modules is"),
    ({"target_modules": ["q_proj", "in_proj_qkv"]}, "in_proj_qkv, which this model"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"peft_type": ...}, "peft_type is None"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"use_dora": True}, "use_dora is True: it is DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save .*replaces whole modules"),
    ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"lora_bias": True}, "lora_bias"),
    ({"megatron_config": {"a": 1}}, "megatron_config"),
    ({"use_qalora": True}, "use_qalora"),
    ({"velora_config": {"a": 1}}, "velora_config"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"monteclora_config": {"a": 1}}, "monteclora_config"),
    ({"arrow_config": {"a": 1}}, "arrow_config"),
    ({"use_bdlora": {"a": 1}}, "use_bdlora"),
    ({"ensure_weight_tying": "yes"}, "ensure_weight_tying is 'yes'"),
    ({"invocation_string": "hello"}, "invocation_string"),
    ({"use_tomorrows_lora": True}, "'use_tomorrows_lora' is True, and this version"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changing the base weights"),
    ({"init_lora_weights": "olora"}, "changing the base weights"),
    ({"init_lora_weights": "corda"}, "changing the base weights"),
    ({"init_lora_weights": "loftq"}, "changing the base weights"),
    ({"init_lora_weights": "lora_ga"}, "changing the base weights"),
    ({"alora_invocation_tokens": []}, "alora_invocation_tokens is"),
    ({"alora_invocation_tokens": [1, -1]}, "alora_invocation_tokens is"),
    ({"alora_invocation_tokens": [1, 64]}, "64, beyond the model's vocabulary of 64"),
    ({"alora_invocation_tokens": "hello"}, "alora_invocation_tokens is"),
]


@pytest.mark.parametrize(("changes", "saying"), CONFIGS)
def test_w12_a_config_that_is_not_served_is_refused_by_field_and_value(
    folder: Path, changes: dict[str, Any], saying: str
) -> None:
    """W12: ranks, DoRA and all other options that change the output."""
    rewrite_config(folder, **changes)
    refused(folder, saying)


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"LORA"', "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"r": 1, "r": 2}', "'r' is there twice"),
        (b'{"lora_alpha": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (5 << 20), "at most 4194304"),
    ],
)
def test_w12_a_config_file_that_is_not_a_bounded_json_object_is_refused(
    folder: Path, text: bytes, saying: str
) -> None:
    """W12: not JSON, huge, ambiguous."""
    (folder / CONFIG).write_bytes(text)
    refused(folder, f"{CONFIG}.*{saying}")


def test_options_without_effect_on_the_output_are_taken(folder: Path) -> None:
    rewrite_config(
        folder, init_lora_weights="eva", eva_config={"rho": 2.0}, lora_dropout=0.5,
        layers_to_transform=None, qalora_group_size=16, megatron_core="megatron.core",
        auto_mapping={"a": "b"}, loftq_config={"bits": 4}, unknown_but_unset=None,
    )  # fmt: skip
    read_adapter(folder, DENSE, max_rank=16, dtype=torch.float32, vocab_size=64)


# Tensors


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


WEIGHT_CHANGES: list[tuple[Callable[[dict[str, Tensor]], None], str]] = [
    (drop(f"{Q}.lora_A.weight"), "lora_B without lora_A"),
    (drop(f"{Q}.lora_B.weight"), "lora_A without lora_B"),
    (put(f"{Q}.lora_A.weight", torch.zeros(4, 31)), r"\[4, 31\]; .* need \[4, 32\]"),
    (put(f"{Q}.lora_A.weight", torch.zeros(5, 32)), r"\[5, 32\]; .* need \[4, 32\]"),
    (put(f"{Q}.lora_B.weight", torch.zeros(32, 4, 1)), r"\[32, 4, 1\]"),
    (put(f"{Q}.lora_B.weight", torch.zeros(4, 32)), r"\[4, 32\]; .* need \[32, 4\]"),
    (spoil(f"{Q}.lora_A.weight", float("nan")), "lora_A of model.layers.0.*NaN or infinite"),
    (spoil(f"{Q}.lora_B.weight", float("inf")), "lora_B of model.layers.0.*NaN or infinite"),
    (spoil(f"{Q}.lora_B.weight", float("-inf")), "lora_B of model.layers.0.*NaN or infinite"),
    (put(f"{Q}.lora_magnitude_vector", torch.zeros(32)), "belongs to DoRA"),
    (put(f"{Q}.lora_B.bias", torch.zeros(32)), "is a bias"),
    (put("base_model.model.lm_head.modules_to_save.weight", torch.zeros(1)), "whole module"),
    (put("base_model.model.score.weight", torch.zeros(1)), "not a LoRA pair"),
    (
        put("base_model.model.model.embed_tokens.weight", torch.zeros(64, 32)),
        "whole weight of model.embed_tokens, .*modules_to_save.*save_embedding_layers=False",
    ),
    (put("whatever", torch.zeros(1)), "not the weight of a LoRA pair"),
    (
        put("base_model.model.model.embed_tokens.base_layer.weight", torch.zeros(66, 32)),
        r"\[66, 32\] and the model's own is \[64, 32\].*another vocabulary",
    ),
    (put(f"{Q.replace('.0.', '.9.')}.lora_A.weight", torch.zeros(4, 32)), "layers.9.*not let"),
    (put(f"{Q}.lora_A.other.weight", torch.zeros(4, 32)), "two spellings|several adapters"),
    (put(f"{Q[17:]}.lora_A.weight", torch.zeros(4, 32)), "two spellings"),
    (put(f"{Q}.lora_A.weight", torch.zeros(4, 32, dtype=torch.float64)), "dtype 'F64'"),
    (put(f"{Q}.lora_A.weight", torch.zeros(4, 32, dtype=torch.int8)), "dtype 'I8'"),
    (dict.clear, "no LoRA pair"),
]


@pytest.mark.parametrize(("change", "saying"), WEIGHT_CHANGES)
def test_w12_tensors_that_do_not_fit_are_refused_by_name(
    folder: Path, change: Callable[[dict[str, Tensor]], None], saying: str
) -> None:
    """W12: half pairs, foreign shapes and modules, NaN; nothing is skipped or cut."""
    rewrite_weights(folder, change)
    refused(folder, saying)


def test_w12_a_rank_over_the_limit_is_refused_with_the_flag_that_allows_it(tmp_path: Path) -> None:
    """W12: also when only one module is over it."""
    write_adapter(tmp_path, DENSE, Recipe(ranks={"model.layers.1.mlp.up_proj": 17}))
    refused(tmp_path, "layers.1.mlp.up_proj has rank 17.*--max-lora-rank 17")


def test_w12_a_module_that_the_config_trains_and_the_file_lacks_is_refused(folder: Path) -> None:
    """W12: a file that lost whole pairs is incomplete, not an adapter of fewer modules."""

    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{Q}.lora_A.weight"], tensors[f"{Q}.lora_B.weight"]

    rewrite_weights(folder, lose)
    refused(folder, "layers.0.self_attn.q_proj, for which the file has no weights")
    rewrite_config(folder, exclude_modules=["layers.0.self_attn.q_proj"])
    read_adapter(folder, DENSE, max_rank=16, dtype=torch.float32, vocab_size=64)


@pytest.mark.parametrize(
    "option",
    [
        {"target_modules": ["k_proj", "v_proj", "o_proj", "lm_head", "embed_tokens"]},
        {"exclude_modules": ["self_attn.q_proj"]},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_w12_weights_that_peft_would_not_use_are_refused(
    folder: Path, option: dict[str, Any]
) -> None:
    """W12: of modules that the config leaves out; used all the same, they would change answers."""
    rewrite_config(folder, **option)
    refused(folder, r"the file has weights for .*layers\.0.*which its config leaves out")


def test_w12_the_head_is_trained_beside_certain_layers(tmp_path: Path) -> None:
    """W12: PEFT takes a module by its whole name whatever layers_to_transform says."""
    targets = {name: DENSE[name] for name in ("model.layers.1.self_attn.q_proj", "lm_head")}
    write_adapter(tmp_path, targets)
    rewrite_config(tmp_path, target_modules=["q_proj", "lm_head"], layers_to_transform=[1])
    read_adapter(tmp_path, DENSE, max_rank=16, dtype=torch.float32, vocab_size=64)


@pytest.mark.parametrize("part", ["language_model.", ""])
def test_w12_modules_may_be_named_as_in_a_model_with_images(tmp_path: Path, part: str) -> None:
    """W12: their whole names have a part that the text model's here have not."""
    name = "model.layers.1.self_attn.q_proj"
    recipe = Recipe(prefix=f"base_model.model.{part}")
    write_adapter(tmp_path, {name: DENSE[name]}, recipe)
    rewrite_config(tmp_path, target_modules=[part + name])
    read_adapter(tmp_path, DENSE, max_rank=16, dtype=torch.float32, vocab_size=64)


def test_w12_a_start_that_nobody_here_knows_is_refused(folder: Path) -> None:
    """W12: it may have changed the base weights, as PiSSA does."""
    rewrite_config(folder, init_lora_weights="an_init_of_tomorrow")
    refused(folder, "init_lora_weights is 'an_init_of_tomorrow'.*changes the base weights")
    rewrite_config(folder, init_lora_weights="orthogonal")
    read_adapter(folder, DENSE, max_rank=16, dtype=torch.float32, vocab_size=64)


def test_w12_weights_too_large_for_the_engines_dtype_are_refused(folder: Path) -> None:
    """W12: they would become infinite."""
    rewrite_weights(folder, spoil(f"{Q}.lora_A.weight", 1e5))
    refused(folder, "float16.*wider --dtype", dtype=torch.float16)
    read_adapter(folder, DENSE, max_rank=16, dtype=torch.bfloat16, vocab_size=64)


def test_w12_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    """W12: by its shapes, and by its layers."""
    refused(folder, r"need \[4, 40\]", targets=tiny_targets(hidden=40))
    refused(folder, "layers.1.*does not let adapters change", targets=tiny_targets(num_layers=1))


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.experts.2.down_proj"])
@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_w12_weights_that_are_not_finite_are_refused_in_files_of_the_engines_dtype(
    tmp_path: Path, name: str, side: str, dtype: torch.dtype, value: float
) -> None:
    """W12: also those that nothing converts on the way."""
    recipe = Recipe(dtype=dtype, modules=("q_proj", "gate_proj", "up_proj", "down_proj"))
    write_adapter(tmp_path, MOE, recipe)
    read_adapter(tmp_path, MOE, max_rank=16, dtype=dtype, vocab_size=64)
    rewrite_weights(
        tmp_path, spoil(f"base_model.model.model.layers.0.{name}.lora_{side}.weight", value)
    )
    target = name.replace(".2", "")
    refused(tmp_path, f"lora_{side} of .*{target} has NaN or inf", targets=MOE, dtype=dtype)


# Experts

EXPERT = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (put(f"{EXPERT}.3.up_proj.lora_A.weight", torch.zeros(4, 32)), "4 experts; .* has 3"),
        (drop(f"{EXPERT}.1.up_proj.lora_A.weight"), "no weights for the experts 1 of 3"),
        (put(f"{EXPERT}.01.up_proj.lora_A.weight", torch.zeros(4, 32)), "two spellings"),
        (put(f"{EXPERT}.2.w3.lora_A.weight", torch.zeros(4, 32)), "two spellings"),
        (put(f"{EXPERT}.2.up_proj.lora_A.my.weight", torch.zeros(4, 32)), "spellings|several"),
        (put(f"{EXPERT}.w3.lora_A.weight", torch.zeros(3, 4, 32)), "two formats"),
        (put(f"{EXPERT}.1.up_proj.lora_A.weight", torch.zeros(2, 32)), r"\[2, 32\]"),
        (put(f"{EXPERT}.1.router.lora_A.weight", torch.zeros(4, 32)), "router.*not let"),
        (put(f"{EXPERT}.shared.w1.lora_A.weight", torch.zeros(4, 32)), "shared.*not let"),
    ],
)
def test_w12_experts_that_do_not_fit_are_refused(
    moe_folder: Path, change: Callable[[dict[str, Tensor]], None], saying: str
) -> None:
    """W12: too many experts, missing ones, two formats at once."""
    rewrite_weights(moe_folder, change)
    refused(moe_folder, saying, targets=MOE)


@pytest.mark.parametrize(
    ("shape", "saying"),
    [
        ((4, 4, 32), "weights for 4 experts; this model has 3"),
        ((2, 4, 32), r"\[2, 4, 32\]; .* need \[3, 4, 32\]"),
        ((4, 32), r"\[4, 32\]; .* need \[3, 4, 32\]"),
        ((3, 32, 4), r"\[3, 32, 4\]; .* need \[3, 4, 32\]"),
    ],
)
def test_w12_stacked_experts_of_another_shape_are_refused(
    tmp_path: Path, shape: tuple[int, ...], saying: str
) -> None:
    """W12: a first dimension of 1 is shared; any other count but the model's is wrong."""
    write_adapter(tmp_path, MOE, Recipe(experts=ExpertFormat.STACKED))
    rewrite_weights(tmp_path, put(f"{EXPERT}.w1.lora_A.weight", torch.zeros(shape)))
    refused(tmp_path, saying, targets=MOE)


def test_w12_experts_of_different_ranks_are_refused(moe_folder: Path) -> None:
    """W12: one product serves all experts of a projection; nothing is padded."""
    rewrite_config(moe_folder, rank_pattern={"experts.1.up_proj": 2})
    refused(moe_folder, "different ranks or scalings", targets=MOE)


def test_w12_flat_parameters_that_nobody_named_are_refused(tmp_path: Path) -> None:
    """W12: their name alone does not say what they are."""
    write_adapter(tmp_path, MOE, Recipe(experts=ExpertFormat.PARAMETERS))
    rewrite_config(tmp_path, target_parameters=None)
    refused(tmp_path, "fit no reading", targets=MOE)


# The weights file


def first(header: dict[str, Any]) -> dict[str, Any]:
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found: dict[str, Any] = min(entries.values(), key=lambda entry: entry["data_offsets"])
    return found


def shift(header: dict[str, Any]) -> None:
    first(header)["data_offsets"][0] += 4


def swap(header: dict[str, Any]) -> None:
    first(header)["data_offsets"].reverse()


def overlap(header: dict[str, Any]) -> None:
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    same = [entry for entry in entries if entry["shape"] == entries[0]["shape"]]
    same[1]["data_offsets"] = same[0]["data_offsets"]


def past_the_end(header: dict[str, Any]) -> None:
    last = max(
        (entry for name, entry in header.items() if name != "__metadata__"),
        key=lambda entry: entry["data_offsets"],
    )
    last["shape"][0] += 1
    last["data_offsets"][1] += last["shape"][1] * 4


def forget(header: dict[str, Any]) -> None:
    del header[next(name for name in header if name != "__metadata__")]


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (shift, "bytes by its offsets"),
        (swap, "bytes by its offsets"),
        (overlap, "overlaps another tensor"),
        (past_the_end, "bytes of data and"),
        (forget, "leaves a hole|bytes of data and"),
        (lambda header: first(header).pop("dtype"), "not described by dtype"),
        (lambda header: first(header).update(more=1), "not described by dtype"),
        (lambda header: first(header).update(shape=[-4, -32]), r"has shape \[-4, -32\]"),
        (lambda header: first(header).update(shape=[True, 4]), "has shape"),
        (lambda header: first(header).update(shape=[2**63, 2**63]), "has shape"),
        (lambda header: first(header).update(shape=4), "has shape 4"),
        (lambda header: first(header).update(data_offsets=[0]), "has data_offsets"),
        (lambda header: first(header).update(data_offsets=[0, 2.5]), "has data_offsets"),
        (lambda header: first(header).update(dtype=["F32"]), "has dtype"),
        (lambda header: header.update(extra=[]), "'extra' is not described"),
    ],
)
def test_w12_a_header_that_lies_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], Any], saying: str
) -> None:
    """W12: offsets, sizes and shapes must agree with the file, byte by byte."""
    rewrite_header(folder, change)
    refused(folder, saying)


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (lambda raw: raw[:-1], "bytes of data and"),
        (lambda raw: raw + b"\0", "bytes of data and"),
        (lambda raw: raw[:100], "its header claims"),
        (lambda raw: raw[:5], "fewer than any safetensors file"),
        (lambda raw: b"", "fewer than any safetensors file"),
        (lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:], "claims 9223372036854775808"),
        (lambda raw: raw[:8] + b"\xff" * (len(raw) - 8), "not valid JSON"),
        (lambda raw: bytes(8) + raw[8:], "not valid JSON"),
    ],
)
def test_w12_a_truncated_or_foreign_weights_file_is_refused(
    folder: Path, change: Callable[[bytes], bytes], saying: str
) -> None:
    """W12: from an empty file to a header of 2^63 bytes."""
    file = folder / WEIGHTS
    file.write_bytes(change(file.read_bytes()))
    refused(folder, saying)


def test_w12_a_name_that_is_twice_in_the_header_is_refused(folder: Path) -> None:
    """W12: readers differ in which of the two they take."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name, entry = next((n, e) for n, e in header.items() if n != "__metadata__")
    text = raw[8 : 8 + length].rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    refused(folder, "is there twice")


# Folders and files


def test_w12_a_folder_without_its_files_is_refused_with_what_is_missing(folder: Path) -> None:
    """W12: pickles are never read."""
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused(folder, "adapter_model.bin alone")
    (folder / "adapter_model.bin").rename(folder / f"{WEIGHTS}.index.json")
    refused(folder, "in several files")
    (folder / f"{WEIGHTS}.index.json").unlink()
    refused(folder, f"has no {WEIGHTS}")
    (folder / CONFIG).unlink()
    refused(folder, f"has no {CONFIG}")


def test_w12_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    """W12: missing, a file, empty, or with a NUL."""
    refused(folder / "nowhere", "does not exist")
    refused(folder / CONFIG, "is not a folder")
    for path in ("", "a\0b"):
        with pytest.raises(AdapterError, match="empty or has a NUL"):
            check_folder(path, None)


def test_w12_what_lies_outside_the_allowed_folders_is_refused(folder: Path, tmp_path: Path) -> None:
    """W12: through `..`, through a link to the folder, and through links to its files."""
    allowed = tmp_path / "allowed"
    (allowed / "linked_files").mkdir(parents=True)
    (allowed / "linked").symlink_to(folder)
    for name in (CONFIG, WEIGHTS):
        (allowed / "linked_files" / name).symlink_to(folder / name)
    for path in (folder, allowed / ".." / "adapter", allowed / "linked", allowed / "linked_files"):
        refused(path, "not in a folder that adapters may come from", allowed_dirs=[allowed])
    refused(tmp_path / "nowhere", "not in a folder", allowed_dirs=[allowed])
    refused(folder, "not in a folder", allowed_dirs=[])
    good = {"max_rank": 16, "dtype": torch.float32, "vocab_size": 64}
    read_adapter(allowed / "linked_files", DENSE, **good)
    read_adapter(allowed / "linked", DENSE, allowed_dirs=[allowed, folder], **good)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_w12_files_that_are_no_plain_files_are_refused_without_waiting(
    folder: Path, name: str
) -> None:
    """W12: FIFOs, devices, sockets, folders."""
    file = folder / name
    file.unlink()
    os.mkfifo(file)
    refused(folder, f"{name} is a FIFO")
    file.unlink()
    file.symlink_to("/dev/zero")
    refused(folder, "/dev/zero is a device")
    file.unlink()
    file.mkdir()
    refused(folder, f"{name} is a folder")
    file.rmdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(file))
        refused(folder, f"{name} is a socket")


def test_w12_a_loop_of_links_is_refused(folder: Path) -> None:
    """W12: as a file that is not there."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    refused(folder, f"has no {WEIGHTS}")


def touched(file: Path) -> None:
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replaced(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("change", [touched, replaced, cut, Path.unlink])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_w12_files_that_change_while_they_are_read_are_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    name: str,
) -> None:
    """W12: what is served is one state of the files, never half of each."""
    read_into = AdapterFile.read_into

    def then_change(file: AdapterFile, view: memoryview, offset: int) -> None:
        read_into(file, view, offset)
        if offset > 8 and file.path.name == WEIGHTS and not is_changed:
            is_changed.append(True)
            change(folder / name)

    is_changed: list[bool] = []
    monkeypatch.setattr(AdapterFile, "read_into", then_change)
    refused(folder, "changed while it was read")


def test_w12_names_that_could_be_mistaken_for_something_else_are_refused() -> None:
    """W12: paths, control characters, nothing, or too much."""
    for name in (
        "",
        "/a",
        "a/",
        "a//b",
        "a/./b",
        "..",
        "a..b",
        "a\0",
        "a\n",
        "a\\b",
        "x" * 129,
        "\ud800",
        "Müller-v1.2",
        "a b",
        "x:y",
    ):
        assert name_fault(name) is not None, name
    for name in ("sql", "mueller-v1.2", "team/sql.v2", "x" * 128):
        assert name_fault(name) is None, name
