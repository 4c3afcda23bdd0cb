"""Good adapters read back as what was written, in every format, spelling and dtype."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from manyroots.errors import AdapterError
from manyroots.lora.files import digest
from manyroots.lora.files.digest import CHUNK_BYTES, content_digest, read_and_hash
from manyroots.lora.files.header import Header
from manyroots.lora.files.memory import MemoryFile
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets
from manyroots.store import adapter_bytes
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_folders import (
    WEIGHTS,
    ExpertFormat,
    Pair,
    Recipe,
    rewrite_config,
    rewrite_weights,
    tiny_targets,
    write_adapter,
)
from tests.helpers.seeded import Draw, for_seeds

DENSE = tiny_targets()
MOE = tiny_targets(num_experts=3)


def read(
    folder: Path, targets: Targets, *, dtype: torch.dtype = torch.float32, max_rank: int = 64
) -> tuple[AdapterSpec, AdapterWeights]:
    return read_adapter(folder, targets, max_rank=max_rank, dtype=dtype, vocab_size=64)


def check_equal(weights: AdapterWeights, wanted: Mapping[str, Pair], targets: Targets) -> None:
    assert list(weights.pairs) == [name for name in targets if name in wanted]
    for name, pair in weights.pairs.items():
        assert torch.equal(pair.a.float(), wanted[name].a), name
        assert torch.equal(pair.b.float(), wanted[name].b), name
        assert pair.scaling == wanted[name].scaling


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_w14_every_module_of_a_dense_model_is_read_with_the_rank_it_has(
    tmp_path: Path, rank: int
) -> None:
    """W14: attention, feed-forward, embedding and head, each in its canonical shape."""
    wanted = write_adapter(tmp_path, DENSE, Recipe(rank=rank, seed=rank))
    spec, weights = read(tmp_path, DENSE)
    check_equal(weights, wanted, DENSE)
    assert spec.rank == rank
    assert spec.digest == weights.digest
    assert len(spec.digest) == 32
    assert weights.pairs["model.embed_tokens"].a.shape == (64, rank)
    assert weights.num_bytes == spec.num_bytes
    assert sum(p.a.numel() + p.b.numel() for p in weights.pairs.values()) * 4 == spec.num_bytes


@pytest.mark.parametrize("form", list(ExpertFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w15_every_expert_format_is_told_from_names_and_shapes(
    tmp_path: Path, form: ExpertFormat, dtype: torch.dtype
) -> None:
    """W15: per-expert 2-D keys, stacked 3-D keys with either side shared, fused and flat."""
    modules = ("q_proj", "gate_proj", "up_proj", "down_proj")
    wanted = write_adapter(tmp_path, MOE, Recipe(experts=form, dtype=dtype, modules=modules))
    _, weights = read(tmp_path, MOE)
    check_equal(weights, wanted, MOE)


_OF_INTERLEAVED = [form for form in ExpertFormat if form is not ExpertFormat.PARAMETERS_SWAPPED]


@pytest.mark.parametrize("form", _OF_INTERLEAVED)
def test_w15_gate_and_up_by_turns_are_told_apart_where_the_model_has_them_so(
    tmp_path: Path, form: ExpertFormat
) -> None:
    """W15: gpt-oss. Its down projection is square, which leaves one reading: no release of PEFT
    read parameters that are [in, out] in another way."""
    targets = tiny_targets(num_experts=3, intermediate=32, is_interleaved=True)
    modules = ("q_proj", "gate_proj", "up_proj", "down_proj")
    wanted = write_adapter(tmp_path, targets, Recipe(experts=form, modules=modules))
    _, weights = read(tmp_path, targets)
    check_equal(weights, wanted, targets)


def test_w15_experts_in_many_chunks_are_read_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W15: files have their experts in the order of text, 0, 1, 10, 11, 2."""
    monkeypatch.setattr(digest, "CHUNK_BYTES", 2500)
    for module in (digest, adapter_bytes):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    targets = tiny_targets(num_experts=12)
    modules = ("q_proj", "gate_proj", "up_proj", "down_proj")
    recipe = Recipe(experts=ExpertFormat.PER_EXPERT, dtype=torch.bfloat16, modules=modules)
    wanted = write_adapter(tmp_path, targets, recipe)
    _, weights = read(tmp_path, targets, dtype=torch.bfloat16)
    check_equal(weights, wanted, targets)
    assert weights.num_bytes > 20 * 1000


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.", "", "base_model.model._orig_mod.", "_orig_mod.base_model.model."],
)
@pytest.mark.parametrize("adapter_name", [None, "default", "my-run_2"])
def test_w14_every_spelling_of_the_keys_reads_the_same(
    tmp_path: Path, prefix: str, adapter_name: str | None
) -> None:
    """W14: with and without PEFT's prefix, that of a compiled model, and the adapter's name."""
    wanted = write_adapter(tmp_path, DENSE, Recipe(prefix=prefix, adapter_name=adapter_name))
    _, weights = read(tmp_path, DENSE)
    check_equal(weights, wanted, DENSE)


