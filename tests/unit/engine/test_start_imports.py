"""What a start leaves alone: modules that take longer to import than what they are good for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

NEVER = {
    "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy",
    "huggingface_hub", "peft", "pandas", "scipy", "matplotlib",
}  # fmt: skip

FRONT = """
import manyroots.cli.main, manyroots.api.server, manyroots.engine.preflight
import manyroots.text.generation_config
"""
TOKENIZER = """
import sys
from manyroots.text.tokenizer_files import load_tokenizer
load_tokenizer(sys.argv[1])
"""
ENGINE = """
import sys
import manyroots.engine.process
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
for model in sys.argv[1:]:
    engine = build_engine(engine_settings({
        "model": model, "device": "cpu", "num_gpu_blocks_override": 32, "max_model_len": 64,
        "enable_lora": True, "max_loras": 1, "max_lora_rank": 8,
    }))
    engine.loop.close()
"""
TELL = """
import json, sys
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(code: str, *arguments: str) -> set[str]:
    """What a fresh process has imported when it has run `code`."""
    run = subprocess.run(
        [sys.executable, "-c", code + TELL, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_front_starts_without_torch() -> None:
    found = modules_after(FRONT)
    assert "manyroots.api.server" in found
    assert not found & (NEVER | {"torch"})


def test_the_front_reads_a_folders_tokenizer_without_torch(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", vocab_size=300)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    found = modules_after(f"{FRONT}{TOKENIZER}", str(tmp_path))
    assert "tokenizers" in found
    assert "torch" not in found


def test_engines_start_without_what_configs_of_transformers_import(tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in ("llama", "gemma3")]
    for folder in folders:
        save_tiny(folder, folder.name)
    found = modules_after(ENGINE, *map(str, folders))
    assert "torch" in found
    assert not found & NEVER
