"""Keys: a signature is bound to one item of one namespace and has one spelling."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.items import Manifest, Signature
from kiwi_mcp.manifest.signatures import (
    Rotation,
    fingerprint,
    has_sidecar,
    is_key,
    is_signed,
    line,
    matches_key,
    read_detached,
    read_rotations,
    sign,
    split,
    statement_for,
    with_sidecar,
)

AT, DIGEST = "2026-11-16T10:00:00Z", "ab" * 32
MANIFEST = Manifest("greet", "script", "1.0.0", executor="bash_runtime")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class Pair:
    """A key, and what it signs."""

    def __init__(self, seed: int) -> None:
        self.private = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        self.public = text(self.private.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> str:
        return text(self.private.sign(data))


ANN, BOB = Pair(1), Pair(2)


def stated(manifest: Manifest = MANIFEST, namespace: str = "acme", key: str = ANN.public) -> bytes:
    return statement_for(manifest, namespace=namespace, digest=DIGEST, timestamp=AT, key=key)


def test_a_statement_contains_the_item_its_namespace_its_content_and_the_key() -> None:
    assert stated() == (
        b'kiwi-sig-v1\0{"content_hash":"' + DIGEST.encode() + b'","executor":"bash_runtime","keyid":"'
        + ANN.public.encode() + b'","namespace":"acme","tool_id":"greet","tool_type":"script","ts":"'
        + AT.encode() + b'","version":"1.0.0"}'
    )  # fmt: skip


@pytest.mark.req("K-SI-02")
def test_a_signature_is_valid_for_nothing_else() -> None:
    proof = ANN.sign(stated())
    others = [
        stated(replace(MANIFEST, tool_id="other")),
        stated(replace(MANIFEST, version="1.0.1")),
        stated(replace(MANIFEST, executor="python_runtime")),
        stated(replace(MANIFEST, tool_type="api")),
        stated(namespace="evil"),
        stated(key=BOB.public),
    ]

    assert is_signed(ANN.public, proof, stated())
    assert not any(is_signed(ANN.public, proof, data) for data in others)
    assert not is_signed(BOB.public, proof, stated())


@given(place=st.integers(0, 85), letter=st.sampled_from(LETTERS))
@settings(max_examples=50, deadline=None)
def test_a_signature_has_one_spelling(place: int, letter: str) -> None:
    proof = ANN.sign(stated())
    other = proof[:place] + letter + proof[place + 1 :]

    assert is_signed(ANN.public, other, stated()) is (other == proof)


@pytest.mark.parametrize("key", ["", "A" * 42, "A" * 43 + "=", "ä" * 43, "A" * 42 + "B", "A" * 43])
def test_an_invalid_key_has_signed_nothing(key: str) -> None:
    assert not is_signed(key, ANN.sign(stated()), stated())


def test_a_fingerprint_matches_in_any_common_spelling() -> None:
    short = fingerprint(ANN.public)

    assert len(short.replace("-", "")) == 32
    assert fingerprint(BOB.public) != short
    for typed in (short, short.upper(), short.replace("-", ""), short.replace("-", " "), ANN.public):
        assert matches_key(ANN.public, typed)
    assert not matches_key(ANN.public, short[:-1])
    assert not matches_key(ANN.public, "")
    assert is_key(ANN.public)
    assert not is_key(short)


@pytest.mark.req("K-SI-02")
def test_a_key_is_rotated_by_its_own_signature() -> None:
    draft = Rotation(AT, ANN.public, BOB.public)
    sound = replace(draft, proof=ANN.sign(draft.data))

    assert Rotation.parse(str(sound)) == sound
    assert sound.is_sound
    assert not replace(draft, proof=BOB.sign(draft.data)).is_sound
    assert not replace(sound, new=Pair(3).public).is_sound
    assert not replace(sound, timestamp="2026-11-16T10:00:01Z").is_sound
    for broken in (f"{sound} ", f" {sound}", str(sound)[:-1], str(sound).replace("rotated", "moved")):
        assert Rotation.parse(broken) is None


KEYED = Signature(AT, DIGEST, key=ANN.public, proof="A" * 86)


@pytest.mark.case("SIG-07")
@pytest.mark.parametrize(
    ("suffix", "body"), [(".yaml", "a: 1\n"), (".py", "#!/usr/bin/python\nx = 1\n"), (".js", "x\n")]
)
def test_the_signature_line_names_the_signer_in_languages_with_line_comments(suffix: str, body: str) -> None:
    signed = sign(body, suffix, timestamp=AT, digest=DIGEST, key=KEYED.key, proof=KEYED.proof)

    assert split(signed, suffix) == (KEYED, body)
    assert split(signed.replace("\n", "\r\n"), suffix)[0] == KEYED
    assert len(max(signed.splitlines(), key=len)) < 300
    # A second line is content, and so is one that is longer or shorter than a line can be.
    assert split(signed + signed, suffix)[1] == body + signed
    for bad in (KEYED.proof[:-1], KEYED.proof + "A", KEYED.proof[:-1] + "+"):
        broken = signed.replace(KEYED.proof, bad)
        assert split(broken, suffix) == (None, broken)


@pytest.mark.case("SIG-07")
@pytest.mark.parametrize("suffix", [".md", ".html", ".css", ".ml"])
def test_the_signer_is_in_a_sidecar_file_in_languages_with_closed_comments(suffix: str) -> None:
    body = "# Title\n"
    signed = sign(body, suffix, timestamp=AT, digest=DIGEST, key=KEYED.key, proof=KEYED.proof)
    short = split(signed, suffix)[0]
    beside = line(AT, DIGEST, KEYED.key, KEYED.proof)

    assert has_sidecar(suffix)
    assert short == Signature(AT, DIGEST)
    assert with_sidecar(short, read_detached(f"{beside}\n")) == KEYED
    assert with_sidecar(short, read_detached(beside.replace("10:00:00", "10:00:01"))) == short
    assert with_sidecar(None, read_detached(beside)) is None
    inline = signed.replace(f"{DIGEST} ", f"{DIGEST}:ed25519:{KEYED.key}:{KEYED.proof} ")
    assert split(inline, suffix) == (None, inline)  # one way to write it


@pytest.mark.case("SIG-07")
def test_the_sidecar_file_contains_a_line_and_rotations_and_nothing_else() -> None:
    draft = Rotation(AT, ANN.public, BOB.public)
    rotation = replace(draft, proof=ANN.sign(draft.data))
    beside = f"{line(AT, DIGEST, KEYED.key, KEYED.proof)}\n"

    assert read_detached(f"{beside}{rotation}\n") == KEYED
    assert read_rotations(f"{beside}{rotation}\n") == (rotation,)
    assert read_detached(f"{beside}{beside}") is None
    assert read_detached(f"{beside}\n") is None
    assert read_detached(f"# {beside}") is None
    assert read_detached(beside + f"{rotation}\n" * 40) is None
