from __future__ import annotations

import base64
import json
import re
import urllib.parse
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.primitives.redaction import Redactor, exempt, redact

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
def test_a_secret_is_found_in_the_forms_it_may_come_back_in(encoded: str) -> None:
    shown = redact(f"before {encoded} after", {"KEY": VALUE})
    assert "[redacted:KEY]" in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert len(shown) < len("before [redacted:KEY] after") + 16


def test_short_and_common_values_and_public_names_are_left_alone_and_listed() -> None:
    secrets = {"SHORT": "abc", "FLAG": "True", "HOME": "/home/someone", "PORT": "5432", "KEY": "abcd", "EMPTY": ""}
    assert redact("abc True /home/someone 5432 abcd", secrets) == "abc True /home/someone 5432 [redacted:KEY]"
    assert exempt(secrets) == ("SHORT", "FLAG", "HOME", "PORT")


def test_the_longer_of_two_secrets_is_taken_first() -> None:
    assert (
        redact("token-123-extra token-123", {"A": "token-123", "B": "token-123-extra"}) == "[redacted:B] [redacted:A]"
    )


def test_bytes_that_are_no_text_are_cleaned_too() -> None:
    assert Redactor({"K": "hunter22"}).clean(b"\xff\x00hunter22\xfe") == b"\xff\x00[redacted:K]\xfe"


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(["hunter22", "hunter2", "22", "x", "hunt", base64.b64encode(b"hunter22").decode()])),
    st.data(),
)
def test_a_stream_is_cleaned_the_same_however_it_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    redactor = Redactor({"K": "hunter22"})
    edges = [0, *cuts, len(text)]
    streamed = b"".join(redactor.feed(text[a:b]) for a, b in pairwise(edges)) + redactor.finish()
    assert streamed == redactor.clean(text)
    assert b"hunter22" not in streamed
