"""The registry as a source: which version answers to a name, what it depends on, and copies that cannot be trusted."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import NamespaceDenied
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor, Pin, ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease

ANN = Actor("ann", ("acme", "public"))


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme", "public"])


def a_release(name: str, text: str, *, pin: Pin | None = None, code: str = "echo hi\n") -> CheckedRelease:
    """A version of a folder with a manifest and one file."""
    namespace, _, rest = name.partition("/")
    tool_id, _, version = rest.partition("@")
    head = f'tool_id: {tool_id}\nversion: "{version}"\ndescription: Something\n{text}'
    main = ReleaseFile("main.sh", code.encode())
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=pin.ref if pin else None,
        manifest_body=head.encode(),
        files=[ToolFile(main.path, main.sha256, len(main.data), main.is_executable)],
    )
    release = CheckedRelease(
        VersionName(namespace, tool_id, version),
        f"tools/{tool_id}/tool.yaml",
        statement,
        {},
        (ReleaseFile("tool.yaml", head.encode()), main),
        executor=pin,
    )
    return check_release(release)


def put_in(machine: Machine, *releases: CheckedRelease) -> None:
    """Write versions into a machine's store, as a sync from elsewhere does."""
    machine.do("list")
    database = open_database(f"sqlite://{machine.user}/state/registry.db")
    try:
        Registry(database, ANN).publish(releases)
    finally:
        database.close()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-04")
def test_a_chain_on_a_different_built_in_version_warns_and_frozen_refuses_it(ann: Machine) -> None:
    old = Pin("bash_runtime", VersionName("kiwi", "bash_runtime", "0.9.0"), "sha256:" + "0" * 64)
    text = "tool_type: script\nexecutor: bash_runtime\nconfig: {entrypoint: main.sh}\n"
    put_in(ann, a_release("acme/greet@1.0.0", text, pin=old))

    ran = ann.do("run", "greet")
    drift = (
        "registry/acme/greet@1.0.0 was published on kiwi/bash_runtime@0.9.0 and runs on builtin/kiwi/bash_runtime@1.0.0"
    )
    assert (ran["result"], ran["warnings"]) == ("hi", [drift])
    assert ann.do("why", "greet")["notes"] == [drift]
    assert ann.do("pull", "greet")["warnings"] == [drift]
    assert ann.refused("run", "greet", frozen=True) == "lock_mismatch"
    assert ann.refused("run", "greet", frozen=True, dry_run=True) == "lock_mismatch"

    ann.publish("wave")
    assert ann.do("run", "wave", frozen=True)["result"] == "hi"


def test_no_user_publishes_as_kiwi(ann: Machine) -> None:
    text = "tool_type: runtime\nexecutor: subprocess\nconfig: {command: bash}\n"
    digest = ann.ask("load", item_id="subprocess").content["digest"]
    pin = Pin("subprocess", VersionName("kiwi", "subprocess", "1.0.0"), f"sha256:{digest}")
    for name in ("kiwi/python_runtime@99.0.0", "kiwi/helper@1.0.0"):
        with pytest.raises(NamespaceDenied):
            put_in(ann, a_release(name, text, pin=pin))
    assert ann.ask("load", item_id="python_runtime").content["identity"] == "builtin/kiwi/python_runtime@1.0.0"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-03")
def test_no_published_version_replaces_a_built_in_link(ann: Machine) -> None:
    ann.put(
        "tools/bash_runtime.yaml",
        'tool_id: bash_runtime\ntool_type: runtime\nversion: "9.0.0"\nexecutor: subprocess\ndescription: Evil\n'
        'config: {command: "false"}\n',
    )
    ann.do("publish", "bash_runtime", {"location": "project"})
    (ann.ai / "tools" / "bash_runtime.yaml").unlink()
    ann.script("greet")

    assert ann.do("run", "greet")["result"] == "hi"


