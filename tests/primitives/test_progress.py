"""Progress that is told while a tool runs holds no secret, however the secret comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.primitives.progress import Lines, Pace
from kiwi_mcp.primitives.redaction import Redactor

LONG = "".join(chr(97 + number % 26) + str(number % 10) for number in range(1_500))
PEM = "-----BEGIN KEY-----\n" + "\n".join(f"{number:02}MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" for number in range(20)) + "\n"


def told(value: str, chunks: Sequence[bytes]) -> str:
    """Return all that a caller hears of a stream that comes in these chunks."""

    async def hear() -> str:
        heard: list[Progress] = []
        pace = Pace(heard.append, Redactor({"KEY": value}))
        lines = Lines(pace)
        for chunk in chunks:
            lines.add(chunk)
            pace.finish()
        return "\n".join(one.message for one in heard)

    return asyncio.run(hear())


@pytest.mark.case("SEC-05")
@pytest.mark.parametrize("size", [1, 7, 100, 5_000])
def test_a_secret_in_pieces_is_not_told(size: int) -> None:
    data = f"key: {LONG} end\n".encode()
    heard = told(LONG, [data[at : at + size] for at in range(0, len(data), size)])
    assert LONG[:20] not in heard
    assert "[redacted:KEY]" in heard


@pytest.mark.case("SEC-05")
def test_a_line_that_is_cut_off_does_not_end_in_a_part_of_a_secret() -> None:
    # What stands before it shrinks when it is redacted, so that its beginning would come into view.
    data = (LONG * 4).encode() + b"\n"
    heard = told(LONG, [data[at : at + 50] for at in range(0, len(data), 50)])
    assert LONG[:20] not in heard
    assert heard.startswith("[redacted:KEY]")


@pytest.mark.case("SEC-05")
def test_a_key_of_many_lines_is_not_told_line_by_line() -> None:
    heard = told(PEM, [f"{line}\n".encode() for line in PEM.splitlines()])
    assert "MIIE" not in heard
    assert heard.count("[redacted:KEY]") == len(PEM.splitlines())
