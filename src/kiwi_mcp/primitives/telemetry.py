"""Traces of calls to MCP servers, sent to an OpenTelemetry collector if the owner's environment names one."""

from __future__ import annotations

import os
from importlib import import_module

from kiwi_mcp.domain.errors import install_line


def start_tracing() -> str:
    """Send traces from now on if a collector is named; return what is missing for that, empty if nothing is."""
    places = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not (named := next((name for name in places if os.environ.get(name)), "")):
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
