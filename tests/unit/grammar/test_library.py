"""An engine whose machine lacks llguidance: everything but shapes is served."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyroots import LLM, SamplingParams, StructuredOutputsParams
from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)


@pytest.mark.usefixtures("absent")
def test_g01_without_its_library_a_shape_is_refused_and_all_else_is_served(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=300, eos_token_id=257)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    wanted = StructuredOutputsParams(choice=("yes", "no"))
    with LLM(str(tmp_path), dtype="float32") as llm:
        with pytest.raises(RequestError, match="pip install llguidance"):
            llm.generate(["hello"], SamplingParams(max_tokens=2, structured_outputs=wanted))
        [plain] = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=2))
        [ruled] = llm.generate(["hello"], SamplingParams(max_tokens=3, allowed_token_ids=(7,)))
    assert len(plain.outputs[0].token_ids) > 0
    assert list(ruled.outputs[0].token_ids) == [7, 7, 7]


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(grammar='root ::= "a"'),
        StructuredOutputsParams(json='{"type": "object"}'),
    ],
    ids=lambda wanted: wanted.kind,
)
def test_g01_the_refusal_names_the_field(wanted: StructuredOutputsParams) -> None:
    with pytest.raises(RequestError, match=r"^response_format needs .*llguidance") as caught:
        check_structure(wanted, "response_format")
    assert caught.value.field == "response_format"
