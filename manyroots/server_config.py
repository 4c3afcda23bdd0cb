"""Settings of the server alone: where it listens, which callers it answers, and what it reports.

Takes flags or a YAML file's values; gives frozen settings. The engine's are in `config.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from manyroots.config import EngineSettings
from manyroots.errors import ConfigError
from manyroots.options import at_least, check_choices, flag_name, option
from manyroots.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server talks to the outside."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = option(8000, "Port to listen on.")
    root_path: str = option(
        "", "Path prefix of this server at a proxy, as /llm; the proxy may strip it or not."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may call this server, as https://a.example; * for all.",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that those pages may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that those pages may send.")
    allow_credentials: bool = option(False, "Let those pages send cookies; not with origin *.")
    ssl_certfile: str | None = option(None, "Certificate, with its chain; serves HTTPS.")
    ssl_keyfile: str | None = option(None, "The certificate's key, if not in the same file.")
    ssl_keyfile_password: str | None = option(None, "Password of that key.")
    ssl_ca_certs: str | None = option(None, "CA certificates to verify client certificates.")
    ssl_cert_reqs: int = option(0, "Client certificates: 0 not requested, 1 optional, 2 required.")
    api_key: str | None = option(
        None, "Key that callers must send as a bearer token. Also read from MANYROOTS_API_KEY."
    )
    enable_lora_endpoints: bool = option(
        False, "Serve routes to load and unload adapters; they need the admin key."
    )
    admin_key: str | None = option(
        None,
        "Bearer token of the admin routes; must differ from --api-key. Also read from "
        "MANYROOTS_ADMIN_KEY.",
    )
    keys_file: str | None = option(
        None,
        "JSON file of keys that may use only named adapters, each with its own limits; see "
        "docs/adapters.md. Needs --admin-key.",
    )
    usage_log: str | None = option(
        None, "Append a line of JSON to this file for every request: key, adapter and tokens."
    )
    metrics_key: str | None = option(
        None,
        "Bearer token for metrics by adapter at /metrics; without it a caller gets only those of "
        "the whole server. Also read from MANYROOTS_METRICS_KEY.",
    )
    max_queued_requests: int = option(
        1024, "Sequences that may wait, beyond --max-num-seqs; further callers get 429."
    )
    max_body_bytes: int = option(8 * 2**20, "Maximum bytes of a request body.")
    strict_requests: bool = option(
        False, "Refuse unknown request fields; otherwise they are logged once."
    )
    max_logprobs: int = option(MAX_LOGPROBS, "Maximum logprobs per token.")
    request_read_timeout_s: float = option(
        60.0, "Maximum seconds to receive a whole request; slower callers get 408."
    )
    max_prompts_per_request: int = option(256, "Maximum prompts times n in one request.")
    max_engine_restarts: int = option(
        3,
        "Consecutive restarts of a dead engine process, after pauses of 1, 2, 4... seconds; then "
        "the server exits. 0: never restart. Five minutes of service reset the count.",
    )
    replicas: int = option(
        1, "Engine processes on this machine; a router chooses one for each request."
    )
    gateways: int = option(
        1,
        "Processes that answer HTTP, on --port and the ports after it. With more than one, engines "
        "outlive a gateway that dies.",
    )
    max_replicas: int | None = option(
        None,
        "Replicas that autoscaling may have; --replicas is the least. Default: no autoscaling.",
    )
    target_ongoing_requests: int | None = option(
        None,
        "Requests per replica at which autoscaling aims. Default: three quarters of "
        "--max-num-seqs.",
    )
    upscale_delay_s: float = option(
        10.0, "Seconds that a load must last before autoscaling adds replicas."
    )
    downscale_delay_s: float = option(
        300.0, "Seconds that a lower load must last before autoscaling removes replicas."
    )
    replica_backend: str = option(
        "processes",
        "Where replicas run: processes of this machine, or actors of a Ray cluster (RAY_ADDRESS; "
        "without it, a Ray of this machine).",
        choices=("processes", "ray"),
    )
    routing_policy: str = option(
        "expected-ttft",
        "How the router chooses a replica: by the expected time to the first token, by the "
        "shortest queue, or in turn.",
        choices=("expected-ttft", "least-queue", "round-robin"),
    )
    replica_silence_s: float = option(
        60.0, "Seconds after which a replica that has requests and says nothing is drained."
    )
    max_api_restarts: int = option(
        3,
        "Consecutive restarts of a crashed API process, after pauses of 0, 1, 2... seconds; then "
        "the server exits. 0: never restart. Five minutes of service reset the count.",
    )
    drain_timeout_s: float = option(30.0, "Seconds that running requests may take after SIGTERM.")
    enable_log_requests: bool = option(
        False, "Log a line for each finished request: tokens, times and finish reason."
    )
    log_stats: bool = option(
        True, "While busy, log running and waiting requests and tokens/s every ten seconds."
    )
    page: bool = option(
        True,
        "Show the cache, the scheduler and the adapters at /. The data needs the admin key; if "
        "there is none, a browser on this machine.",
    )
    otlp_traces_endpoint: str | None = option(
        None, "OTLP endpoint that gets a span per request, as http://host:4318/v1/traces."
    )
    log_level: str = option(
        "info", "Minimum level of log lines.", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be from 0 to 65535.")
        _check_web(self)
        _check_tls(self)
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(
                f"--max-logprobs is {self.max_logprobs}; it must be from 0 to {MAX_LOGPROBS}, "
                "which is the most that this engine computes."
            )
        at_least(self, "max_queued_requests", 0)
        at_least(self, "max_body_bytes", 1024)
        at_least(self, "max_prompts_per_request", 1)
        at_least(self, "max_engine_restarts", 0)
        if not 1 <= self.replicas <= 1000:
            raise ConfigError(f"--replicas is {self.replicas}; it must be from 1 to 1000.")
        if not 1 <= self.gateways <= 64:
            raise ConfigError(f"--gateways is {self.gateways}; it must be from 1 to 64.")
        if self.port and self.port + self.gateways - 1 > 65535:
            raise ConfigError(
                f"--port is {self.port}, and {self.gateways} gateways need the ports after it; "
                "choose a lower one."
            )
        most = self.max_replicas
        if most is not None and not self.replicas <= most <= 1000:
            raise ConfigError(
                f"--max-replicas is {most}; it must be from --replicas, {self.replicas}, to 1000."
            )
        if self.target_ongoing_requests is not None:
            at_least(self, "target_ongoing_requests", 1)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            if not 0.0 <= getattr(self, name) <= 86400.0:
                raise ConfigError(
                    f"{flag_name(name)} is {getattr(self, name)}; it must be from 0 to 86400."
                )
        if not 0.0 < self.replica_silence_s <= 86400.0:
            raise ConfigError(
                f"--replica-silence-s is {self.replica_silence_s}; it must be above 0 and at most "
                "86400."
            )
        at_least(self, "max_api_restarts", 0)
        if not 0.0 < self.request_read_timeout_s <= 86400.0:
            raise ConfigError(
                f"--request-read-timeout-s is {self.request_read_timeout_s}; it must be above 0 "
                "and at most 86400."
            )
        if not 0.0 <= self.drain_timeout_s <= 3600.0:
            raise ConfigError(
                f"--drain-timeout-s is {self.drain_timeout_s}; it must be from 0 to 3600."
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; it must be an http:// or https:// URL."
            )
        if self.api_key == "":
            raise ConfigError("--api-key is empty; leave it out to serve without a key.")
        if self.admin_key == "":
            raise ConfigError("--admin-key is empty; give one that can't be guessed.")
        if self.metrics_key == "":
            raise ConfigError("--metrics-key is empty; leave it out to show all figures.")
        if self.keys_file is not None and self.admin_key is None:
            raise ConfigError(
                "--keys-file is given without --admin-key, for which page and metrics are kept "
                "then; give that too."
            )
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ConfigError(
                "--admin-key and --api-key are the same; a caller of the API could then load "
                "adapters. Give two."
            )
        if self.enable_lora_endpoints and self.admin_key is None:
            raise ConfigError(
                "--enable-lora-endpoints needs --admin-key, so that not every caller can load "
                "and unload adapters."
            )
        check_choices(self)


def _check_web(settings: ServerSettings) -> None:
    path = settings.root_path
    if path and (not path.startswith("/") or path.endswith("/") or "//" in path):
        raise ConfigError(f"--root-path is {path!r}; write it as /llm, or leave it out.")
    for origin in settings.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}; an origin is a scheme, a host and perhaps a "
                "port, as https://a.example:8443, or * for all."
            )
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise ConfigError(
            "--allow-credentials is given with the origin *: any page could then use its reader's "
            "cookies. Name the origins."
        )
    if settings.allow_credentials and not settings.allowed_origins:
        raise ConfigError("--allow-credentials is given without --allowed-origins; give those too.")


def _check_tls(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{flag_name(name)} is given without --ssl-certfile; give that too."
                )
    if settings.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(f"--ssl-cert-reqs is {settings.ssl_cert_reqs}; it must be 0, 1 or 2.")
    if settings.ssl_cert_reqs and settings.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs is given without --ssl-ca-certs; give that too.")


def check_together(engine: EngineSettings, server: ServerSettings) -> None:
    """What only shows when a server's settings meet its engine's."""
    if not server.enable_lora_endpoints:
        return
    if not engine.lora.enable_lora:
        raise ConfigError("--enable-lora-endpoints is given without --enable-lora; give that too.")
    if not engine.lora.lora_dirs and not engine.lora.lora_source:
        raise ConfigError(
            "--enable-lora-endpoints needs --lora-dirs or --lora-source: the folders or addresses "
            "below which adapters may be loaded."
        )


def server_settings(values: Mapping[str, Any]) -> ServerSettings:
    """Settings of the server from flags or a file. Lists may be written in JSON, as vLLM's are."""
    many = {spec.name for spec in fields(ServerSettings) if isinstance(spec.default, tuple)}
    made: dict[str, Any] = {
        name: _words(name, value) if name in many else value for name, value in values.items()
    }
    return ServerSettings(**made)


def _words(name: str, value: Any) -> tuple[str, ...]:
    words: list[str] = []
    for word in [value] if isinstance(value, str) else value or []:
        try:
            listed = json.loads(word) if word.startswith("[") else [word]
        except ValueError:
            listed = None
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise ConfigError(f"{flag_name(name)} is {word!r}; write words or a JSON list.")
        words += listed
    return tuple(words)