def test_w14_embedding_and_head_may_each_have_either_spelling(tmp_path: Path) -> None:
    """W14: `lora_A` and `lora_embedding_A` are the same matrices."""
    wanted = write_adapter(tmp_path, DENSE)

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for side in "AB":
            head = tensors.pop(f"base_model.model.lm_head.lora_{side}.weight")
            tensors[f"base_model.model.lm_head.lora_embedding_{side}"] = head
            embedding = tensors.pop(f"base_model.model.model.embed_tokens.lora_embedding_{side}")
            tensors[f"base_model.model.model.embed_tokens.lora_{side}.weight"] = embedding

    rewrite_weights(tmp_path, respell)
    _, weights = read(tmp_path, DENSE)
    check_equal(weights, wanted, DENSE)


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_the_engines_dtype_in_one_buffer(
    tmp_path: Path, file_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    wanted = write_adapter(tmp_path, DENSE, Recipe(dtype=file_dtype))
    _, weights = read(tmp_path, DENSE, dtype=dtype)
    storage = weights.buffer.untyped_storage().data_ptr()
    for name, pair in weights.pairs.items():
        for half, other in ((pair.a, wanted[name].a), (pair.b, wanted[name].b)):
            assert half.dtype == dtype
            assert half.is_contiguous()
            assert half.untyped_storage().data_ptr() == storage
            assert torch.equal(half, other.to(file_dtype).to(dtype))


def test_tensors_of_several_dtypes_at_any_offset_are_read(tmp_path: Path) -> None:
    """Nothing in the format says that a tensor of four bytes begins at a multiple of four."""
    targets = tiny_targets(num_layers=1, hidden=31, kv=15, vocab=63)
    wanted = write_adapter(tmp_path, targets, Recipe(rank=1, modules=("q_proj", "v_proj")))
    layer = "base_model.model.model.layers.0.self_attn"
    tensors = {
        f"{layer}.q_proj.lora_A.weight": wanted["model.layers.0.self_attn.q_proj"].a.bfloat16(),
        f"{layer}.q_proj.lora_B.weight": wanted["model.layers.0.self_attn.q_proj"].b,
        f"{layer}.v_proj.lora_A.weight": wanted["model.layers.0.self_attn.v_proj"].a.bfloat16(),
        f"{layer}.v_proj.lora_B.weight": wanted["model.layers.0.self_attn.v_proj"].b,
    }
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        dtype = "F32" if tensor.dtype == torch.float32 else "BF16"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert header[f"{layer}.q_proj.lora_B.weight"]["data_offsets"][0] % 4
    _, weights = read(tmp_path, targets)
    check_equal(weights, wanted, targets)


# The digest


def digest_of(folder: Path) -> bytes:
    spec, _ = read(folder, DENSE)
    return spec.digest


def test_n20_the_digest_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    """N20: equal files anywhere are equal; a bit of weight or a field that matters changes it."""
    recipe = Recipe(seed=3)
    write_adapter(tmp_path / "a", DENSE, recipe)
    write_adapter(tmp_path / "b", DENSE, recipe)
    rewrite_config(tmp_path / "b", base_model_name_or_path="elsewhere", lora_dropout=0.5)
    digest = digest_of(tmp_path / "a")
    assert digest_of(tmp_path / "b") == digest
    seen = {digest}
    changes: list[dict[str, Any]] = [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 1, "k_proj": 2}},
        {"alpha_pattern": {"k_proj": 2, "q_proj": 1}},
        {"alora_invocation_tokens": [1]},
        {"alora_invocation_tokens": [1, 2]},
    ]
    for change in changes:
        write_adapter(tmp_path / "b", DENSE, recipe)
        rewrite_config(tmp_path / "b", **change)
        seen.add(digest_of(tmp_path / "b"))
    assert len(seen) == 1 + len(changes)


