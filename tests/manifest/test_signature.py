from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import Signature
from kiwi_mcp.manifest.signatures import comment_style, line, read_detached, sidecar, sign, split

TIME = "2026-11-16T10:20:30Z"
HASH = "ab" * 32
OLD_HASH = "0123456789ab"
SUFFIXES = [
    ".md", ".html", ".py", ".yaml", ".yml", ".sh", ".toml", ".rb", ".pl", ".r", ".jl", ".nim", ".ps1", ".js", ".mjs",
    ".cjs", ".ts", ".tsx", ".jsx", ".rs", ".go", ".c", ".cc", ".cpp", ".h", ".java", ".kt", ".swift", ".php", ".scala",
    ".zig", ".dart", ".lua", ".sql", ".hs", ".lisp", ".clj", ".el", ".ini", ".asm", ".erl", ".tex", ".css", ".ml",
    ".bat", ".f90", ".unheard_of", "",
]  # fmt: skip


def signed(text: str, suffix: str) -> str:
    return sign(text, suffix, timestamp=TIME, digest=HASH)


@pytest.mark.req("K-SI-01")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_comment_form_is_written_and_read_back(suffix: str) -> None:
    text = "body\nmore\n"
    first, _, rest = signed(text, suffix).partition("\n")
    assert first == comment_style(suffix).comment(f"kiwi-mcp:validated:{TIME}:{HASH}")
    assert rest == text
    assert split(signed(text, suffix), suffix) == (Signature(TIME, HASH), text)


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (".md", f"<!-- kiwi-mcp:validated:{TIME}:{HASH} -->"),
        (".py", f"# kiwi-mcp:validated:{TIME}:{HASH}"),
        (".ts", f"// kiwi-mcp:validated:{TIME}:{HASH}"),
        (".lua", f"-- kiwi-mcp:validated:{TIME}:{HASH}"),
        (".css", f"/* kiwi-mcp:validated:{TIME}:{HASH} */"),
        (".PY", f"# kiwi-mcp:validated:{TIME}:{HASH}"),
    ],
)
def test_the_line_is_first_and_a_comment_of_the_language(suffix: str, expected: str) -> None:
    assert signed("x\n", suffix) == f"{expected}\nx\n"


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("#!/<?php-\n\r a:x{}0")), suffix=st.sampled_from(SUFFIXES))
def test_signing_preserves_every_other_byte_and_is_idempotent(text: str, suffix: str) -> None:
    once = signed(text, suffix)
    signature, body = split(once, suffix)
    assert signature == Signature(TIME, HASH)
    assert body == split(text, suffix)[1]
    assert signed(once, suffix) == once


@pytest.mark.case("SIG-07")
def test_a_shebang_stays_first() -> None:
    text = "#!/usr/bin/env python3\nprint()\n"
    assert signed(text, ".py").splitlines()[0] == "#!/usr/bin/env python3"
    assert split(signed(text, ".py"), ".py") == (Signature(TIME, HASH), text)


def test_a_rust_attribute_is_not_a_shebang() -> None:
    assert signed("#![allow(dead_code)]\n", ".rs").startswith("// kiwi-mcp:")


def test_a_php_file_is_signed_inside_its_php_block() -> None:
    text = "#!/usr/bin/env php\n<?php\necho 1;\n"
    assert signed(text, ".php").splitlines()[2].startswith("// kiwi-mcp:validated:")
    assert split(signed(text, ".php"), ".php")[1] == text


@pytest.mark.case("SIG-07")
def test_a_second_signature_line_is_content() -> None:
    inner = signed("x\n", ".py")
    twice = f"# {line(TIME, 'cd' * 32)}\n{inner}"
    assert split(twice, ".py") == (Signature(TIME, "cd" * 32), inner)


@pytest.mark.case("SIG-07")
def test_crlf_line_ends_are_read_and_preserved() -> None:
    text = "a: 1\r\nb: 2\r\n"
    assert signed(text, ".yaml").startswith(f"# {line(TIME, HASH)}\r\n")
    assert split(signed(text, ".yaml"), ".yaml") == (Signature(TIME, HASH), text)


