"""Attacks on signatures: tampered content that a model signs again, and signatures replaced by a plain hash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel

pytestmark = [pytest.mark.case("TR-F04"), pytest.mark.usefixtures("sandbox")]
MANIFEST = "tool_id: t\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\ndescription: Say a word\n"
TOOL = "".join(f"# {line}\n" for line in MANIFEST.splitlines()) + "\necho orig\n"


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann")


@contextmanager
def model_of(machine: Machine) -> Iterator[Machine]:
    """Give a machine as a model uses it: through MCP, and not by the owner's hand."""
    own = machine.kernel
    machine.kernel = Kernel(machine.project, user=machine.user, cache=machine.cache, is_owner=False, surface="mcp")
    try:
        yield machine
    finally:
        machine.kernel = own


def as_model(
    machine: Machine, action: str, item: str = "t", words: JsonObject | None = None, *, frozen: bool = False
) -> Answer:
    """Do something as a model does."""
    with model_of(machine) as model:
        return model.try_to(action, item, words, frozen=frozen)


def code(answer: Answer) -> object:
    return answer.content.get("code")


def line_of(path: Path) -> str:
    """The line with the signature."""
    return next(line for line in path.read_text().splitlines() if "kiwi-mcp:validated" in line)


def rehash(machine: Machine, path: Path, name: str = "t") -> None:
    """Add a signature line with the right hash and no key, which needs no secret."""
    path.write_text(path.read_text().replace(line_of(path) + "\n", ""))
    digest = as_object(as_list(machine.do("why", name)["chain"])[0])["digest"]
    path.write_text(f"# kiwi-mcp:validated:2026-01-01T00:00:00Z:{digest}\n{path.read_text()}")


@pytest.mark.parametrize("has_key", [False, True])
def test_a_model_does_not_sign_over_tampered_content(ann: Machine, has_key: bool) -> None:
    path = ann.put("tools/t.sh", TOOL)
    if has_key:
        ann.ask("key", action="new")
    ann.do("sign", "t")
    path.write_text(path.read_text().replace("orig", "EVIL"))
    lock = (ann.ai / "kiwi.lock").read_bytes()

    signed = as_model(ann, "sign")

    assert code(signed) == "not_permitted"
    assert "`kiwi sign t`" in str(signed.content["suggestion"])
    assert code(as_model(ann, "run")) == "content_hash_mismatch"
    assert code(as_model(ann, "run", frozen=True)) == "content_hash_mismatch"
    assert (ann.ai / "kiwi.lock").read_bytes() == lock
    assert "EVIL" in path.read_text()

    ann.do("sign", "t")  # the owner looked at it
    assert ann.do("run", "t")["result"] == "EVIL"


def test_a_model_does_not_sign_tampered_content_by_an_update(ann: Machine) -> None:
    path = ann.put("tools/t.sh", TOOL)
    ann.do("sign", "t")
    path.write_text(path.read_text().replace("orig", "EVIL"))

    words: JsonObject = {"content": path.read_text().replace("Say a word", "Say one"), "filename": "t.sh"}

    assert code(as_model(ann, "update", words=words)) == "not_permitted"
    assert code(as_model(ann, "run")) == "content_hash_mismatch"


def test_a_model_does_not_sign_what_the_owner_signed(ann: Machine) -> None:
    path = ann.put("tools/t.sh", TOOL)
    ann.do("sign", "t")
    before = path.read_bytes(), (ann.ai / "kiwi.lock").read_bytes()

    assert code(as_model(ann, "sign")) == "not_permitted"
    assert (path.read_bytes(), (ann.ai / "kiwi.lock").read_bytes()) == before
    assert as_model(ann, "run").content["result"] == "orig"


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("how", ["hashed anew", "line cut out"])
def test_an_item_signed_by_the_owner_does_not_run_with_a_weaker_signature(
    ann: Machine, has_key: bool, how: str
) -> None:
    path = ann.put("tools/t.sh", TOOL)
    if has_key:
        ann.ask("key", action="new")
    ann.do("sign", "t")
    path.write_text(path.read_text().replace("orig", "EVIL"))
    if how == "hashed anew":
        rehash(ann, path)
    else:
        path.write_text(path.read_text().replace(line_of(path) + "\n", ""))

    for refused in (as_model(ann, "run"), ann.try_to("run", "t"), as_model(ann, "publish")):
        assert code(refused) == "signature_refused"
        assert "was signed by the owner" in str(refused.content["message"])
    assert code(as_model(ann, "sign")) == "not_permitted"
    assert code(ann.ask("load", item_id="t", destination="user")) == "signature_refused"
    why = ann.do("why", "t")
    assert why["would_run"] is False
    assert "signature_refused" in str(why["reasons"])


