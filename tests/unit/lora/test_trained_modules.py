"""`target_modules` and `exclude_modules` in all their forms take the modules that PEFT takes.

A file with weights for some modules is given a config that says something else. It is served where
PEFT, loading the same folder, puts an adapter onto exactly the modules of the file, and refused
where PEFT would leave out some of its weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft.tuners.lora import LoraLayer

from manyroots.errors import AdapterError
from manyroots.lora.files.patterns import WholeName
from tests.unit.lora.test_adapter_files_peft import llama, peft, read, saved

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FILES: dict[str, list[str]] = {
    "defaults": ["q_proj", "v_proj"],
    "queries": ["q_proj"],
    "linear": LINEAR,
    "with head": [*LINEAR, "lm_head"],
    "with embedding": [*LINEAR, "embed_tokens"],
    "first layer": ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"],
}
WRITTEN: list[dict[str, Any]] = [
    {"target_modules": None},
    {"target_modules": None, "exclude_modules": ["v_proj"]},
    {"target_modules": None, "layers_to_transform": [0]},
    {"target_modules": "all-linear"},
    {"target_modules": "All-Linear"},
    {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r".*(q|v)_proj|lm_head"},
    {"target_modules": r"(q|v)_proj"},
    {"target_modules": r"model\.layers\.0\..*(q|v)_proj"},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.q_proj"},
    {"target_modules": r"layers\.\d+\.self_attn\.q_proj"},
    {"target_modules": r".*_proj"},
    {"target_modules": r".*_proj", "exclude_modules": r".*\.mlp\..*"},
    {"target_modules": r".*_proj", "exclude_modules": r"mlp"},
    {"target_modules": r".*(_proj|lm_head|embed_tokens)"},
    {"target_modules": LINEAR, "exclude_modules": r".*\.(k|o|gate|up|down)_proj"},
    {"target_modules": LINEAR, "exclude_modules": r"(k|o)_proj"},
    {"target_modules": LINEAR, "exclude_modules": r"model\.layers\.1\..*"},
    {"target_modules": r".*_proj", "layers_to_transform": [0]},
    {"target_modules": r".*\.(q_proj|lm_head)"},
    {"target_modules": [*LINEAR, "lm_head"], "exclude_modules": r".*\.lm_head"},
    {"target_modules": r"(q_proj"},
    {"target_modules": LINEAR, "exclude_modules": r"["},
]
LEFT_OUT = ("exclude_modules", "layers_to_transform")


def theirs(folder: Path) -> set[str] | None:
    """The modules that PEFT puts an adapter onto; None: it can't load the folder."""
    try:
        model = peft.PeftModel.from_pretrained(llama(), folder)
    except Exception:
        return None
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


@pytest.fixture(scope="module", params=FILES)
def adapter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, set[str] | None]:
    """A folder, and the modules of its file."""
    path = tmp_path_factory.mktemp("adapter")
    saved(llama(), path, r=4, target_modules=FILES[request.param])
    return path, theirs(path)


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_a_file_is_served_where_peft_uses_all_of_it(
    written: dict[str, Any], adapter: tuple[Path, set[str] | None], tmp_path: Path
) -> None:
    folder, in_file = adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **written}))
    taken = theirs(tmp_path)
    assert in_file
    may_lack = str(written["target_modules"]).lower() == "all-linear"
    may_lack |= any(name in written for name in LEFT_OUT)
    is_whole = taken is not None and (taken >= in_file if may_lack else taken == in_file)
    if is_whole:
        assert set(read(tmp_path).pairs) == in_file
        return
    with pytest.raises(AdapterError) as refused:
        read(tmp_path)
    words = str(refused.value)
    assert any(name in words for name in ("target_modules", "exclude_modules"))


@pytest.mark.parametrize("expression", [r"(?!x).*q_proj", r"(q|k)\1_proj", "q_proj|" * 300 + "x"])
def test_what_no_automaton_matches_is_not_held_against_the_file(expression: str) -> None:
    """Trainers write such expressions; matching them may take years."""
    assert not WholeName("target_modules", expression).can_match


@pytest.mark.parametrize("expression", [r".*\bq_proj", r"(?i).*Q_PROJ", r".*q_proj\Z"])
def test_word_boundaries_and_flags_are_matched_as_in_peft(expression: str) -> None:
    name = WholeName("target_modules", expression)
    assert name.can_match
    assert name.matches("model.layers.0.self_attn.q_proj")
    assert not name.matches("model.layers.0.self_attn.k_proj")


def test_an_expression_that_takes_too_long_is_none_of_ours() -> None:
    expression = WholeName("target_modules", r"(\w*\.?)*x")
    assert expression.can_match
    assert not expression.matches("model.layers.0." + "a" * 200)
