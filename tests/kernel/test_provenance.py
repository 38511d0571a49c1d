"""The author of an item decides its isolation level, by the digest of its exact content."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.provenance import Provenances
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.authors import Authors

HEAD = "tool_id: {name}\ntool_type: script\nversion: 1.0.0\nexecutor: python_runtime\ndescription: Say hi\n{words}"


def script(name: str = "hi", words: str = "", says: str = "hi") -> str:
    head = HEAD.format(name=name, words=words)
    return f'"""\n{head}"""\n\n\ndef main():\n    return "{says}"\n'


@dataclass(frozen=True)
class Who:
    """A caller: the owner, a model, or a client of the gateway."""

    project: Path
    is_owner: bool = True
    name: str = ""

    def ask(self, verb: str, **request: Json) -> Answer:
        async def call() -> Answer:
            kernel = Kernel(self.project, is_owner=self.is_owner)
            try:
                return await kernel.call(verb, json.loads(json.dumps(request)), Caller(name=self.name))
            finally:
                await kernel.aclose()

        return asyncio.run(call())

    def do(self, verb: str, **request: Json) -> JsonObject:
        answer = self.ask(verb, **request)
        assert not answer.is_error, answer.content
        return answer.content

    def create(self, name: str = "hi", *, location: str = "project", says: str = "hi", words: str = "") -> None:
        sent = {"content": script(name, words, says), "filename": f"{name}.py", "location": location}
        self.do("execute", action="create", item_id=name, parameters=sent)

    def held(self, item: str = "hi") -> tuple[Json, Json]:
        response = as_object(self.do("execute", action="why", item_id=item)["isolation"])
        return response["level"], response["provenance"]

    def put(self, text: str, name: str = "hi") -> Path:
        """Write a file of the project beside Kiwi, as an editor or a checkout does."""
        path = self.project / ".ai" / "tools" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def owner(project: Path) -> Who:
    return Who(project)


@pytest.fixture
def model(project: Path) -> Who:
    return Who(project, is_owner=False)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-IS-01")
def test_an_item_of_unknown_origin_is_restricted_until_the_owner_signs_it(owner: Who) -> None:
    path = owner.put(script())
    assert owner.held() == ("restricted", "unknown")
    owner.do("execute", action="sign", item_id="hi")
    assert owner.held() == ("sandboxed", "owner_written")
    path.write_text(path.read_text().replace('"hi"', '"changed"').partition("\n")[2])
    assert owner.held() == ("restricted", "unknown")


@pytest.mark.usefixtures("sandbox")
def test_a_created_item_belongs_to_its_creator(owner: Who, model: Who, project: Path) -> None:
    owner.create("mine")
    model.create("its")
    Who(project, name="token:ben:1").create("bens")
    assert owner.held("mine") == ("sandboxed", "owner_written")
    assert owner.held("its") == ("sandboxed", "model_written")
    assert owner.held("bens") == ("sandboxed", "model_written")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H8")
def test_signing_by_a_model_does_not_change_the_origin(owner: Who, model: Who) -> None:
    owner.create("mine")
    model.create("its")
    model.put(script("found"), "found")
    for name in ("mine", "its", "found"):
        model.ask("execute", action="sign", item_id=name)
    assert owner.held("mine") == ("sandboxed", "owner_written")
    assert owner.held("its") == ("sandboxed", "model_written")
    assert owner.held("found") == ("restricted", "unknown")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H8")
def test_an_update_by_a_model_belongs_to_the_model_and_unknown_code_stays_unknown(owner: Who, model: Who) -> None:
    owner.create("mine")
    owner.put(script("found"), "found")
    for name in ("mine", "found"):
        words = {"content": script(name, says="changed"), "filename": f"{name}.py"}
        model.do("execute", action="update", item_id=name, parameters=words)
    assert owner.held("mine") == ("sandboxed", "model_written")
    assert owner.held("found") == ("restricted", "unknown")
    back = {"content": script("mine"), "filename": "mine.py"}
    model.do("execute", action="update", item_id="mine", parameters=back)
    assert owner.held("mine") == ("sandboxed", "owner_written")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H8")
def test_a_copy_has_the_origin_of_the_original(owner: Who, model: Who) -> None:
    owner.put(script("found"), "found")
    model.create("its")
    for name in ("found", "its"):
        model.do("load", item_id=name, destination="user")
    assert owner.held("user/local/found") == ("restricted", "unknown")
    assert owner.held("user/local/its") == ("sandboxed", "model_written")


@pytest.mark.usefixtures("sandbox")
def test_a_user_item_belongs_to_the_owner_unless_another_author_is_recorded(owner: Who, model: Who, home: Path) -> None:
    (home / ".ai" / "tools").mkdir(parents=True)
    (home / ".ai" / "tools" / "mine.py").write_text(script("mine"))
    model.create("its", location="user")
    assert owner.held("mine") == ("sandboxed", "owner_written")
    assert owner.held("its") == ("sandboxed", "model_written")


@pytest.mark.usefixtures("sandbox")
def test_a_registry_item_has_unknown_origin_unless_the_owner_published_it(owner: Who, model: Who) -> None:
    owner.put(script("found"), "found")
    model.do("execute", action="publish", item_id="found", parameters={})
    assert owner.held("registry/public/found") == ("restricted", "unknown")
    owner.put(script("mine"), "mine")
    owner.do("execute", action="publish", item_id="mine", parameters={})
    assert owner.held("registry/public/mine") == ("sandboxed", "owner_written")


@pytest.mark.usefixtures("sandbox")
def test_publishing_vouches_only_for_what_was_published(owner: Who, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("kiwi_mcp.kernel.verbs.registry.publish")
    seal = module._seal

    def seal_and_replace(*given: object) -> object:
        sealed = seal(*given)
        owner.put(script("mine", says="something else"), "mine")  # the file changes before the publication ends
        return sealed

    monkeypatch.setattr(module, "_seal", seal_and_replace)
    owner.put(script("mine"), "mine")
    owner.do("execute", action="publish", item_id="mine", parameters={})
    assert owner.held("registry/public/mine") == ("sandboxed", "owner_written")
    assert owner.held("project/local/mine") == ("restricted", "unknown")


def test_built_in_servers_have_a_known_origin(owner: Who, home: Path) -> None:
    owner.do("registry")
    store = Store(home / ".ai")
    chain = Catalog(Space(owner.project, home / ".ai", home / ".cache"), registry=store.registry).resolve("github_mcp")
    try:
        assert chain.tool.origin.source == "registry"
        assert Provenances(store).held(chain).provenance == "mcp_server"
        # Its process is that of a server; its manifest has an author, who decides about secrets.
        assert Provenances(store).authored(chain).provenance == "known_publisher"
        forged = replace(chain.tool, digest="0" * 64)
        assert Provenances(store).held(replace(chain, links=(forged, *chain.links[1:]))).provenance == "unknown"
    finally:
        store.close()


@pytest.mark.usefixtures("sandbox")
def test_with_an_unreadable_store_every_origin_is_unknown(owner: Who, home: Path) -> None:
    owner.create()
    (home / ".ai" / "registry.yaml").write_text("url: postgresql://127.0.0.1:9/none\n")
    assert owner.held() == ("restricted", "unknown")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H5")
def test_the_owner_relaxes_one_exact_content_and_it_is_reported_everywhere(owner: Who) -> None:
    owner.create()
    response = owner.do("relax", action="apply", item_id="hi", to="trusted", reason="it is slow")
    assert (response["status"], response["level"]) == ("relaxed", "trusted")
    assert "asks you first" not in str(response["warnings"])
    assert owner.held() == ("trusted", "owner_pinned")
    ran = as_object(owner.do("execute", item_id="hi")["isolation"])
    assert (ran["used"], ran["provenance"], ran["backend"]) == ("trusted", "owner_pinned", "none")
    (row,) = map(as_object, as_list(owner.do("relax")["relaxed"]))
    assert (row["identity"], row["level"], row["reason"], row["holds"]) == (
        "project/local/hi@1.0.0", "trusted", "it is slow", True,
    )  # fmt: skip
    checks = map(as_object, as_list(owner.ask("doctor").content["checks"]))
    assert [check["check"] for check in checks if "runs under trusted" in str(check["detail"])] == ["relaxed"]
    receipts = map(as_object, as_list(owner.do("audit", did="relax apply")["receipts"]))
    assert [receipt["item"] for receipt in receipts] == ["hi"]


@pytest.mark.usefixtures("sandbox")
def test_relaxing_a_changing_tool_reports_that_it_asks(owner: Who) -> None:
    owner.create(words="mutates_state: true\n")
    response = owner.do("relax", action="apply", item_id="hi")
    assert "asks you first; for a standing yes: `kiwi approvals rules add hi`" in str(response["warnings"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H5", "H8")
def test_an_edit_or_the_owner_ends_a_relaxation(owner: Who) -> None:
    owner.create()
    owner.do("relax", action="apply", item_id="hi")
    assert owner.held() == ("standard", "owner_relaxed")
    words = {"content": script(says="changed"), "filename": "hi.py"}
    owner.do("execute", action="update", item_id="hi", parameters=words)
    assert owner.held() == ("sandboxed", "owner_written")
    owner.do("execute", action="update", item_id="hi", parameters={"content": script(), "filename": "hi.py"})
    assert owner.held() == ("standard", "owner_relaxed")
    owner.do("relax", action="undo", item_id="hi")
    assert owner.held() == ("sandboxed", "owner_written")
    assert owner.ask("relax", action="undo", item_id="hi").content["code"] == "not_found"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H5")
def test_the_same_bytes_in_a_clone_are_not_relaxed(owner: Who, project: Path) -> None:
    owner.create()
    owner.do("relax", action="apply", item_id="hi")
    clone = Who(project.parent / "clone")
    clone.put((project / ".ai" / "tools" / "hi.py").read_text())
    assert clone.held() == ("sandboxed", "owner_written")
    assert owner.held() == ("standard", "owner_relaxed")
    (row,) = map(as_object, as_list(clone.do("relax")["relaxed"]))
    assert (row["project"], row["holds"]) == (str(project.resolve()), False)


RUNTIME = """tool_id: near_runtime
tool_type: runtime
version: 1.0.0
executor: subprocess
description: Runs a program of the project
config:
  command: "{project}/bin/run"
  args: ["{tool.files}/{tool.entrypoint}"]
