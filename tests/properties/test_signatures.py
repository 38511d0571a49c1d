"""Property: an item that changed after signing is never trusted."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.catalog.item_reader import open_tool
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.manifest.signatures import sign, statement_for

AT = "2026-11-16T10:00:00Z"
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
MANIFEST = (
    'tool_id: greet\ntool_type: script\nversion: "1.0.0"\nexecutor: bash_runtime\n'
    "description: Greets\nconfig:\n  entrypoint: main.sh\n"
)


def text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


PUBLIC = text(PRIVATE.public_key().public_bytes_raw())


def trust_of(folder: Path, trust_file: Path) -> str:
    try:
        return open_tool(
            folder / "tools/greet/tool.yaml", source="registry", namespace="acme", base=folder, trust_file=trust_file
        ).tool.trust
    except KiwiError:
        return "unreadable"


def laid_out(folder: Path) -> Path:
    """Lay out an item that is signed by a publisher whom the owner trusts, and return the file that says so."""
    home = folder / "tools" / "greet"
    home.mkdir(parents=True)
    (home / "main.sh").write_text("echo hi\n")
    (home / "tool.yaml").write_text(MANIFEST)
    tool = open_tool(home / "tool.yaml", source="registry", namespace="acme", base=folder).tool
    data = statement_for(tool.manifest, namespace="acme", digest=tool.digest, timestamp=AT, key=PUBLIC)
    signed = sign(MANIFEST, ".yaml", timestamp=AT, digest=tool.digest, key=PUBLIC, proof=text(PRIVATE.sign(data)))
    (home / "tool.yaml").write_text(signed)
    trust = folder / "trust.yaml"
    trust.write_text(f"publishers: {{acme: {{{PUBLIC}: {{since: '{AT}'}}}}}}\n")
    return trust


@pytest.mark.req("K-SI-02")
@given(
    name=st.sampled_from(["tool.yaml", "main.sh"]),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.binary(min_size=0, max_size=2),
)
@settings(max_examples=40, deadline=None)
def test_changed_content_is_never_trusted(name: str, place: float, byte: bytes) -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        trust_file = laid_out(folder)
        assert trust_of(folder, trust_file) == "verified"
        path = folder / "tools" / "greet" / name
        before = path.read_bytes()
        at = int(place * len(before))
        after = before[:at] + byte + before[at + 1 :]
        path.write_bytes(after)

        is_same = after.replace(b"\r\n", b"\n") == before
        assert (trust_of(folder, trust_file) == "verified") is (is_same if name == "tool.yaml" else after == before)