@pytest.mark.usefixtures("sandbox")
def test_a_folder_item_hides_a_published_one_and_reports_it_once(ann: Machine) -> None:
    ann.publish("greet", says="published")
    ann.publish("greet", "1.1.0", says="published")
    ann.script("greet", "2.0.0", says="project")

    ran = ann.do("run", "greet")
    assert ran["result"] == "project"
    (warning,) = as_list(ran["warnings"])
    assert str(warning).startswith("project/local/greet@2.0.0 is used, and hides registry/acme/greet@1.1.0")
    assert ann.do("run", "registry/acme/greet")["result"] == "published"
    assert "warnings" not in ann.do("run", "registry/acme/greet")
    doctor = json.dumps(ann.ask("doctor").content)
    assert doctor.count("hides registry/acme/greet@1.1.0") == 1

    ann.script("greet", "1.1.0", says="published")
    assert "warnings" not in ann.do("run", "greet"), "an equal copy hides nothing"


@pytest.mark.usefixtures("sandbox")
def test_namespaces_of_the_owner_are_searched_in_order(ann: Machine) -> None:
    ann.publish("greet", "5.0.0", says="public", namespace="public")
    assert ann.do("run", "greet")["result"] == "public"
    ann.publish("greet", "1.0.0", says="acme", namespace="acme")
    ran = ann.do("run", "greet")
    assert ran["result"] == "acme"
    assert "hides registry/public/greet@5.0.0" in json.dumps(ran["warnings"])
    assert ann.do("run", "greet@^5")["result"] == "public"


@pytest.mark.usefixtures("sandbox")
def test_a_published_item_never_uses_a_folder_item_of_the_project(ann: Machine) -> None:
    runtime = (
        'tool_id: my_runtime\ntool_type: runtime\nversion: "{0}"\nexecutor: subprocess\ndescription: Runs Bash\n'
        'config: {{command: bash, args: ["{{tool.files}}/{{tool.entrypoint}}", "{0}"], result_from: stdout}}\n'
    )
    ann.put("tools/my_runtime.yaml", runtime.format("1.0.0"))
    ann.script("greet", says="on $1", on="my_runtime")
    ann.do("publish", "greet")
    shutil.rmtree(ann.ai / "tools" / "greet")
    ann.put("tools/my_runtime.yaml", runtime.format("6.6.6"))

    assert ann.do("run", "greet")["result"] == "on 1.0.0"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E1")
def test_answers_are_the_same_after_the_cache_is_deleted(ann: Machine) -> None:
    ann.settle(remember=False)  # what was read after a search would stand higher in the next
    ann.publish("greet", says="one")
    ann.publish("wave", says="two", visibility="unlisted")
    ann.script("local")
    requests: list[tuple[str, JsonObject]] = [
        ("search", {"query": "says a word", "source": source}) for source in ("all", "registry", "local")
    ]
    requests += [("load", {"item_id": "greet"}), ("execute", {"action": "why", "item_id": "greet"})]
    before = [answer.content for answer in ann.ask_all(requests)]
    assert ann.do("run", "greet")["result"] == "one"
    shutil.rmtree(ann.cache)

    assert [answer.content for answer in ann.ask_all(requests)] == before
    shutil.rmtree(ann.cache)
    assert ann.do("run", "greet")["result"] == "one"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E1")
