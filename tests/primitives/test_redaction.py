from __future__ import annotations

import base64
import json
import re
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.primitives.secrets.redaction import Redactor, redact, unredactable

VALUE = 'p/ß"w+d=\\9&x y~z'


@pytest.mark.case("SEC-06")
@pytest.mark.parametrize(
    "encoded",
    [
        VALUE,
        VALUE[::-1],
        VALUE.encode().hex(),
        VALUE.encode().hex().upper(),
        urllib.parse.quote(VALUE),
        urllib.parse.quote(VALUE, safe=""),
        urllib.parse.quote_plus(VALUE),
        urllib.parse.urlencode({"k": VALUE}),
        re.sub("%..", lambda found: found[0].lower(), urllib.parse.quote(VALUE)),
        json.dumps(VALUE),
        json.dumps(VALUE, ensure_ascii=False),
        json.dumps({"a": [VALUE]}).replace("/", "\\/"),
        *(base64.b64encode(b"x" * lead + VALUE.encode() + b"yz").decode() for lead in range(3)),
        *(base64.urlsafe_b64encode(b"x" * lead + VALUE.encode() + b"yz").decode() for lead in range(3)),
    ],
)
def test_a_secret_is_redacted_in_all_its_encodings(encoded: str) -> None:
    shown = redact(f"before {encoded} after", {"KEY": VALUE})
    assert "[redacted:KEY]" in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert len(shown) < len("before [redacted:KEY] after") + 16


def test_short_and_common_values_and_public_names_are_not_redacted_and_are_listed() -> None:
    secrets = {"SHORT": "abc", "FLAG": "True", "HOME": "/home/someone", "PORT": "5432", "KEY": "abcd", "EMPTY": ""}
    assert redact("abc True /home/someone 5432 abcd", secrets) == "abc True /home/someone 5432 [redacted:KEY]"
    assert unredactable(secrets) == ("SHORT", "FLAG", "HOME", "PORT")


def test_the_longer_of_two_secrets_is_redacted_first() -> None:
    assert (
        redact("token-123-extra token-123", {"A": "token-123", "B": "token-123-extra"}) == "[redacted:B] [redacted:A]"
    )


def test_bytes_that_are_not_text_are_redacted_too() -> None:
    assert Redactor({"K": "hunter22"}).clean(b"\xff\x00hunter22\xfe") == b"\xff\x00[redacted:K]\xfe"


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from(["hunter22", "hunter2", "22", "x", "hunt", base64.b64encode(b"hunter22").decode()])),
    st.integers(0, 100),
)
def test_the_beginning_of_data_is_redacted_as_in_the_whole(parts: list[str], cut: int) -> None:
    text = "".join(parts).encode()
    redactor = Redactor({"K": "hunter22"})
    beginning = redactor.beginning(text[:cut])
    assert redactor.clean(text).startswith(beginning)
    assert b"hunter22" not in beginning