@for_seeds(25)
def test_n20_any_changed_byte_of_the_weights_changes_the_digest(draw: Draw) -> None:
    """N20: wherever it is, also beyond the first chunk."""
    raw, header = _many_chunks()
    position = draw.integer(0, len(raw) - 1)
    changed = bytearray(raw)
    changed[position] ^= 1 << draw.integer(0, 7)
    assert _digest_of_bytes(bytes(changed), header) != _digest_of_bytes(raw, header)


class Hanging(MemoryFile):
    """Of a network file system that does not answer for a while."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("hanging", [bytes(num_bytes)])
        self.answers = threading.Event()

    def read_into(self, view: memoryview, offset: int) -> None:
        self.answers.wait()
        super().read_into(view, offset)

    def bytes_at(self, offset: int, room: memoryview) -> memoryview:
        self.answers.wait()
        return super().bytes_at(offset, room)


def test_a03_a_file_whose_reads_hang_keeps_no_other_from_being_read() -> None:
    """A03: with more chunks than there are threads, all of which it takes."""
    raw, header = _many_chunks()
    length = 64 * CHUNK_BYTES
    hanging = Hanging(length)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(read_and_hash, hanging, Header((), b"{}", 0, length), None)
        try:
            while digest._THREADS._work_queue.qsize():
                time.sleep(0.01)
            _digest_of_bytes(raw, header)
            assert not other.done()
        finally:
            hanging.answers.set()
        assert len(other.result()) == 64


def test_an_error_of_one_thread_ends_the_read() -> None:
    raw, header = _many_chunks()
    file = MemoryFile("weights", [raw[:-1]])
    with pytest.raises(AdapterError, match="changed while it was read"):
        read_and_hash(file, header, None)


def _many_chunks() -> tuple[bytes, Header]:
    raw = bytes(range(251)) * ((2 * CHUNK_BYTES + 12345) // 251)
    return raw, Header((), b"{}", 0, len(raw))


def _digest_of_bytes(raw: bytes, header: Header) -> bytes:
    with tempfile.NamedTemporaryFile() as temporary:
        temporary.write(raw)
        temporary.flush()
        with AdapterFile(Path(temporary.name)) as file:
            into = bytearray(len(raw))
            chunks = read_and_hash(file, header, memoryview(into))
            assert into == raw
            assert read_and_hash(file, header, None) == chunks
    assert chunks == [
        hashlib.sha256(raw[start : start + CHUNK_BYTES]).digest()
        for start in range(0, len(raw), CHUNK_BYTES)
    ]
    return content_digest(b"config", header, chunks)


@pytest.mark.parametrize("kind", [ExpertFormat.PARAMETERS, ExpertFormat.PARAMETERS_SWAPPED])
def test_w15_both_square_and_other_parameters_are_read_as_they_were_written(
    tmp_path: Path, kind: ExpertFormat
) -> None:
    """W15: with hidden = 2 * intermediate, down says which way PEFT read gate and up."""
    targets = tiny_targets(num_experts=3, intermediate=16)
    written = write_adapter(tmp_path, targets, Recipe(experts=kind))
    _, weights = read_adapter(tmp_path, targets, max_rank=16, dtype=torch.float32, vocab_size=64)
    for name, pair in written.items():
        assert torch.equal(weights.pairs[name].a, pair.a), name
        assert torch.equal(weights.pairs[name].b, pair.b), name