"""


def put_runtime(owner: Who) -> Path:
    """Write a runtime that the owner stands by, and return the program of the project that it starts."""
    runtime, program = owner.project / ".ai" / "tools" / "near_runtime.yaml", owner.project / "bin" / "run"
    for path, text in ((runtime, RUNTIME), (program, "#!/bin/sh\necho as it was\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program.chmod(0o755)
    owner.do("execute", action="sign", item_id="near_runtime")
    return program


@pytest.mark.req("H5")
def test_an_edit_of_an_undigested_program_ends_a_relaxation(owner: Who) -> None:
    program = put_runtime(owner)
    sent = {"content": script().replace("python_runtime", "near_runtime"), "filename": "hi.py"}
    owner.do("execute", action="create", item_id="hi", parameters=sent)
    response = owner.do("relax", action="apply", item_id="hi")
    assert str(program) in str(response["warnings"])
    assert "not watched" in str(response["warnings"])
    assert owner.held() == ("standard", "owner_relaxed")
    program.write_text("#!/bin/sh\necho another\n")
    assert owner.held() == ("sandboxed", "owner_written")
    program.write_text("#!/bin/sh\necho as it was\n")
    assert owner.held() == ("standard", "owner_relaxed")


@pytest.mark.usefixtures("sandbox")
def test_code_of_a_model_needs_approval_again_after_its_program_was_edited(owner: Who, model: Who) -> None:
    def is_asked() -> Json:
        return as_object(owner.do("execute", action="why", item_id="hi")["approval"])["needed"]

    program = put_runtime(owner)
    sent = {"content": script().replace("python_runtime", "near_runtime"), "filename": "hi.py"}
    model.do("execute", action="create", item_id="hi", parameters=sent)
    waiting = model.ask("execute", item_id="hi").content
    assert (waiting["code"], is_asked()) == ("approval_required", True)
    owner.do("approvals", action="approve", approval_id=waiting["approval_id"])
    program.write_text("#!/bin/sh\necho not what was approved\n")
    assert model.ask("execute", item_id="hi").content["code"] == "approval_required"
    program.write_text("#!/bin/sh\necho as it was\n")
    model.ask("execute", item_id="hi")
    assert is_asked() is False
    program.write_text("#!/bin/sh\necho another\n")
    assert is_asked() is True


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H8")
def test_only_the_owner_relaxes_anything(owner: Who, model: Who, project: Path) -> None:
    owner.create()
    for other in (model, Who(project, name="token:ben:1")):
        for action in ("apply", "undo"):
            assert other.ask("relax", action=action, item_id="hi").content["code"] == "not_permitted"
        assert other.ask("relax", action="list").content["code"] == "not_permitted"
    assert owner.held() == ("sandboxed", "owner_written")


@pytest.mark.req("SR1")
def test_code_of_unknown_origin_does_not_leave_its_sandbox(owner: Who) -> None:
    owner.put(script())
    refused = owner.ask("relax", action="apply", item_id="hi", to="trusted").content
    assert (refused["code"], "kiwi sign hi" in str(refused["suggestion"])) == ("not_permitted", True)
    owner.do("relax", action="apply", item_id="hi", to="sandboxed")
    assert owner.held() == ("sandboxed", "owner_relaxed")


@pytest.mark.usefixtures("sandbox")
def test_the_level_in_a_manifest_applies_despite_a_relaxation(owner: Who) -> None:
    owner.create(words="isolation: sandboxed\n")
    refused = owner.ask("relax", action="apply", item_id="hi").content
    assert (refused["code"], "asks for sandboxed" in str(refused["message"])) == ("invalid_request", True)
    assert owner.do("relax", action="apply", item_id="hi", to="sandboxed")["status"] == "unchanged"


@pytest.mark.usefixtures("sandbox")
def test_the_origin_is_read_once_until_the_store_changes(
    owner: Who, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.create()
    store = Store(home / ".ai")
    origins = Provenances(store)
    chain = Catalog(Space(project, home / ".ai", home / ".cache")).resolve("hi")
    try:
        assert origins.held(chain).provenance == "owner_written"
        with monkeypatch.context() as unasked:
            unasked.delattr(Authors, "look_up")
            assert origins.held(chain).provenance == "owner_written"
        # Another process says something else of it.
        owner.do("relax", action="apply", item_id="hi", to="trusted")
        assert origins.held(chain).provenance == "owner_pinned"
    finally:
        store.close()
