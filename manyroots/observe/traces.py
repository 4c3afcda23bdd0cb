"""A span per request for OpenTelemetry, where its SDK is installed and an endpoint is given.

Takes the facts of requests that have ended; gives spans with the attributes that vLLM's have
(`gen_ai.*`), under the caller's own span where its headers name one (`traceparent`). Sent by OTLP
over HTTP from a thread of the SDK.
"""

from __future__ import annotations

from typing import Any

from manyroots.errors import ConfigError
from manyroots.observe.requests import RequestFacts
from manyroots.version import __version__


class Traces:
    """Passes requests on to a collector."""

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:
        """`exporter`: another than OTLP's, for tests."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry, which is not installed "
                f"({error}); pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, "
                "or leave the flag out."
            ) from error
        resource = Resource.create({"service.name": "manyroots", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint))
        )
        self._tracer = self._provider.get_tracer("manyroots", __version__)

    def __call__(self, facts: RequestFacts) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(facts.headers)),
            kind=SpanKind.SERVER,
            attributes=_attributes(facts),
            start_time=facts.begin_ns,
        )
        span.end(end_time=facts.begin_ns + int(facts.total_s * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(facts: RequestFacts) -> dict[str, Any]:
    sampling = facts.submits[0].sampling
    attributes: dict[str, Any] = {
        "gen_ai.request.id": facts.id,
        "gen_ai.response.model": facts.model,
        "gen_ai.request.n": facts.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": facts.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": facts.num_output_tokens,
        "gen_ai.usage.cached_tokens": facts.num_cached_tokens,
        "gen_ai.latency.e2e": facts.total_s,
        "gen_ai.response.finish_reasons": list(facts.finish_reasons),
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if facts.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = facts.first_token_s
    if facts.adapters:
        attributes["manyroots.adapters"] = facts.adapters
    return attributes