def test_a_cache_that_cannot_be_written_is_reported_and_folder_items_still_work(ann: Machine) -> None:
    ann.publish("greet")
    ann.script("local")
    shutil.rmtree(ann.cache, ignore_errors=True)
    ann.cache.parent.mkdir(exist_ok=True)
    ann.cache.write_text("in the way")

    refused = ann.try_to("run", "greet").content
    assert (refused["code"], "XDG_CACHE_HOME" in str(refused["suggestion"])) == ("unavailable", True)
    assert ann.names("greet", "registry") == ["greet"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-SI-01")
@pytest.mark.parametrize("name", ["main.sh", "tool.yaml", "extra.txt"])
def test_a_changed_copy_is_rebuilt(ann: Machine, name: str) -> None:
    ann.publish("greet")
    assert ann.do("run", "greet")["result"] == "hi"
    (folder,) = {path.parent for path in ann.cache.glob("registry/*/tools/greet/main.sh")}
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    with (folder / name).open("a") as file:
        file.write("echo evil\n")

    assert ann.do("run", "greet")["result"] == "hi"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good


@pytest.mark.usefixtures("sandbox")
def test_an_incomplete_copy_is_rebuilt(ann: Machine) -> None:
    ann.publish("greet")
    ann.do("run", "greet")
    (main,) = ann.cache.glob("registry/*/tools/greet/main.sh")
    main.unlink()
    assert ann.do("run", "greet")["result"] == "hi"
    shutil.rmtree(main.parent)
    assert ann.do("run", "greet")["result"] == "hi"


@pytest.mark.parametrize("is_bad", [False, True])
def test_concurrent_copies_produce_one_whole_copy(space: Space, tmp_path: Path, *, is_bad: bool) -> None:
    database = open_database(f"sqlite://{tmp_path}/a.db")
    base = a_release("acme/base@1.0.0", "tool_type: primitive\n")
    Registry(database, ANN).publish([base])
    digest = base.digest.removeprefix("sha256:")
    folder = space.cache / "registry" / f"{digest}.acme"
    found: list[str] = []

    def open_it(begin: threading.Barrier) -> None:
        begin.wait(120)
        found.append(Catalog(space, registry=lambda: Registry(database, ANN)).find("base").digest)

    for _ in range(5):
        shutil.rmtree(space.cache, ignore_errors=True)
        if is_bad:
            (folder / "tools" / "base").mkdir(parents=True)
            (folder / "tools" / "base" / "tool.yaml").write_text("tool_id: evil\ntool_type: primitive\n")
        begin = threading.Barrier(3)
        threads = [threading.Thread(target=open_it, args=(begin,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    database.close()

    assert found == [digest] * 15
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-04")
def test_a_published_item_is_copied_with_the_executors_it_was_published_on(ann: Machine) -> None:
    runtime = (
        'tool_id: my_runtime\ntool_type: runtime\nversion: "1.0.0"\nexecutor: subprocess\ndescription: Runs Bash\n'
        'config: {command: bash, args: ["{tool.files}/{tool.entrypoint}"], result_from: stdout}\n'
    )
    ann.put("tools/deep/my_runtime.yaml", runtime)
    ann.script("greet", on="my_runtime")
    ann.do("publish", "greet")
    shutil.rmtree(ann.ai / "tools")

    copied = ann.ask("load", item_id="greet", source="registry", destination="user").content
    assert (copied["message"], copied["also_copied"]) == ("Tool copied from registry to user", ["my_runtime"])
    assert (ann.user / "tools/deep/my_runtime.yaml").read_text() == runtime
    assert ann.do("run", "greet")["identity"] == "user/local/greet@1.0.0"
    again = ann.ask("load", item_id="registry/acme/greet", destination="user").content
    assert "already" in str(again["message"])


@pytest.mark.usefixtures("sandbox")
def test_search_and_load_use_the_source_that_was_requested(ann: Machine) -> None:
    ann.publish("published")
    ann.script("local")
    found = {source: set(ann.names("says a word called", source)) for source in ("local", "project", "registry", "all")}
    assert found["local"] == found["project"] == {"local"}
    assert found["registry"] == {"published"}
    assert found["all"] >= {"published", "local"}
    loaded = ann.ask("load", item_id="published", source="registry").content
    assert (loaded["identity"], loaded["integrity"]) == ("registry/acme/published@1.0.0", "published")
    assert loaded["chain"] == ["published", "bash_runtime", "subprocess"]
    assert ann.ask("load", item_id="local", source="registry").content["code"] == "tool_not_found"
    (hit,) = as_list(ann.ask("search", query="published", source="registry").content["results"])
    assert as_object(hit)["source"] == "registry"


@pytest.mark.usefixtures("sandbox")
def test_calls_during_a_publish_are_all_answered(ann: Machine) -> None:
    ann.publish("greet")
    for number in range(8):
        ann.script(f"tool_{number}")

    async def story() -> list[JsonObject]:
        calls = [
            *({"action": "publish", "item_id": f"tool_{number}"} for number in range(8)),
            *({"action": "pull", "item_id": "greet"} for _ in range(8)),
            *({"action": "versions", "item_id": "greet"} for _ in range(8)),
        ]
        try:
            answers = await asyncio.gather(*(ann.kernel.call("execute", call) for call in calls))
        finally:
            await ann.kernel.aclose()
        return [answer.content for answer in answers]

    assert [response.get("error") for response in asyncio.run(story())] == [None] * 24
