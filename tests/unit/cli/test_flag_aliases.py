"""Command lines of vLLM's and SGLang's users start, or say what to change (G10)."""

from __future__ import annotations

from typing import Any

import pytest

from manyroots import flag_aliases
from manyroots.cli.main import main
from manyroots.config import EngineSettings
from manyroots.server_config import ServerSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineSettings, ServerSettings]]:
    calls: list[tuple[EngineSettings, ServerSettings]] = []

    def record(engine: EngineSettings, server: ServerSettings) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("manyroots.api.server.serve", record)
    monkeypatch.setattr("manyroots.engine.preflight.check_start", lambda *_, **__: None)
    return calls


@pytest.mark.parametrize(
    "line",
    [
        "Qwen/Qwen3-8B --trust-remote-code --tensor-parallel-size 2 --max-model-len 32K "
        "--gpu-memory-utilization 0.92 --enable-chunked-prefill --enable-prefix-caching",
        "--model Qwen/Qwen3-8B --dtype half --disable-log-requests --swap-space 16 -tp 2 "
        "--max-model-len 32768 --disable-log-stats --uvicorn-log-level warning",
        "--trust-remote-code Qwen/Qwen3-8B --max_model_len=32768 --tensor_parallel_size=2 "
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 -O3 "
        "--async-scheduling --pipeline-parallel-size 1 --kv-cache-dtype fp8",
        "--model-path Qwen/Qwen3-8B --tp-size 2 --context-length 32768 --mem-fraction-static 0.85 "
        "--chunked-prefill-size 8192 --schedule-policy lpm --enable-metrics --page-size 32 "
        "--max-running-requests 128 --random-seed 1 --attention-backend fa3 --log-level info",
        "--model-path Qwen/Qwen3-8B --tp 2 --context-length 32768 --dtype float --enable-lora "
        "--lora-paths a=/x b=/y --max-loras-per-batch 4 --disable-radix-cache --disable-cuda-graph",
    ],
)
def test_g10_a_pasted_command_line_starts(line: str, served: list[Any]) -> None:
    assert main(["serve", *line.split()]) == 0
    [(engine, _)] = served
    assert engine.model.model == "Qwen/Qwen3-8B"
    assert engine.model.max_model_len == 32768
    assert engine.model.tensor_parallel_size == 2


def test_g10_what_is_on_anyway_is_noted(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["serve", "--enable-chunked-prefill", "m", "--max-running-requests", "7"])
    notes = capsys.readouterr().err.splitlines()
    assert "--enable-chunked-prefill has no effect: it is always on here" in notes[0]
    assert "--max-running-requests is --max-num-seqs here" in notes[1]
    [(engine, _)] = served
    assert (engine.model.model, engine.scheduler.max_num_seqs) == ("m", 7)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-num-seq 4", "Did you mean --max-num-seqs?"),
        ("--enable-chunked-prefil", "Did you mean --enable-chunked-prefill?"),
        ("--zzz", "--zzz is no flag of serve. See"),
        ("--pipeline-parallel-size 2", "only 1 can be had here: use --tensor-parallel-size"),
        ("--served-model-name a b", "give one name"),
        ("--swap-space", "without a value"),
        ("--max-logprobs 50", "--max-logprobs is 50; it must be from 0 to 20"),
        ("--override-generation-config {", "is not JSON"),
        ('--override-generation-config {"temp":1}', "it must be a JSON object of temperature"),
        ('--override-generation-config {"top_p":7}', "top_p"),
        ("--allowed-origins a.example", "--allowed-origins has 'a.example'"),
        ("--allowed-origins [1", "words or a JSON list"),
        ("--allowed-origins * --allow-credentials", "Name the origins"),
        ("--allow-credentials", "without --allowed-origins"),
        ("--root-path llm", "--root-path is 'llm'"),
        ("--ssl-keyfile k.pem", "without --ssl-certfile"),
        ("--ssl-certfile c --ssl-cert-reqs 2", "without --ssl-ca-certs"),
    ],
)
def test_g10_what_cannot_be_had_says_what_to_change(
    line: str, says: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *line.split()]) == 2
    assert says in capsys.readouterr().err
    assert served == []


def test_g10_lists_are_words_or_json(served: list[Any]) -> None:
    main(["serve", "--allowed-origins", '["https://a.example", "http://b:80"]'])
    main(["serve", "--allowed-origins", "https://a.example", "http://b:80"])
    main(["serve", "--allowed-origins", '["*"]', "--override-generation-config", '{"top_k": 5}'])
    origins = [server.allowed_origins for _, server in served]
    assert origins == [("https://a.example", "http://b:80")] * 2 + [("*",)]


def test_g10_a_value_that_looks_like_a_short_number_is_left_alone(served: list[Any]) -> None:
    main(["serve", "--api-key", "12k", "--max-num-seqs", "1k"])
    [(engine, server)] = served
    assert (server.api_key, engine.scheduler.max_num_seqs) == ("12k", 1000)


def test_g10_no_flag_has_two_meanings() -> None:
    """What we have ourselves is ours; a flag is renamed, accepted or missing, not two of them."""
    tables = (flag_aliases.RENAMED, flag_aliases.ACCEPTED, flag_aliases.MISSING)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
