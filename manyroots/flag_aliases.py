"""Flags as users of vLLM and SGLang paste them, turned into ours.

Takes the words after `manyroots serve`, or the keyword arguments of `LLM`; gives those that are
known here, and a note for each flag that has no effect here because what it asks for is on anyway.
A flag whose effect is missing here, and an unknown one, is a ConfigError that says what to
write instead.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from manyroots.config import ENGINE_ROOMS
from manyroots.errors import ConfigError
from manyroots.options import flag_name

MODEL = ""
"""In `RENAMED`: the flag's value is the model, which has no flag here."""

RENAMED: dict[str, str] = {
    # vLLM
    "--model": MODEL,
    "-tp": "--tensor-parallel-size",
    "-q": "--quantization",
    "--disable-log-stats": "--no-log-stats",
    "--disable-log-requests": "--no-enable-log-requests",
    # SGLang
    "--model-path": MODEL,
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
    "--random-seed": "--seed",
    "--lora-paths": "--lora-modules",
    "--max-loras-per-batch": "--max-loras",
    "--max-loaded-loras": "--max-cpu-loras",
    "--admin-api-key": "--admin-key",
    "--log-requests": "--enable-log-requests",
    "--fastapi-root-path": "--root-path",
    "--preferred-sampling-params": "--override-generation-config",
}

