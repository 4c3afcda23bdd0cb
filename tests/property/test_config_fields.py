"""A thin slice of what `python -m tests.soaks.config_fields` and `tests.soaks.adapter_fields` go
through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soaks.adapter_fields import FILES, Bench, of_files, of_written
from tests.soaks.config_fields import (
    EVERYWHERE,
    KINDS,
    NOT_OF_THE_MODEL,
    OF_NO_ACCOUNT,
    Trial,
    fields_of,
    fields_read,
    is_fault,
    judgements,
)


@pytest.mark.filterwarnings("ignore")
def test_f01_each_value_of_a_field_is_transformers_or_refused_by_name(tmp_path: Path) -> None:
    """F01."""
    fields = ["is_causal", "rope_parameters", "num_key_value_heads"]
    endings = list(judgements(Trial("llama", tmp_path), "llama", fields))
    assert [one for one in endings if is_fault(one[2].how)] == []
    assert {"read", "refused by name", "of no account"} <= {one[2].how for one in endings}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma3", "granite-h", "qwen3-moe"])
def test_f01_fields_of_other_architectures_count_for_nothing(kind: str, tmp_path: Path) -> None:
    """F01: strangers leave them in config.json."""
    own = {*fields_of(kind), *fields_read(kind), *EVERYWHERE, *NOT_OF_THE_MODEL}
    # Transformers refuses one of another length in every config, so that there is no model of it
    # to compare ours with.
    own.add("mlp_layer_types")
    foreign = {n: v for other in KINDS for n, v in fields_of(other).items() if n not in own}
    assert len(foreign) > 20
    assert Trial(kind, tmp_path).compare(foreign).how in ("read", OF_NO_ACCOUNT)


@pytest.mark.filterwarnings("ignore")
def test_w12_options_and_files_of_adapters_are_pefts_or_refused_by_name(tmp_path: Path) -> None:
    """W12."""
    bench = Bench(tmp_path / "base", "llama")
    endings = [*of_written(bench, tmp_path / "written", ["init_lora_weights", "target_modules"])]
    endings += of_files(bench, tmp_path / "files", None)
    assert len(endings) > len(FILES)
    assert [one for one in endings if is_fault(one[2].how)] == []
