"""Trust: whom the owner trusts for an item, from the trust file, and that invalid files grant no trust."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.items import Manifest, Signature
from kiwi_mcp.manifest.signatures import statement_for
from kiwi_mcp.manifest.trust import LOCAL, NO_TRUST, Trusted, TrustedKey, owner_trust, scope_of, vouch

AT, DIGEST = "2026-11-16T10:00:00Z", "cd" * 32
MANIFEST = Manifest("greet", "script", "1.0.0", executor="bash_runtime")
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
PUBLIC = urlsafe_b64encode(PRIVATE.public_key().public_bytes_raw()).rstrip(b"=").decode()


def signed(namespace: str, manifest: Manifest = MANIFEST) -> Signature:
    data = statement_for(manifest, namespace=namespace, digest=DIGEST, timestamp=AT, key=PUBLIC)
    return Signature(AT, DIGEST, key=PUBLIC, proof=urlsafe_b64encode(PRIVATE.sign(data)).rstrip(b"=").decode())


def trust(signature: Signature | None, trusted: Trusted, *, at: str = "acme", integrity: str = "signed") -> str:
    return vouch(MANIFEST, DIGEST, signature, integrity, namespace=at, trusted=trusted)


def pinned(key: TrustedKey, scope: str = "acme") -> Trusted:
    return Trusted(publishers={scope: {PUBLIC: key}})


OWN = Trusted(own={PUBLIC: TrustedKey(PUBLIC, namespaces=("acme",))})
KNOWN = pinned(TrustedKey(PUBLIC))


@pytest.mark.req("K-SI-02")
def test_each_state_has_one_cause() -> None:
    assert trust(None, KNOWN, integrity="unsigned") == "unsigned"
    assert trust(None, KNOWN, integrity="published") == "unsigned"
    assert trust(Signature(AT, DIGEST), KNOWN) == "integrity"
    assert trust(Signature(AT, "ab"), KNOWN, integrity="valid:B2") == "integrity"
    assert trust(Signature(AT, "ab"), KNOWN, integrity="modified") == "tampered"
    assert trust(signed("acme"), KNOWN) == "verified"
    assert trust(signed("acme"), OWN) == "owner"
    assert trust(signed("acme"), NO_TRUST) == "unknown_key"
    assert trust(signed("acme"), pinned(TrustedKey(PUBLIC, revoked=AT))) == "revoked"
    assert trust(signed("acme"), pinned(TrustedKey(PUBLIC, expires="2026-01-01T00:00:00Z"))) == "revoked"
    assert trust(signed("acme"), pinned(TrustedKey(PUBLIC, expires="2999-01-01T00:00:00Z"))) == "verified"
    assert trust(replace(signed("acme"), timestamp="2026-11-16T10:00:01Z"), KNOWN) == "tampered"
    assert trust(replace(signed("acme"), hash="ef" * 32), KNOWN) == "tampered"


@pytest.mark.req("K-SI-02")
def test_a_signature_is_good_in_its_own_namespace_alone() -> None:
    assert trust(signed("acme"), KNOWN, at="evil") == "tampered"
    assert trust(signed("evil"), KNOWN, at="evil") == "unknown_key"
    assert trust(signed("acme"), pinned(TrustedKey(PUBLIC), "globex"), at="acme") == "unknown_key"


def test_a_copy_in_a_folder_has_the_trust_of_its_source() -> None:
    assert trust(signed("acme"), KNOWN, at=LOCAL) == "verified"
    assert trust(signed("acme"), OWN, at=LOCAL) == "owner"
    assert trust(signed(LOCAL), OWN, at=LOCAL) == "owner"
    assert trust(signed(LOCAL), KNOWN, at=LOCAL) == "unknown_key"
    assert trust(signed("acme"), NO_TRUST, at=LOCAL) == "unknown_key"
    assert trust(signed("globex"), KNOWN, at=LOCAL) == "tampered"


def test_in_the_shared_namespace_a_key_is_good_for_one_item() -> None:
    assert scope_of("public", "greet") == "public/greet"
    assert trust(signed("public"), pinned(TrustedKey(PUBLIC), "public/greet"), at="public") == "verified"
    assert trust(signed("public"), pinned(TrustedKey(PUBLIC), "public/other"), at="public") == "unknown_key"


@pytest.mark.parametrize(
    "written",
    [
        "[]",
        "owner: {}",
        "own: []",
        "own: {short: {}}",
        f"own: {{{PUBLIC}: {{revokd: now}}}}",
        f"publishers: {{acme: {{{PUBLIC}: {{trust: full}}}}}}",
        "publishers: {acme: {nokey: {}}}",
        "a: b: c",
        "\x00",
    ],
)
def test_an_invalid_trust_file_is_refused(tmp_path: Path, written: str) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text(written)

    with pytest.raises(InvalidManifest):
        owner_trust(path)


def test_a_dangling_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trust.yaml").symlink_to(tmp_path / "elsewhere.yaml")

    with pytest.raises(InvalidManifest):
        owner_trust(tmp_path / "trust.yaml")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trust.yaml"
    assert owner_trust(path) == NO_TRUST

    path.write_text(
        f"publishers:\n  acme:\n    {PUBLIC}: {{since: '{AT}', how: trusted}}\nversions: {{acme/greet: 1.0.0}}\n"
    )
    found = owner_trust(path)
    assert found.pinned("acme", "greet")[PUBLIC].how == "trusted"
    assert found.versions == {"acme/greet": "1.0.0"}
    assert owner_trust(path) is found