@pytest.mark.case("SIG-07")
def test_a_line_after_a_byte_order_mark_is_not_a_signature() -> None:
    text = "\ufeff" + signed("x\n", ".py")
    assert split(text, ".py") == (None, text)
    with pytest.raises(InvalidRequest, match="byte-order mark"):
        signed(text, ".py")


@pytest.mark.case("SIG-07")
@pytest.mark.parametrize(
    "first",
    [
        f"#  kiwi-mcp:validated:{TIME}:{HASH}",
        f" # kiwi-mcp:validated:{TIME}:{HASH}",
        f"# kiwi-mcp:validated:{TIME}:{HASH} ",
        f"# kiwi-mcp:validated:{TIME}:{HASH.upper()}",
        f"# kiwi-mcp:validated:{TIME}:{HASH}00",
        f"# kiwi-mcp:validated:{TIME}:{HASH[:40]}",
        f"# kiwi-mcp:validated:{TIME}:abc123",
        f"# kiwi-mcp:validated:{HASH}",
        f"// kiwi-mcp:validated:{TIME}:{HASH}",
        f"# Kiwi-MCP:validated:{TIME}:{HASH}",
        f"# kiwi-mcp:validated:{'9' * 1_000_000}:{HASH}",
        "# " + "x" * 1_000_000,
    ],
    ids=str.__len__,
)
def test_a_nearly_correct_signature_is_content(first: str) -> None:
    text = f"{first}\nx = 1\n"
    assert split(text, ".py") == (None, text)


@pytest.mark.case("PINJ-02")
def test_a_signature_further_down_is_data() -> None:
    text = f"title\n<!-- {line(TIME, HASH)} -->\n"
    assert split(text, ".md") == (None, text)


def test_a_line_without_a_line_end_is_content() -> None:
    assert split(f"# {line(TIME, HASH)}", ".py")[0] is None


@pytest.mark.parametrize("filler", ["placeholder", "0" * 64, "0" * 12, "{HASH}"])
def test_a_placeholder_is_unsigned_and_signing_replaces_it(filler: str) -> None:
    text = f"# kiwi-mcp:validated:{TIME}:{filler}\nx\n"
    assert split(text, ".py") == (None, "x\n")
    assert signed(text, ".py") == f"# {line(TIME, HASH)}\nx\n"


def test_lines_of_twelve_digits_and_of_the_successor_are_read() -> None:
    assert split(f"# kiwi-mcp:validated:{TIME}:{OLD_HASH}\n", ".py")[0] == Signature(TIME, OLD_HASH)
    rye = f"<!-- rye:signed:{TIME}:{HASH}:aGVsbG8_-w==:0011223344556677|central@someone -->\n"
    assert split(rye + "x", ".md") == (Signature(TIME, HASH, "rye"), "x")
    assert split(f"# rye:validated:{TIME}:{HASH}\nx", ".py") == (Signature(TIME, HASH, "rye"), "x")


def test_early_knowledge_entries_have_their_signature_in_the_frontmatter() -> None:
    text = f"---\ntitle: T\nvalidated_at: {TIME}\ncontent_hash: {OLD_HASH}\n---\nbody\n"
    assert split(text, ".md") == (Signature(TIME, OLD_HASH), text)
    assert split(text.replace(OLD_HASH, "0" * 12), ".md")[0] is None
    assert split(text.replace("---\nbody", "body"), ".md")[0] is None
    assert split(signed(text, ".md"), ".md") == (Signature(TIME, HASH), text)


def test_the_signature_of_a_json_file_is_beside_it() -> None:
    text = '{"tool_id": "a"}\n'
    assert split(text, ".json") == (None, text)
    assert sidecar("tool.json") == "tool.json.sig"
    assert read_detached(f"{line(TIME, HASH)}\n") == Signature(TIME, HASH)
    assert read_detached(f"{line(TIME, HASH)}\nmore\n") is None
    assert read_detached("x" * 1_000_000) is None
    with pytest.raises(InvalidRequest, match="no comments"):
        signed(text, ".json")


@pytest.mark.parametrize(("time", "digest"), [("yesterday", HASH), (TIME, "abc"), (f"{TIME}\n", HASH)])
def test_a_line_is_only_made_from_valid_parts(time: str, digest: str) -> None:
    with pytest.raises(InvalidRequest):
        line(time, digest)
