"""The official conformance suite, against Kiwi as a server and as a client, in the two revisions that it knows.

Every scenario passes, or stands in exceptions.yaml with the checks that fail and the reason, which only gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Failed = Mapping[str, Mapping[str, str]]
Run = Callable[..., Failed]

EXCEPTIONS: list[Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_name("exceptions.yaml").read_text())
MOST_EXCEPTIONS = 5
REVISIONS = pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])


def compare(subtests: pytest.Subtests, side: str, revision: str, found: Failed) -> None:
    """Hold what failed against the exceptions, one scenario after the other."""
    known = {
        entry["scenario"]: set(entry["checks"])
        for entry in EXCEPTIONS
        if entry["side"] == side and revision in entry["revisions"]
    }
    assert known.keys() <= found.keys()
    for scenario, failed in sorted(found.items()):
        with subtests.test(scenario):
            assert failed.keys() == known.get(scenario, set()), dict(failed)


@REVISIONS
def test_kiwi_as_a_server_passes_every_scenario(
    run_suite: Run, served: str, revision: str, subtests: pytest.Subtests
) -> None:
    compare(subtests, "server", revision, run_suite("server", revision, "--url", served))


@REVISIONS
def test_kiwi_as_a_client_passes_every_scenario(
    run_suite: Run, client_command: str, revision: str, subtests: pytest.Subtests
) -> None:
    found = run_suite("client", revision, "--command", client_command, "--timeout", "180000")

    compare(subtests, "client", revision, found)


def test_every_exception_has_a_reason_and_their_number_does_not_grow() -> None:
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS
    assert all(set(entry) == {"side", "revisions", "scenario", "checks", "reason"} for entry in EXCEPTIONS)
    assert all(entry["checks"] and entry["reason"] for entry in EXCEPTIONS)
