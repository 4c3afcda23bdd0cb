"""A real server of a tiny model with random weights: engine, wire and all, in a process of its own.

Its template knows tools and reasoning, so that every endpoint has something to do.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.conftest import API_KEY, Server, running
from tests.helpers.slow_steps import slow_steps
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import BOS, EOS, tiny_backend

MODEL = "tiny"
ADMIN_KEY = "the-admin"
CONTEXT = 512
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def write_model(folder: Path, context: int = CONTEXT, *, kind: str = "llama") -> None:
    save_tiny(folder, kind, vocab_size=300, max_position_embeddings=context)
    tiny_backend().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def tiny_server(*flags: str, context: int = CONTEXT, num_pages: int = 512) -> Iterator[Server]:
    """Answers are short unless their request says otherwise."""
    with starting_server(*flags, context=context, num_pages=num_pages) as server:
        server.wait_until_ready()
        yield server


@contextlib.contextmanager
def starting_server(
    *flags: str, context: int = CONTEXT, num_pages: int = 512, is_slow: bool = False
) -> Iterator[Server]:
    """One that may not be ready yet. `is_slow`: each step takes long, so that a long answer is
    still under way when something else happens."""
    with tempfile.TemporaryDirectory(prefix="manyroots-tiny-") as home:
        write_model(Path(home), context)
        with running(
            home, "--served-model-name", MODEL, "--api-key", API_KEY, "--dtype", "float32",
            "--num-gpu-blocks-override", str(num_pages), "--max-num-seqs", "16",
            "--override-generation-config", json.dumps({"max_new_tokens": 8}), *flags,
            env=slow_steps(Path(home)) if is_slow else None,
        ) as server:  # fmt: skip
            yield server
