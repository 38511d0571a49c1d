"""Traces of calls to MCP servers, sent to an OpenTelemetry collector if the owner's environment names one."""

from __future__ import annotations

import os
from importlib import import_module

from kiwi_mcp.domain.extras import install_line

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def start_tracing() -> str:
    """Send traces from now on if a collector is named; return what is missing for that, empty if nothing is."""
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if named is None:
        return ""
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        batches = import_module("opentelemetry.sdk.trace.export")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    except ImportError:
        return f"{named} is set, and no traces are sent. Install the extra `otel`: {install_line('otel')}."
    provider = sdk.TracerProvider()
    provider.add_span_processor(batches.BatchSpanProcessor(exporter))
    import_module("opentelemetry.trace").set_tracer_provider(provider)
    return ""
