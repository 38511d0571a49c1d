"""Progress of a running tool contains no secret, in any chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.primitives.process.run import ProgressLines, ProgressThrottle
from kiwi_mcp.primitives.secrets.redaction import Redactor

LONG = "".join(chr(97 + number % 26) + str(number % 10) for number in range(1_500))
PEM = "-----BEGIN KEY-----\n" + "\n".join(f"{number:02}MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" for number in range(20)) + "\n"


def reported_text(value: str, chunks: Sequence[bytes]) -> str:
    """Return all that a caller hears of a stream that comes in these chunks."""

    async def hear() -> str:
        heard: list[Progress] = []
        pace = ProgressThrottle(heard.append, Redactor({"KEY": value}))
        lines = ProgressLines(pace)
        for chunk in chunks:
            lines.add(chunk)
            pace.finish()
        return "\n".join(one.message for one in heard)

    return asyncio.run(hear())


@pytest.mark.case("SEC-05")
@pytest.mark.parametrize("size", [1, 7, 100, 5_000])
def test_a_secret_in_several_chunks_is_not_reported(size: int) -> None:
    data = f"key: {LONG} end\n".encode()
    heard = reported_text(LONG, [data[at : at + size] for at in range(0, len(data), size)])
    assert LONG[:20] not in heard
    assert "[redacted:KEY]" in heard


@pytest.mark.case("SEC-05")
def test_a_cut_line_does_not_end_with_part_of_a_secret() -> None:
    # What stands before it shrinks when it is redacted, so that its beginning would come into view.
    data = (LONG * 4).encode() + b"\n"
    heard = reported_text(LONG, [data[at : at + 50] for at in range(0, len(data), 50)])
    assert LONG[:20] not in heard
    assert heard.startswith("[redacted:KEY]")


@pytest.mark.case("SEC-05")
def test_a_multi_line_key_is_not_reported_line_by_line() -> None:
    heard = reported_text(PEM, [f"{line}\n".encode() for line in PEM.splitlines()])
    assert "MIIE" not in heard
    assert heard.count("[redacted:KEY]") == len(PEM.splitlines())
