"""Admission: a pulled version needs a trusted signature or an approval of the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.calls import NO_CALLER, Answers, Caller, Questions
from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Release, ReleaseFile, VersionName
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.store.remote.layout import Layout

Change = Callable[[bytes], bytes]
RUNTIME = (
    'tool_id: sh\ntool_type: runtime\nversion: "1.0.0"\nexecutor: subprocess\ndescription: Runs a file\n'
    'config: {command: sh, args: ["{tool.files}/{tool.entrypoint}"]}\n'
)


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    """A publisher with a key."""
    machine = a_machine("ann", namespaces=["acme", "public"])
    new_key(machine)
    return machine


@pytest.fixture
def eve(a_machine: MakeMachine) -> Machine:
    """Another who publishes under the same names, with a key of her own."""
    machine = a_machine("eve", namespaces=["acme", "public"])
    new_key(machine)
    return machine


@pytest.fixture
def bob(a_machine: MakeMachine) -> Machine:
    """The machine that installs."""
    return a_machine("bob", namespaces=["public"])


def new_key(machine: Machine) -> str:
    return as_text(as_object(machine.ask("key", action="new").content["key"])["fingerprint"])


def own_key(machine: Machine) -> JsonObject:
    return as_object(machine.ask("key", action="show").content["key"])


def shelf(machine: Machine, folder: Path) -> str:
    machine.exchange("push", folder)
    return str(folder)


def pull(machine: Machine, item: str, folder: str, caller: Caller = NO_CALLER, **words: Json) -> Answer:
    """Pull with these arguments and no other approval."""

    async def call() -> Answer:
        try:
            request: JsonObject = {"action": "pull", "item_id": item, "parameters": {"from": folder, **words}}
            return await machine.kernel.call("execute", request, caller)
        finally:
            await machine.kernel.aclose()

    return asyncio.run(call())


def code(answer: Answer) -> str:
    assert answer.is_error, answer.content
    assert answer.content["suggestion"]
    return as_text(answer.content["code"])


def got(answer: Answer) -> JsonObject:
    assert not answer.is_error, answer.content
    return answer.content


def trust_of(machine: Machine, item: str) -> str:
    return as_text(machine.ask("load", item_id=item).content.get("trust"))


def is_here(machine: Machine, item: str) -> bool:
    return not machine.ask("load", item_id=f"registry/{item}").is_error


def changed(folder: str, name: str, to: Path, change: Change) -> str:
    """A copy of a shelf in which the line that tells who signed a version is another one."""
    space, _, rest = name.partition("/")
    (release,) = Layout(Path(folder)).read([VersionName(space, *rest.split("@"))])
    made = Layout(to)
    made.write([replace(release, files=tuple(_altered(release, change)))], [])
    return str(to)


def _altered(release: Release, change: Change) -> list[ReleaseFile]:
    return [
        ReleaseFile(
            file.path, change(file.data) if file.path == release.manifest_path else file.data, file.is_executable
        )
        for file in release.files
    ]


def without_line(data: bytes) -> bytes:
    return data.partition(b"\n")[2]


def hash_only(data: bytes) -> bytes:
    first, _, rest = data.partition(b"\n")
    return first.partition(b":ed25519:")[0] + b"\n" + rest


def forged(data: bytes) -> bytes:
    first, _, rest = data.partition(b"\n")
    return first[:-30] + b"A" * 30 + b"\n" + rest


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-02")
@pytest.mark.req("K-SI-02")
def test_an_unknown_key_is_reported_and_pinned_if_the_owner_agrees(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.publish("greet", namespace="acme")
    folder, short = shelf(ann, tmp_path / "shelf"), as_text(own_key(ann)["fingerprint"])

    refused = pull(bob, "acme/greet", folder)
    assert code(refused) == "acknowledgement_required"
    assert short in as_text(refused.content["message"])
    assert f"--trust-key {short}" in as_text(refused.content["suggestion"])
    assert not is_here(bob, "acme/greet")
    assert code(pull(bob, "acme/greet", folder, trust_key="0000-" * 7 + "0000")) == "acknowledgement_required"
    assert code(pull(bob, "acme/greet", folder, accept_unsigned=True)) == "acknowledgement_required"

    response = got(pull(bob, "acme/greet", folder, trust_key=short))
    assert (response["trust"], response["signer"]) == ("verified", short)
    assert response["warnings"] == [f"acme is known by {short} from now on"]
    assert trust_of(bob, "acme/greet") == "verified"
    assert [as_object(one)["trust"] for one in as_list(bob.do("list", words={"namespace": "acme"})["items"])] == [
        "verified"
    ]

    # The next release of the same publisher needs no approval.
    ann.publish("wave", namespace="acme")
    assert got(pull(bob, "acme/wave", shelf(ann, tmp_path / "shelf")))["trust"] == "verified"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-02")
@pytest.mark.case("UNI-04")
def test_an_owner_who_is_present_is_asked_with_the_fingerprint(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.settle(namespaces=["acrne", "public"])
    ann.publish("greet", namespace="acrne")
    folder, short = shelf(ann, tmp_path / "shelf"), as_text(own_key(ann)["fingerprint"])
    bob.ask("key", action="trust", publisher="acme", key="A" * 43)
    asked: list[str] = []

    def owner(*, approve: bool) -> Caller:
        async def ask(questions: Questions) -> Answers:
            asked.extend(as_text(question.params["message"]) for question in questions.values())
            return {key: {"action": "accept", "content": {"approve": approve}} for key in questions}

        return Caller(ask=ask, is_owner=True)

    assert code(pull(bob, "acrne/greet", folder, owner(approve=False))) == "acknowledgement_required"
    assert (
        code(pull(bob, "acrne/greet", folder, replace(owner(approve=True), is_owner=False)))
        == "acknowledgement_required"
    )
    assert got(pull(bob, "acrne/greet", folder, owner(approve=True)))["trust"] == "verified"
    question = f"acrne/greet@1.0.0 is signed with a key of acrne that is not known here, {short}"
    assert (
        asked == [f"{question}, and its publisher looks like acme, which is another one. Install it all the same?"] * 2
    )
    (listed,) = map(as_object, as_list(bob.do("list", words={"namespace": "acrne"})["items"]))
    assert (listed["signer"], listed["trust"], listed["looks_like"]) == (short, "verified", ["acme"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("UNI-04")
def test_a_publisher_is_compared_with_every_namespace_of_the_registry(
    ann: Machine, bob: Machine, tmp_path: Path
) -> None:
    ann.settle(namespaces=["acme", "acrne", "public"])
    ann.publish("greet", namespace="acme")
    ann.publish("wave", namespace="acrne")
    folder = shelf(ann, tmp_path / "shelf")
    bob.settle(namespaces=["acme", "public"])
    bob.publish("other", namespace="acme")
    bob.settle(namespaces=["public"])
    assert "looks like acme" in as_text(pull(bob, "acrne/wave", folder).content["message"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-03")
@pytest.mark.req("K-SI-02")
def test_a_known_publisher_with_another_key_is_refused_in_any_case(
    ann: Machine, eve: Machine, bob: Machine, tmp_path: Path
) -> None:
    ann.publish("greet", namespace="acme")
    eve.publish("other", namespace="acme")
    eve.publish("greet", "2.0.0", namespace="acme")
    got(pull(bob, "acme/greet", shelf(ann, tmp_path / "hers"), trust_key=own_key(ann)["fingerprint"]))
    folder, hers = shelf(eve, tmp_path / "theirs"), own_key(eve)

    for item in ("acme/other", "acme/greet"):
        for words in ({}, {"trust_key": hers["fingerprint"]}, {"accept_unsigned": True}):
            assert code(pull(bob, item, folder, **words)) == "signature_refused"
    assert not is_here(bob, "acme/other")
    left_out = bob.ask("registry", action="pull", remote=folder, accept_unsigned=True, trust_key=hers["key"])
    assert code(left_out) == "acknowledgement_required"

    bob.ask("key", action="trust", publisher="acme", key=hers["key"])  # the owner asked them
    assert got(pull(bob, "acme/other", folder))["trust"] == "verified"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-03")
@pytest.mark.req("K-SI-02")
def test_a_new_key_is_accepted_if_the_old_one_signed_it(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.publish("greet", namespace="acme")
    got(pull(bob, "acme/greet", shelf(ann, tmp_path / "shelf"), trust_key=own_key(ann)["fingerprint"]))
    for _ in range(2):
        ann.ask("key", action="rotate")
    ann.publish("greet", "1.1.0", namespace="acme")
    new = as_text(own_key(ann)["fingerprint"])

    response = got(pull(bob, "acme/greet", shelf(ann, tmp_path / "shelf")))
    assert (response["trust"], response["signer"]) == ("verified", new)
    assert response["warnings"] == [f"acme signs with another key, {new}, as the old one says"]


@pytest.mark.case("SIG-03")
def test_a_rotation_statement_can_be_supplied_by_hand(ann: Machine, eve: Machine, bob: Machine) -> None:
    bob.ask("key", action="trust", publisher="acme", key=own_key(ann)["key"])
    statement = ann.ask("key", action="rotate").content["rotation"]
    stranger = eve.ask("key", action="rotate").content["rotation"]

    assert bob.ask("key", action="trust", publisher="acme", rotation=stranger).content["code"] == "signature_refused"
    response = bob.ask("key", action="trust", publisher="acme", rotation=statement).content
    assert as_object(response["key"])["fingerprint"] == own_key(ann)["fingerprint"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-04")
@pytest.mark.req("K-SI-02")
def test_a_revoked_key_installs_nothing_and_installed_items_are_flagged(
    ann: Machine, bob: Machine, tmp_path: Path
) -> None:
    ann.publish("greet", namespace="acme")
    ann.publish("wave", namespace="acme")
    folder, short = shelf(ann, tmp_path / "shelf"), own_key(ann)["fingerprint"]
    got(pull(bob, "acme/greet", folder, trust_key=short))
    bob.ask("key", action="revoke", key=short, reason="stolen")

    for words in ({}, {"trust_key": short}, {"accept_unsigned": True}):
        assert code(pull(bob, "acme/wave", folder, **words)) == "signature_refused"
    assert not is_here(bob, "acme/wave")
    assert trust_of(bob, "acme/greet") == "revoked"
    (listed,) = map(as_object, as_list(bob.do("list", words={"namespace": "acme"})["items"]))
    assert listed["trust"] == "revoked"
    (link, *_) = map(as_object, as_list(bob.do("why", "acme/greet")["chain"]))
    assert link["trust"] == "revoked"
    planned = bob.ask("execute", action="run", item_id="acme/greet", dry_run=True).content
    assert f"registry/acme/greet@1.0.0 is signed with {short}, a key that is revoked or has expired" in as_list(
        planned.get("warnings")
    )


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-04")
def test_an_expired_key_installs_nothing(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.publish("greet", namespace="acme")
    bob.ask("key", action="trust", publisher="acme", key=own_key(ann)["key"], expires="2026-01-01")

    assert code(pull(bob, "acme/greet", shelf(ann, tmp_path / "shelf"))) == "signature_refused"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (without_line, "acknowledgement_required", "signature_refused"),
        (hash_only, "acknowledgement_required", "signature_refused"),
        (forged, "signature_refused", "signature_refused"),
    ],
)
def test_a_signature_that_is_stripped_or_forged_is_refused(
    ann: Machine, bob: Machine, tmp_path: Path, change: Change, before: str, after: str
) -> None:
    ann.publish("greet", namespace="acme")
    ann.publish("greet", "1.1.0", namespace="acme")
    folder = shelf(ann, tmp_path / "shelf")
    bad = changed(folder, "acme/greet@1.1.0", tmp_path / "bad", change)

    assert code(pull(bob, "acme/greet", bad)) == before
    got(pull(bob, "acme/greet@1.0.0", folder, trust_key=own_key(ann)["fingerprint"]))
    assert code(pull(bob, "acme/greet", bad, accept_unsigned=True)) == after
    assert not is_here(bob, "acme/greet@1.1.0")
    left_out = bob.ask("registry", action="pull", remote=bad, accept_unsigned=True)
    assert code(left_out) == "acknowledgement_required"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
def test_a_signature_for_one_namespace_is_not_valid_in_another(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.publish("greet", namespace="acme")
    folder = shelf(ann, tmp_path / "shelf")
    (release,) = Layout(Path(folder)).read([VersionName("acme", "greet", "1.0.0")])
    moved = Layout(tmp_path / "moved")
    moved.write([replace(release, name=replace(release.name, namespace="evil"))], [])

    refused = pull(bob, "evil/greet", str(tmp_path / "moved"), accept_unsigned=True, trust_key=own_key(ann)["key"])
    assert code(refused) == "signature_refused"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-02")
def test_an_old_version_is_not_accepted_as_the_newest(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.publish("greet", namespace="acme")
    old = shelf(ann, tmp_path / "old")
    ann.publish("greet", "1.1.0", namespace="acme")
    new = shelf(ann, tmp_path / "new")
    got(pull(bob, "acme/greet", new, trust_key=own_key(ann)["fingerprint"]))

    assert code(pull(bob, "acme/greet", old)) == "signature_refused"
    assert got(pull(bob, "acme/greet@1.0.0", old))["trust"] == "verified"
    assert got(pull(bob, "acme/greet", old, allow_rollback=True))["trust"] == "verified"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-08")
@pytest.mark.req("SR3")
def test_an_unsigned_release_needs_an_approval_which_is_recorded(
    a_machine: MakeMachine, bob: Machine, tmp_path: Path
) -> None:
    cleo = a_machine("cleo", namespaces=["cleo"])
    cleo.publish("greet")
    cleo.publish("wave")
    folder = shelf(cleo, tmp_path / "shelf")

    refused = pull(bob, "cleo/greet", folder)
    assert code(refused) == "acknowledgement_required"
    assert refused.content["items"] == [{"item": "cleo/greet@1.0.0", "trust": "unsigned"}]
    response = got(pull(bob, "cleo/greet", folder, accept_unsigned=True))
    assert response["warnings"] == ["cleo/greet@1.0.0 is not signed"]
    receipts = [as_object(one) for one in as_list(bob.ask("audit").content["receipts"])]
    shown = bob.ask("audit", action="show", receipt=str(receipts[0]["seq"])).content
    assert [one["status"] for one in receipts] == ["success", "refused"]
    assert "cleo/greet@1.0.0" in str(shown)
    # The word was given for this one, as it is.
    assert got(pull(bob, "cleo/greet", folder))["trust"] == "unsigned"
    assert code(pull(bob, "cleo/wave", folder)) == "acknowledgement_required"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-08")
@pytest.mark.parametrize("words", [{"accept_unsigned": True}, {"trust_key": "A" * 43}, {"allow_rollback": True}])
def test_a_model_cannot_approve_for_the_owner(
    a_machine: MakeMachine, bob: Machine, tmp_path: Path, words: JsonObject
) -> None:
    cleo = a_machine("cleo", namespaces=["cleo"])
    cleo.publish("greet")
    bob.settle(remotes={"team": {"url": shelf(cleo, tmp_path / "shelf")}})
    bob.kernel = Kernel(bob.project, user=bob.user, cache=bob.cache, is_owner=False)

    assert code(pull(bob, "cleo/greet", "team", NO_CALLER, **words)) == "not_permitted"
    assert code(pull(bob, "cleo/greet", "team")) == "acknowledgement_required"
    if "allow_rollback" not in words:
        assert code(bob.ask("registry", action="pull", remote="team", **words)) == "not_permitted"
    assert code(bob.ask("registry", action="pull", remote="team")) == "acknowledgement_required"
    assert not is_here(bob, "cleo/greet")
    assert not (bob.user / "trust.yaml").exists()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-08")
def test_a_bulk_pull_omits_untrusted_releases(
    ann: Machine, a_machine: MakeMachine, bob: Machine, tmp_path: Path
) -> None:
    cleo = a_machine("cleo", namespaces=["cleo"])
    cleo.publish("greet")
    ann.publish("wave", namespace="acme")
    shelf(cleo, tmp_path / "shelf")
    folder, short = shelf(ann, tmp_path / "shelf"), own_key(ann)["fingerprint"]

    planned = bob.ask("registry", action="pull", remote=folder, trust_key=short, dry_run=True).content
    assert planned["new"] == ["acme/wave@1.0.0"]
    assert not (bob.user / "trust.yaml").exists()
    response = bob.ask("registry", action="pull", remote=folder, trust_key=short).content
    assert response["new"] == ["acme/wave@1.0.0"]
    assert response["left_out"] == ["cleo/greet@1.0.0: it is not signed (`--accept-unsigned`)"]
    assert response["acknowledged"] == [{"item": "acme/wave@1.0.0", "trust": "unknown_key", "signer": short}]
    again = bob.ask("registry", action="pull", remote=folder, accept_unsigned=True).content
    assert again["new"] == ["cleo/greet@1.0.0"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-08")
def test_a_managed_deployment_accepts_only_listed_items(
    ann: Machine, bob: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann.publish("greet", namespace="acme")
    ann.publish("wave", namespace="acme")
    folder, short = shelf(ann, tmp_path / "shelf"), own_key(ann)["fingerprint"]
    listed = tmp_path / "deployment.yaml"
    listed.write_text('deployment: managed\nitems: {allow: ["builtin/**", "registry/acme/greet@*"]}\n')
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(listed))

    assert code(pull(bob, "acme/wave", folder, trust_key=short)) == "not_permitted"
    assert code(bob.ask("registry", action="pull", remote=folder, trust_key=short)) == "not_permitted"
    assert got(pull(bob, "acme/greet", folder, trust_key=short))["trust"] == "verified"


@pytest.mark.usefixtures("sandbox")
def test_a_copy_from_the_registry_names_its_signer(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    ann.put("knowledge/guide.md", "---\nid: guide\ntitle: Guide\nversion: 1.0.0\n---\n# Guide\n")
    ann.do("publish", "guide", {"namespace": "acme"})
    ann.publish("greet", namespace="acme")
    folder, short = shelf(ann, tmp_path / "shelf"), own_key(ann)["fingerprint"]
    for item in ("acme/guide", "acme/greet"):
        assert got(pull(bob, item, folder, trust_key=short))["trust"] == "verified"
        bob.ask("load", item_id=item, destination="project")

    assert (bob.ai / "knowledge" / "guide.md.sig").is_file()
    assert {trust_of(bob, f"project/local/{name}") for name in ("guide", "greet")} == {"verified"}
    assert trust_of(ann, "acme/guide") == "owner"


@pytest.mark.usefixtures("sandbox")
def test_the_same_content_in_two_namespaces_has_two_signatures(
    ann: Machine, eve: Machine, bob: Machine, tmp_path: Path
) -> None:
    eve.settle(namespaces=["evil"])
    ann.publish("greet", namespace="acme")
    eve.publish("greet", namespace="evil")
    got(pull(bob, "evil/greet", shelf(eve, tmp_path / "theirs"), trust_key=own_key(eve)["key"]))
    got(pull(bob, "acme/greet", shelf(ann, tmp_path / "hers"), trust_key=own_key(ann)["key"]))

    assert trust_of(bob, "evil/greet") == trust_of(bob, "acme/greet") == "verified"


@pytest.mark.case("SIG-08")
def test_a_managed_deployment_accepts_no_unlisted_executor_of_a_listed_item(
    ann: Machine, bob: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann.put("tools/sh.yaml", RUNTIME)
    ann.script("greet", on="sh")
    ann.do("publish", "greet", {"namespace": "acme"})
    folder, short = shelf(ann, tmp_path / "shelf"), own_key(ann)["fingerprint"]
    listed = tmp_path / "deployment.yaml"
    listed.write_text('deployment: managed\nitems: {allow: ["builtin/**", "registry/acme/greet@*"]}\n')
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(listed))

    refused = pull(bob, "acme/greet", folder, trust_key=short)
    assert code(refused) == "not_permitted"
    assert "acme/sh" in as_text(refused.content["message"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    "beside", [ReleaseFile("tool.yaml.sig", b"x" * 5_000), ReleaseFile("tool.yaml.sig", b"", True)]
)
def test_a_signature_file_with_other_content_is_not_stored(ann: Machine, tmp_path: Path, beside: ReleaseFile) -> None:
    ann.publish("greet", namespace="acme")
    (release,) = Layout(Path(shelf(ann, tmp_path / "shelf"))).read([VersionName("acme", "greet", "1.0.0")])

    with pytest.raises(ArtifactRefused, match="more than a signature"):
        Layout(tmp_path / "bad").write([replace(release, files=(*release.files, beside))], [])