def test_a_key_signature_reduced_to_its_hash_is_refused(ann: Machine) -> None:
    path = ann.put("tools/t.sh", TOOL)
    ann.ask("key", action="new")
    ann.do("sign", "t")
    assert as_object(as_list(ann.do("why", "t")["chain"])[0])["integrity"] == "signed"

    path.write_text(re.sub(r":ed25519:\S+", "", path.read_text()))

    assert as_object(as_list(ann.do("why", "t")["chain"])[0])["integrity"] == "hashed"
    assert code(ann.try_to("run", "t")) == "signature_refused"


def test_a_runtime_that_lost_its_signature_refuses_the_tools_on_it(ann: Machine) -> None:
    runtime = ann.put(
        "tools/plain_runtime.yaml",
        "tool_id: plain_runtime\ntool_type: runtime\nexecutor: subprocess\nversion: 1.0.0\ndescription: x\n"
        'config: {command: bash, args: ["{tool.files}/{tool.entrypoint}"]}\n',
    )
    ann.script("greet", on="plain_runtime")
    for name in ("plain_runtime", "greet"):
        ann.do("sign", name)
    assert ann.do("run", "greet")["result"] == "hi"
    runtime.write_text(runtime.read_text().replace("description: x", "description: y"))
    rehash(ann, runtime, "plain_runtime")

    assert code(ann.try_to("run", "greet")) == "signature_refused"


def test_an_update_of_a_signed_tool_by_a_model_waits_for_the_owner(ann: Machine) -> None:
    path = ann.put("tools/t.sh", TOOL)
    ann.do("sign", "t")

    as_model(ann, "update", words={"content": TOOL.replace("orig", "new"), "filename": "t.sh"})

    assert code(as_model(ann, "run")) == "approval_required"
    path.write_text(path.read_text().replace("echo new", "echo EVIL"))
    assert code(as_model(ann, "run")) == "signature_refused"


def test_deleting_a_signed_tool_does_not_free_its_name_for_a_model(ann: Machine) -> None:
    path = ann.put("tools/t.sh", TOOL)
    ann.do("sign", "t")

    assert not as_model(ann, "delete").is_error
    path.write_text(TOOL.replace("orig", "EVIL"))

    assert code(as_model(ann, "run")) == "signature_refused"


def test_an_update_by_the_owner_runs_without_another_signature(ann: Machine) -> None:
    ann.put("tools/t.sh", TOOL)
    ann.do("sign", "t")

    ann.do("update", "t", {"content": TOOL.replace("orig", "new"), "filename": "t.sh"})

    assert ann.do("run", "t")["result"] == "new"


def test_a_signed_tool_and_its_lockfile_work_in_the_clone_of_a_colleague(ann: Machine, a_machine: MakeMachine) -> None:
    bob = a_machine("bob")
    path = ann.put("tools/t.sh", TOOL)
    ann.ask("key", action="new")
    ann.do("sign", "t")
    bob.put("tools/t.sh", path.read_bytes())
    bob.put("kiwi.lock", (ann.ai / "kiwi.lock").read_bytes())

    assert bob.do("run", "t")["result"] == "orig"
    assert code(as_model(bob, "sign")) == "not_permitted"


@pytest.mark.parametrize("how", ["key cut off", "edited and hashed anew"])
def test_a_copy_from_a_publisher_does_not_run_without_the_signature(
    ann: Machine, a_machine: MakeMachine, tmp_path: Path, how: str
) -> None:
    bob = a_machine("bob")
    ann.settle(namespaces=["acme"])
    made = as_object(ann.ask("key", action="new").content["key"])
    ann.put("tools/t.sh", TOOL)
    ann.do("publish", "t", {"namespace": "acme"})
    ann.exchange("push", tmp_path / "shelf")
    words: JsonObject = {"from": str(tmp_path / "shelf"), "trust_key": made["key"]}
    pulled = bob.ask("execute", action="pull", item_id="acme/t", parameters=words)
    assert pulled.content["trust"] == "verified", pulled.content
    with model_of(bob) as model:
        copied = Path(str(model.ask("load", item_id="acme/t", destination="project").content["path"]))
    assert bob.do("run", "project/local/t")["result"] == "orig"

    if how == "key cut off":
        copied.write_text(re.sub(r":ed25519:\S+", "", copied.read_text()))
    else:
        copied.write_text(copied.read_text().replace("orig", "EVIL"))
        rehash(bob, copied, "project/local/t")

    for refused in (as_model(bob, "run", "project/local/t"), bob.try_to("run", "project/local/t")):
        assert code(refused) == "signature_refused"
        assert "was signed by its publisher" in str(refused.content["message"])
    assert code(as_model(bob, "sign", "project/local/t")) == "not_permitted"
