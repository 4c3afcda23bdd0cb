"""The server under test, over HTTP: completions as a party, adapters, and what it says of itself.

Takes an address and parties; gives completions with their logprobs, cached tokens and times. Knows
the ways in which servers differ (paths, names of fields), and judges nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from manyroots.errors import ConfigError, ManyrootsError

MAX_TOKENS = 4
"""Of an answer whose tokens are compared. Differences show in the first ones."""
_TOP = 5
_LOAD_PATHS = ("/v1/load_lora_adapter", "/load_lora_adapter")
_UNLOAD_PATHS = ("/v1/unload_lora_adapter", "/unload_lora_adapter")


class RefusedError(ManyrootsError):
    """The server answered with an error, or not at all."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """0: no answer."""


@dataclass(frozen=True, slots=True)
class Party:
    """What a request is sent as: two parties must not notice each other's prompts."""

    label: str
    model: str
    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the body, such as `cache_salt`."""

    def salted(self, salt: str, label: str | None = None) -> Party:
        fields = {**self.fields, "cache_salt": salt}
        return replace(self, label=label or self.label, fields=fields)


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One answer."""

    tokens: tuple[str, ...]
    top: tuple[Mapping[str, float], ...]
    """Logprobs of the likeliest tokens at each position; empty if the server gives none."""
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    """None: the server does not say."""
    details: Mapping[str, Any]
    """Everything that the server says of the prompt's tokens."""
    num_accepted: int | None
    """Tokens of the answer that were drafted and accepted; None: the server does not say."""
    seconds: float


class ConformanceClient:
    """One server. A client for all threads."""

    def __init__(self, url: str, admin_key: str | None = None, timeout_s: float = 120.0) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"URL is {url!r}; it must be like http://127.0.0.1:8000.")
        self.url = base
        self._admin_key = admin_key
        self._http = httpx.Client(base_url=base, timeout=timeout_s)

    def close(self) -> None:
        self._http.close()

    def ask(
        self, party: Party, prompt: str, max_tokens: int = MAX_TOKENS, seed: int | None = None
    ) -> CheckedAnswer:
        """A greedy completion, or one that is sampled with a seed."""
        sampling = {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}
        body = {
            "model": party.model, "prompt": prompt, "max_tokens": max_tokens, "logprobs": _TOP,
            **sampling, **party.fields,
        }  # fmt: skip
        began = time.perf_counter()
        answer = self._post("/v1/completions", body, party.key)
        seconds = time.perf_counter() - began
        try:
            return _completion(answer, seconds)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(f"a completion can't be read ({error!r}): {answer}", 200) from error

    def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        body: dict[str, Any] = {"lora_name": name, "lora_path": path}
        if in_place:
            body["load_inplace"] = True
        self._adapters(_LOAD_PATHS, body)

    def unload(self, name: str) -> None:
        self._adapters(_UNLOAD_PATHS, {"lora_name": name})

    def models(self, key: str | None) -> list[dict[str, Any]]:
        try:
            listed = self._get("/v1/models", key)["data"]
            assert isinstance(listed, list)
            return [model for model in listed if isinstance(model, dict) and "id" in model]
        except (LookupError, TypeError, AssertionError) as error:
            raise RefusedError(f"/v1/models lists no models ({error!r}).", 200) from error

    def wait_until_up(self, key: str | None, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.models(key)
                return
            except RefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def optional(self, path: str, key: str | None = None) -> Any:
        """What a path gives, or None where there is no such path."""
        with contextlib.suppress(RefusedError):
            return self._get(path, key)
        return None

    def _adapters(self, paths: tuple[str, ...], body: dict[str, Any]) -> None:
        """Servers differ in whether /v1 is part of the path."""
        for path in paths:
            try:
                self._post(path, body, self._admin_key, is_json=False)
                return
            except RefusedError as error:
                # A path that is not there; but an adapter that is not there is a 404, too.
                if error.status not in (404, 405) or path == paths[-1]:
                    raise

    def _get(self, path: str, key: str | None) -> Any:
        return self._send("GET", path, None, key, is_json=True)

    def _post(
        self, path: str, body: dict[str, Any], key: str | None, *, is_json: bool = True
    ) -> Any:
        return self._send("POST", path, body, key, is_json=is_json)

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, key: str | None, *, is_json: bool
    ) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            answer = self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise RefusedError(f"{method} {self.url}{path}: no answer ({error!r}).", 0) from error
        if answer.status_code != 200:
            raise RefusedError(
                f"{method} {path} answered {answer.status_code}: {answer.text[:300]}",
                answer.status_code,
            )
        if not is_json:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise RefusedError(f"{method} {path} gave no JSON.", 200) from error


def _completion(answer: dict[str, Any], seconds: float) -> CheckedAnswer:
    choice = answer["choices"][0]
    tokens, top = _logprobs(choice.get("logprobs") or {})
    usage = answer.get("usage") or {}
    details = dict(usage.get("prompt_tokens_details") or {})
    cached = details.get("cached_tokens")
    if cached is None:  # llama.cpp's own field
        cached = (answer.get("timings") or {}).get("cache_n")
    return CheckedAnswer(
        tokens=tokens or (str(choice.get("text", "")),),
        top=top,
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_cached_tokens=cached,
        details=details,
        num_accepted=(usage.get("completion_tokens_details") or {}).get(
            "accepted_prediction_tokens"
        ),
        seconds=seconds,
    )


def _logprobs(given: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Mapping[str, float], ...]]:
    """The chosen tokens, and the likeliest at each position: of completions, or as chats have
    them, which is llama.cpp's form for both."""
    if "content" in given:
        entries = given["content"] or []
        tokens = tuple(str(entry["token"]) for entry in entries)
        return tokens, tuple(
            {str(item["token"]): float(item["logprob"]) for item in entry["top_logprobs"]}
            for entry in entries
        )
    top = given.get("top_logprobs") or []
    return tuple(given.get("tokens") or ()), tuple(dict(entry) for entry in top if entry)
