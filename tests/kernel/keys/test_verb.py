"""The key verb: only the owner creates, trusts, revokes and rotates keys, and no private key is shown."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.manifest.signatures import fingerprint
from kiwi_mcp.primitives.secrets.encrypted_records import KeyPairs
from kiwi_mcp.primitives.secrets.key_storage import vault_key

OTHER = "A" * 43


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme"])


def key(machine: Machine, action: str, **words: Json) -> JsonObject:
    answer = machine.ask("key", action=action, **words)
    assert not answer.is_error, answer.content
    return answer.content


def refused(machine: Machine, action: str, **words: Json) -> str:
    answer = machine.ask("key", action=action, **words)
    assert answer.is_error, answer.content
    assert answer.content["suggestion"]
    return as_text(answer.content["code"])


def trust_of(machine: Machine, item: str) -> tuple[str, str]:
    response = machine.ask("load", item_id=item).content
    return as_text(response.get("trust")), as_text(response.get("signer"))


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
def test_an_item_that_the_owner_signs_has_the_key_of_the_owner(ann: Machine) -> None:
    ann.script("greet")
    assert trust_of(ann, "greet") == ("unsigned", "")
    ann.do("sign", "greet")
    assert trust_of(ann, "greet") == ("integrity", "")

    made = as_object(key(ann, "new", name="laptop")["key"])
    response = ann.do("sign", "greet")

    assert response["signer"] == made["fingerprint"] == fingerprint(as_text(made["key"]))
    assert trust_of(ann, "greet") == ("owner", made["fingerprint"])
    (link, *_) = map(as_object, as_list(ann.do("why", "greet")["chain"]))
    assert (link["trust"], link["signer"], link["integrity"]) == ("owner", made["fingerprint"], "signed")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-01")
def test_changed_content_under_a_key_signature_is_refused(ann: Machine) -> None:
    folder = ann.script("greet")
    key(ann, "new")
    ann.do("sign", "greet")
    (folder / "main.sh").write_text("echo evil\n")

    assert trust_of(ann, "greet")[0] == "tampered"
    assert ann.refused("run", "greet") == "content_hash_mismatch"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
def test_a_forged_signature_is_refused(ann: Machine) -> None:
    folder = ann.script("greet")
    key(ann, "new")
    ann.do("sign", "greet")
    manifest = folder / "tool.yaml"
    text = manifest.read_text()
    manifest.write_text(text.replace(text.splitlines()[0], text.splitlines()[0][:-20] + "A" * 20))

    assert trust_of(ann, "greet")[0] == "tampered"
    assert ann.refused("run", "greet") == "signature_refused"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", ["guide.md", "tool.json"])
def test_the_signer_is_stored_beside_a_file_that_has_no_comments(ann: Machine, name: str) -> None:
    if name == "guide.md":
        path = ann.put("knowledge/guide.md", "---\nid: guide\ntitle: Guide\nversion: 1.0.0\n---\n# Guide\n")
    else:
        words = {"tool_id": "guide", "tool_type": "script", "version": "1.0.0", "executor": "bash_runtime",
                 "description": "Guides", "config": {"entrypoint": "main.sh"}}  # fmt: skip
        ann.put("tools/guide/main.sh", "echo hi\n")
        path = ann.put("tools/guide/tool.json", json.dumps(words))
    key(ann, "new")
    ann.do("sign", "guide")

    beside = path.with_name(f"{name}.sig")
    assert ":ed25519:" in beside.read_text()
    assert ":ed25519:" not in path.read_text()
    assert trust_of(ann, "guide")[0] == "owner"
    ann.kernel = Kernel(ann.project, user=ann.user, cache=ann.cache, is_owner=False)
    assert ann.refused("sign", "guide") == "not_permitted"  # a plain hash does not replace the owner's signature
    assert trust_of(ann, "guide")[0] == "owner"


@pytest.mark.usefixtures("sandbox")
def test_only_the_owner_changes_keys_and_signs_with_them(ann: Machine) -> None:
    ann.script("greet")
    key(ann, "new")
    ann.do("sign", "greet")
    before = (ann.user / "trust.yaml").read_bytes()
    ann.kernel = Kernel(ann.project, user=ann.user, cache=ann.cache, is_owner=False)

    for action in ("new", "rotate"):
        assert refused(ann, action) == "not_permitted"
    for action in ("trust", "revoke"):
        assert refused(ann, action, publisher="globex", key=OTHER) == "not_permitted"
    assert len(as_list(key(ann, "list")["own"])) == 1
    assert ann.refused("sign", "greet") == "not_permitted"
    assert trust_of(ann, "greet")[0] == "owner"
    ann.script("wave")
    assert "signer" not in ann.do("sign", "wave")
    assert trust_of(ann, "wave")[0] == "integrity"
    assert (ann.user / "trust.yaml").read_bytes() == before


@pytest.mark.usefixtures("sandbox")
def test_a_private_key_is_stored_nowhere_in_plain_text(ann: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ann.script("greet")
    response = [
        key(ann, "new"),
        ann.do("sign", "greet"),
        ann.do("publish", "greet"),
        key(ann, "rotate"),
        key(ann, "list"),
    ]
    state = ann.user / "state"
    private = _private(state, as_text(as_object(response[0]["key"])["key"]))

    assert not [path for path in ann.home.rglob("*") if path.is_file() and private.encode() in path.read_bytes()]
    assert private not in json.dumps(response) + caplog.text
    for path in (*(state / "keys").glob("*.sealed"), ann.user / "trust.yaml"):
        assert path.stat().st_mode & 0o777 == 0o600


def _private(state: Path, public: str) -> str:
    pairs = KeyPairs(state / "keys", vault_key(state))
    record = pairs._sealed.read(public)
    assert record is not None
    return record.secrets["private"].reveal()


@pytest.mark.usefixtures("sandbox")
def test_a_key_with_a_missing_or_changed_file_signs_nothing(ann: Machine) -> None:
    folder = ann.script("greet")
    key(ann, "new")
    (sealed,) = (ann.user / "state" / "keys").glob("*.sealed")
    whole, before = sealed.read_bytes(), (folder / "tool.yaml").read_bytes()

    sealed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ann.refused("sign", "greet") == "store_damaged"
    sealed.unlink()
    assert ann.refused("sign", "greet") == "not_found"
    assert (folder / "tool.yaml").read_bytes() == before


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
def test_a_rotated_key_signs_and_old_signatures_stay_valid(ann: Machine) -> None:
    ann.script("one")
    ann.script("two")
    assert refused(ann, "rotate") == "not_found"
    old = as_object(key(ann, "new", name="laptop")["key"])
    ann.do("sign", "one")
    assert refused(ann, "new") == "invalid_request"
    response = key(ann, "rotate")
    new = as_object(response["key"])
    ann.do("sign", "two")

    assert as_text(response["rotation"]).startswith("kiwi-key:rotated:")
    assert trust_of(ann, "one") == ("owner", old["fingerprint"])
    assert trust_of(ann, "two") == ("owner", new["fingerprint"])
    key(ann, "revoke", key=old["fingerprint"], reason="lost")
    assert trust_of(ann, "one")[0] == "revoked"
    assert trust_of(ann, "two")[0] == "owner"


@pytest.mark.usefixtures("sandbox")
def test_an_expired_key_does_not_sign(ann: Machine) -> None:
    folder = ann.script("greet")
    key(ann, "new", expires="2026-01-01")

    assert as_object(as_list(key(ann, "list")["own"])[0])["state"] == "expired"
    assert "signer" not in ann.do("sign", "greet")
    assert ":ed25519:" not in (folder / "tool.yaml").read_text()
    assert refused(ann, "rotate") == "not_found"
    key(ann, "new", expires="90d")
    assert "signer" in ann.do("sign", "greet")


@pytest.mark.case("UNI-04")
def test_a_publisher_is_trusted_by_a_full_key_and_lookalikes_are_reported(ann: Machine) -> None:
    assert refused(ann, "trust", publisher="globex", key=fingerprint(OTHER)) == "invalid_request"
    assert refused(ann, "trust", publisher="public", key=OTHER) == "invalid_request"
    assert refused(ann, "trust", publisher="kiwi", key=OTHER) == "invalid_request"
    assert refused(ann, "trust", publisher="../x", key=OTHER) == "invalid_request"
    assert refused(ann, "trust", publisher="globex", rotation="x") == "invalid_request"
    assert refused(ann, "revoke", key=fingerprint(OTHER)) == "not_found"

    assert key(ann, "trust", publisher="globex", key=OTHER)["warnings"] == []
    doubt = key(ann, "trust", publisher="g1obex", key=OTHER)["warnings"]
    assert doubt == ["g1obex looks like globex, which is another publisher"]
    listed = [as_object(one) for one in as_list(key(ann, "list")["publishers"])]
    assert [(one["publisher"], one["fingerprint"], one["state"], one.get("looks_like")) for one in listed] == [
        ("globex", fingerprint(OTHER), "trusted", ["g1obex"]),
        ("g1obex", fingerprint(OTHER), "trusted", ["globex"]),
    ]


def test_the_trust_file_keeps_its_comments_and_a_broken_one_is_not_written(ann: Machine) -> None:
    path = ann.user / "trust.yaml"
    path.write_text("# mine\nversions: {}\n")
    key(ann, "trust", publisher="globex", key=OTHER)
    assert path.read_text().startswith("# mine\n")

    path.write_text("publishers: [what]\n")
    assert refused(ann, "trust", publisher="globex", key=OTHER) == "invalid_manifest"
    assert refused(ann, "list") == "invalid_manifest"
    assert path.read_text() == "publishers: [what]\n"


def test_changes_of_keys_are_in_the_receipts(ann: Machine) -> None:
    key(ann, "new")
    key(ann, "trust", publisher="globex", key=OTHER)
    listed = [as_object(one) for one in as_list(ann.ask("audit").content["receipts"])]

    assert [one["action"] for one in listed] == ["key trust", "key new"]


def test_concurrent_key_creation_leaves_an_intact_file(ann: Machine) -> None:
    async def both() -> None:
        kernels = [Kernel(ann.project, user=ann.user, cache=ann.cache) for _ in range(2)]
        words = [{"action": "trust", "publisher": name, "key": OTHER} for name in ("globex", "initech")]
        await asyncio.gather(*(one.call("key", said) for one, said in zip(kernels, words, strict=True)))
        for one in kernels:
            await one.aclose()

    asyncio.run(both())
    assert {as_text(as_object(one)["publisher"]) for one in as_list(key(ann, "list")["publishers"])} == {
        "globex",
        "initech",
    }


@pytest.mark.usefixtures("sandbox")
def test_a_publisher_is_trusted_by_the_fingerprint_that_the_registry_lists(ann: Machine) -> None:
    made = as_object(key(ann, "new")["key"])
    ann.script("greet")
    ann.do("sign", "greet")
    published = ann.ask("execute", action="publish", item_id="greet", parameters={"namespace": "acme"})
    assert not published.is_error, published.content
    (item,) = [
        one
        for one in map(as_object, as_list(ann.ask("execute", action="list").content["items"]))
        if one["namespace"] == "acme"
    ]

    trusted = key(ann, "trust", publisher="acme", key=item["signer"])

    assert as_object(trusted["key"])["key"] == made["key"]
    assert refused(ann, "trust", publisher="acme", key=fingerprint(OTHER)) == "invalid_request"
