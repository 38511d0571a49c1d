"""Optional parts of Kiwi, and the command that installs each beside this Kiwi."""

from __future__ import annotations

import sys
from collections.abc import Mapping

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "dbos": ("dbos>=3.3,<4",),
    "keyring": ("keyring>=25,<26",),
    "otel": ("opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"),
    "postgres": ("psycopg[binary]>=3.2,<4",),
}
"""The packages of each extra, as `pyproject.toml` lists them."""


def install_line(extra: str) -> str:
    """Return the command that installs an extra for the Python that runs this."""
    packages = " ".join(f"'{package}'" for package in EXTRAS[extra])
    return f"`{sys.executable} -m uv pip install {packages}`"