SYNONYMS: dict[str, dict[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--device": {"gpu": "cuda"},
    "--quantization": {
        # What the checkpoint's own config says is enough.
        "compressed-tensors": "auto",
        "fbgemm_fp8": "auto",
        "gguf": "auto",
    },
    "--log-level": {"critical": "error", "trace": "debug"},
    "--generation-config": {"model": "auto"},
}
"""Values that mean the same by another word."""

UNSET: dict[str, tuple[str, ...]] = {
    "--max-model-len": ("auto", "-1"),
    "--tokenizer": ("auto",),
}
"""Values that ask for the default."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag that asks for what happens anyway, or that has nothing to act on here."""

    note: str
    has_value: bool = False
    only: tuple[str, ...] = ()
    """Values that are accepted; all if empty."""
    otherwise: str = ""
    """What to do about another value."""


_ALWAYS = "it is always on here"
_ONE_FORM = "there is one way to do this here, and it is used"
_NO_CODE = "no code that comes with a model is ever run here"
_MEASURED = "it is chosen at start by what fits"
_ONE = ("1",)
_TP = "use --tensor-parallel-size, or several servers"

ACCEPTED: dict[str, Accepted] = {
    # vLLM
    "--trust-remote-code": Accepted(_NO_CODE),
    "--enable-chunked-prefill": Accepted(_ALWAYS),
    "--no-enable-chunked-prefill": Accepted("prompts are always computed in chunks here"),
    "--async-scheduling": Accepted(_ALWAYS),
    "--no-async-scheduling": Accepted("steps are always planned one ahead here"),
    "--enable-auto-tool-choice": Accepted(_ALWAYS),
    "--enable-server-load-tracking": Accepted(_ALWAYS + ": GET /load"),
    "--enable-prompt-tokens-details": Accepted(_ALWAYS),
    "--enable-force-include-usage": Accepted("callers ask for it with stream_options"),
    "--enable-request-id-headers": Accepted(_ALWAYS),
    "--disable-fastapi-docs": Accepted("/docs and /openapi.json hold no secret"),
    "--disable-uvicorn-access-log": Accepted("there is no access log here"),
    "--disable-access-log-for-endpoints": Accepted("there is no access log here", has_value=True),
    "--disable-frontend-multiprocessing": Accepted("the engine always has a process of its own"),
    "--disable-hybrid-kv-cache-manager": Accepted(_ONE_FORM),
    "--disable-custom-all-reduce": Accepted(_ONE_FORM),
    "--disable-cascade-attn": Accepted(_ONE_FORM),
    "--enable-expert-parallel": Accepted("experts are split with --tensor-parallel-size"),
    "--enable-sleep-mode": Accepted(_ALWAYS + ": sleep() and wake_up(), or POST /sleep"),
    "--disable-async-output-proc": Accepted(_ONE_FORM),
    "--logprobs-mode": Accepted(
        "", True, ("raw_logprobs",), "logprobs are those before temperature and cuts; remove it"
    ),
    "--use-tqdm-on-load": Accepted("--progress-bars, which is on"),
    "--fully-sharded-loras": Accepted("adapters are always split over the ranks"),
    "--enable-tower-connector-lora": Accepted("no model with a tower is served"),
    "--show-hidden-metrics-for-version": Accepted("all metrics are shown", has_value=True),
    "--swap-space": Accepted("nothing is swapped here", has_value=True),
    "--cpu-offload-gb": Accepted("", True, ("0",), "weights stay on the device; remove it"),
    "--uvicorn-log-level": Accepted("--log-level is for everything", has_value=True),
    "--chat-template-content-format": Accepted(
        "", True, ("auto", "string"), "text parts are joined; remove it"
    ),
    "--max-log-len": Accepted("no text of a request is ever logged", has_value=True),
    "--max-seq-len-to-capture": Accepted(_MEASURED, has_value=True),
    "--max-parallel-loading-workers": Accepted(_ONE_FORM, has_value=True),
    "--max-num-partial-prefills": Accepted("as many as the step's tokens allow", has_value=True),
    "--max-long-partial-prefills": Accepted("as many as the step's tokens allow", has_value=True),
    "--num-scheduler-steps": Accepted("each step is planned by itself", has_value=True),
    "--distributed-executor-backend": Accepted("ranks are processes here", has_value=True),
    "--guided-decoding-backend": Accepted(_ONE_FORM, has_value=True),
    "--structured-outputs-config": Accepted(_ONE_FORM, has_value=True),
    "--structured-outputs-config.backend": Accepted(_ONE_FORM, has_value=True),
    "--attention-backend": Accepted(_ONE_FORM, has_value=True),
    "--prefix-caching-hash-algo": Accepted("tokens are compared, not hashes", has_value=True),
    "--compilation-config": Accepted("steps are captured as graphs; nothing is compiled", True),
    "--cuda-graph-sizes": Accepted(_MEASURED, has_value=True),
    "-O": Accepted("steps are captured as graphs; nothing is compiled", has_value=True),
    "--optimization-level": Accepted("steps are captured as graphs; nothing is compiled", True),
    "--limit-mm-per-prompt": Accepted("text alone is served", has_value=True),
    "--mm-processor-kwargs": Accepted("text alone is served", has_value=True),
    "--mm-processor-cache-gb": Accepted("text alone is served", has_value=True),
    "--allowed-local-media-path": Accepted("nothing a request names is opened", has_value=True),
    "--language-model-only": Accepted("text alone is served"),
    "--skip-mm-profiling": Accepted("text alone is served"),
    "--response-role": Accepted("", True, ("assistant",), "answers are the assistant's; remove it"),
    "--lora-dtype": Accepted("", True, ("auto",), "adapters have the model's; remove it"),
    "--lora-extra-vocab-size": Accepted("", True, ("0",), "adapters add no tokens; remove it"),
    "--runner": Accepted("", True, ("auto", "generate"), "embeddings are at /v1/embeddings"),
    "--task": Accepted("", True, ("auto", "generate"), "embeddings are at /v1/embeddings"),
    "--tokenizer-mode": Accepted("", True, ("auto", "hf", "mistral"), "leave it out"),
    "--config-format": Accepted("", True, ("auto", "hf"), "convert the model to safetensors"),
    "--model-impl": Accepted("", True, ("auto", "vllm"), "leave it out"),
    "--calculate-kv-scales": Accepted("keys and values in FP8 are kept without scales"),
    "--pipeline-parallel-size": Accepted("", True, _ONE, _TP),
    "-pp": Accepted("", True, _ONE, _TP),
    "--data-parallel-size": Accepted("", True, _ONE, _TP),
    "-dp": Accepted("", True, _ONE, _TP),
    "--api-server-count": Accepted("", True, _ONE, "one process serves HTTP; remove it"),
    "--nnodes": Accepted("", True, _ONE, "one machine is served; remove it"),
    "--stream-interval": Accepted("", True, _ONE, "every token is streamed; remove it"),
    "--hf-overrides": Accepted("", True, ("{}",), "edit the model's config.json"),
    "--rope-scaling": Accepted("", True, ("{}", "null"), "use --yarn-factor or edit config.json"),
    # SGLang
    "--enable-metrics": Accepted(_ALWAYS + ": GET /metrics"),
    "--enable-cache-report": Accepted(_ALWAYS),
    "--enable-mixed-chunk": Accepted(_ALWAYS),
    "--enable-torch-compile": Accepted("steps are captured as graphs; nothing is compiled"),
    "--enable-lora-overlap-loading": Accepted(_ALWAYS),
    "--enable-deterministic-inference": Accepted("a row's tokens depend on the row alone here"),
    "--disable-overlap-schedule": Accepted("steps are always planned one ahead here"),
    "--skip-server-warmup": Accepted("the engine warms up before it is ready"),
    "--cuda-graph-max-bs": Accepted(_MEASURED, has_value=True),
    "--cuda-graph-bs": Accepted(_MEASURED, has_value=True),
    "--max-total-tokens": Accepted("use --num-gpu-blocks-override for pages", has_value=True),
    "--max-prefill-tokens": Accepted("--max-num-batched-tokens is the limit here", has_value=True),
    "--schedule-policy": Accepted(
        "requests share prefixes in any order",
        True,
        ("fcfs", "lpm", "dfs-weight"),
        "see --scheduling-policy for the order of requests",
    ),
    "--schedule-conservativeness": Accepted("no estimate is made that it could scale", True),
    "--watchdog-timeout": Accepted("a dead engine is started again at once", has_value=True),
    "--grammar-backend": Accepted(_ONE_FORM, has_value=True),
    "--sampling-backend": Accepted(_ONE_FORM, has_value=True),
    "--lora-backend": Accepted(_ONE_FORM, has_value=True),
    "--prefill-attention-backend": Accepted(_ONE_FORM, has_value=True),
    "--decode-attention-backend": Accepted(_ONE_FORM, has_value=True),
    "--log-level-http": Accepted("there is no access log here", has_value=True),
    "--log-requests-level": Accepted("no text of a request is ever logged", has_value=True),
    "--decode-log-interval": Accepted("a line is logged every ten seconds", has_value=True),
    "--tokenizer-worker-num": Accepted("", True, _ONE, "one process serves HTTP; remove it"),
    "--pp-size": Accepted("", True, _ONE, _TP),
    "--dp-size": Accepted("", True, _ONE, _TP),
    "--dp": Accepted("", True, _ONE, _TP),
    "--ep-size": Accepted("experts are split with --tensor-parallel-size", has_value=True),
    "--disable-hybrid-swa-memory": Accepted(_ONE_FORM),
}

MISSING: dict[str, str] = {
    "--adapter-patience-steps": "use --adapter-quantum-steps: how long an adapter runs",
    "--speculative-algorithm": 'use --speculative-config \'{"method": "suffix"}\'',
    "--kv-transfer-config": "there is no transfer between engines here; remove it",
    "--enable-hierarchical-cache": "the server has no host tier yet; remove it",
    "--download-dir": "set HF_HOME for hub downloads, or give the model's folder",
    "--hf-token": "set HF_TOKEN in the environment",
    "--worker-extension-cls": "no code is loaded by name; update_weights takes a folder",
    "--enable-prompt-embeds": "prompts are text or token ids; remove it",
    "--skip-tokenizer-init": "every request here goes through the tokenizer; remove it",
    "--ssl-refresh": "restart the server for a new certificate; remove it",
    "--enable-ssl-refresh": "restart the server for a new certificate; remove it",
    "--middleware": "no code is loaded by name; put a proxy in front",
    "--code-revision": "no code that comes with a model is ever run here; remove it",
    "--tokenizer-revision": "give --tokenizer the folder of that revision",
    "--enable-log-outputs": "no text of a request is ever logged; remove it",
    "--enable-priority-scheduling": "use --scheduling-policy priority; the lower comes first",
    "--headless": "one machine is served; remove it",
    "--is-embedding": "embeddings of the served model are at /v1/embeddings; remove it",
    "--json-model-override-args": "edit the model's config.json",
}
"""Flags whose effect is missing here: what to do instead."""


_OF_SERVERS = ("--log-stats", "--enable-log-requests", "--log-level", "--max-logprobs")
"""Flags of `serve` that scripts hand to an engine in their own process, too."""


def translate_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same for keyword arguments of `LLM`: those that are none of theirs as they are, and
    notes. None asks for the default, and False for nothing where the thing can't be had."""
    known = {flag_name(spec.name) for room in ENGINE_ROOMS.values() for spec in fields(room)}
    ours: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        flag = RENAMED.get(flag_name(name), flag_name(name)) or "--model"
        if flag.startswith("--no-"):
            flag, value = f"--{flag[5:]}", not value
        if value is None:
            continue
        if flag in known:
            value = _plain_value(flag, value)
            if str(value) not in UNSET.get(flag, ()):
                ours[flag[2:].replace("-", "_")] = value
        elif flag in _OF_SERVERS:
            notes.append(f"{name} has no effect: it is of servers.")
        elif flag in ACCEPTED:
            notes.append(_accepted(flag, [_as_word(value)], []))
        elif flag not in MISSING:
            ours[name] = value
        elif value is not False:
            raise _unknown(flag, known)
    return ours, notes


def _plain_value(flag: str, value: Any) -> Any:
    """A path, torch's name of a dtype and other words for the same."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if flag == "--dtype":
        value = str(value).removeprefix("torch.")
    return SYNONYMS.get(flag, {}).get(value, value) if isinstance(value, str) else value


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def translate(words: Iterable[str], known: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Our words, and notes about flags that had no effect. `known`: our own flags, and whether
    each takes a whole number."""
    ours: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--", "-h", "--help") or _is_number(word):
            ours.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        values = [value] if equals else []
        if not equals:
            while rest and (not rest[0].startswith("-") or _is_number(rest[0])):
                values.append(rest.pop(0))
        if flag.startswith("-O") and flag[2:].isdecimal():
            flag = "-O"
        if flag in known:
            ours += _spelled(flag, values, known)
        elif flag in RENAMED:
            notes += _renamed(flag, values, ours, known)
        elif flag in ACCEPTED:
            notes.append(_accepted(flag, values, ours))
        else:
            raise _unknown(flag, known)
    return ours, notes


def _spelled(flag: str, values: list[str], known: Mapping[str, bool]) -> list[str]:
    if values and values[0] in UNSET.get(flag, ()):
        return values[1:]
    if flag == "--served-model-name" and len(values) > 1:
        raise ConfigError(f"--served-model-name is {' '.join(values)}; give one name.")
    same = SYNONYMS.get(flag, {})
    values = [same.get(value, value) for value in values]
    return [flag, *(_plain_number(value) if known.get(flag) else value for value in values)]


def _renamed(flag: str, values: list[str], ours: list[str], known: Mapping[str, bool]) -> list[str]:
    mine = RENAMED[flag]
    if mine == MODEL:
        ours[:0] = values[:1]
        ours += values[1:]
        return []
    ours += _spelled(mine, values, known)
    return [f"{flag} is {mine} here."]


def _accepted(flag: str, values: list[str], ours: list[str]) -> str:
    accepted = ACCEPTED[flag]
    if not accepted.has_value:
        ours += values  # the model, after a flag that takes nothing
    elif not values and flag != "-O":
        raise ConfigError(f"{flag} is given without a value; remove it, as it has no effect here.")
    if accepted.only and values and values[0] not in accepted.only:
        allowed = " or ".join(accepted.only)
        raise ConfigError(
            f"{flag} is {values[0]!r}; only {allowed} can be had here: {accepted.otherwise}."
        )
    return f"{flag} has no effect: {accepted.note or 'this is how it is anyway'}."


def _unknown(flag: str, known: Collection[str]) -> ConfigError:
    if flag in MISSING:
        return ConfigError(f"{flag} can't be had here: {MISSING[flag]}.")
    near = difflib.get_close_matches(flag, [*known, *RENAMED, *ACCEPTED], n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    return ConfigError(f"{flag} is no flag of serve.{hint} See `manyroots serve --help`.")


def _plain_number(value: str) -> str:
    """vLLM's short forms: 32k is 32,000 and 32K is 32,768."""
    scales = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if value[:-1].isdecimal() and value[-1:] in scales:
        return str(int(value[:-1]) * scales[value[-1]])
    return value


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
