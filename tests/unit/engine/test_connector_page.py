"""The example of docs/how-to/add-a-connector.md, installed by pip, in a real engine."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from manyroots import LLM, SamplingParams
from tests.helpers.snippets import ROOT, snippets
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE = ROOT / "docs" / "how-to" / "add-a-connector.md"


def test_t14_a_package_adds_a_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """T14: by its entry point; one that is not named hears nothing."""
    source, target, model = (tmp_path / name for name in ("source", "target", "model"))
    source.mkdir()
    code = {each.language: each.text for each in snippets(PAGE) if "run by" in each.mark}
    (source / "page_log.py").write_text(code["python"])
    (source / "pyproject.toml").write_text(code["toml"])
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
         "--target", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.syspath_prepend(target)
    save_tiny(model, "llama", vocab_size=300)
    tiny_backend().save(str(model / "tokenizer.json"))
    told = []
    for names in ((), ("page-log",)):
        with LLM(
            str(model), dtype="float32", block_size=4, max_model_len=64, max_num_seqs=2,
            num_gpu_blocks_override=28, progress_bars=False, kv_connectors=names,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            llm.generate([list(range(3, 45))], params)
        for thread in threading.enumerate():
            if thread.name == "connector page-log":
                thread.join()
        told.append(capfd.readouterr().out)
    assert told[0] == ""
    assert "'PagesAllocated': 1" in told[1]
    assert "'PagesStored'" in told[1]
