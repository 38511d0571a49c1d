"""Publishing: an item becomes a version with its executors, or nothing is written and the answer gives the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

Tree = Callable[[Path], Mapping[str, str]]
RUNTIME = """tool_id: my_runtime
tool_type: runtime
version: "{version}"
executor: subprocess
description: Runs Bash
config: {{command: bash, args: ["{{tool.files}}/{{tool.entrypoint}}"{more}], result_from: stdout}}
"""


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme", "public"])


def held(machine: Machine) -> list[str]:
    """Every version of a machine's own namespaces."""
    found = [as_object(one) for one in as_list(machine.do("list")["items"])]
    return sorted(str(one["identity"]) for one in found if one["namespace"] != "kiwi")


def write_runtime(machine: Machine, version: str = "1.0.0", more: str = "") -> None:
    machine.put("tools/my_runtime.yaml", RUNTIME.format(version=version, more=more))


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02", "K-RG-03")
def test_the_answer_contains_the_version_its_hashes_and_its_files(ann: Machine) -> None:
    ann.script("greet")
    ann.do("sign", "greet")
    response = ann.do("publish", "greet", {"changelog": "The first."})

    digest = str(as_object(as_list(ann.do("versions", "greet")["versions"])[0])["digest"])
    assert digest == f"sha256:{ann.ask('load', item_id='greet').content['digest']}"
    assert {**response, "digest": "", "closure": str(response["closure"])[:7]} == snapshot(
        {
            "tool_id": "greet",
            "action": "publish",
            "status": "published",
            "message": "acme/greet@1.0.0 published",
            "identity": "registry/acme/greet@1.0.0",
            "version": "1.0.0",
            "namespace": "acme",
            "visibility": "public",
            "digest": "",
            "files": ["main.sh", "tool.yaml"],
            "next": "Others get it with `kiwi pull acme/greet`; `kiwi versions acme/greet` lists its history.",
            "closure": "sha256:",
        }
    )


@pytest.mark.req("K-ME-02")
def test_a_dry_run_describes_the_publish_and_does_nothing(ann: Machine, tree: Tree) -> None:
    write_runtime(ann)
    ann.script("greet", on="my_runtime")
    before = tree(ann.project), tree(ann.user)

    planned = ann.do("publish", "greet", dry_run=True)

    assert (planned["status"], planned["message"]) == ("planned", "acme/greet@1.0.0 would be published")
    assert planned["also_published"] == ["acme/my_runtime@1.0.0"]
    assert held(ann) == []
    assert (tree(ann.project), tree(ann.user)) == before
    assert ann.do("publish", "greet")["digest"] == planned["digest"]

    again = ann.do("publish", "greet", dry_run=True)
    assert again["message"] == "acme/greet@1.0.0 is published already, as it is"
    ann.script("greet", says="other", on="my_runtime")
    assert ann.refused("publish", "greet", dry_run=True) == "version_conflict"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-02")
def test_other_content_for_a_version_is_refused_with_the_next_free_version(ann: Machine) -> None:
    ann.script("greet")
    ann.do("publish", "greet")
    assert ann.do("publish", "greet")["status"] == "unchanged"

    ann.script("greet", says="other")
    refused = ann.try_to("publish", "greet").content

    assert refused["code"] == "version_conflict"
    assert "The next free one is '1.0.1'." in str(refused["suggestion"])
    ann.script("greet", "1.0.1", says="other")
    assert ann.do("publish", "greet")["status"] == "published"
    ann.script("greet", "1.1.0-rc.1")
    ann.do("publish", "greet")
    ann.script("greet", "1.1.0-rc.1", says="other")
    assert "'1.1.0'" in str(ann.try_to("publish", "greet").content["suggestion"])


@pytest.mark.req("K-RG-03")
def test_the_executors_of_an_item_are_published_with_it_once(ann: Machine) -> None:
    write_runtime(ann)
    ann.script("one", on="my_runtime@^1")
    ann.script("two", on="my_runtime")

    assert ann.do("publish", "one")["also_published"] == ["acme/my_runtime@1.0.0"]
    assert "also_published" not in ann.do("publish", "two")
    (version,) = as_list(ann.do("versions", "two")["versions"])
    assert as_object(version)["executor"] == "acme/my_runtime@1.0.0"


def test_an_executor_that_changed_without_a_new_version_is_named_and_nothing_is_published(ann: Machine) -> None:
    write_runtime(ann)
    ann.script("one", on="my_runtime")
    ann.do("publish", "one")
    write_runtime(ann, more=', "extra"')
    ann.script("two", on="my_runtime")

    for is_dry in (True, False):
        refused = ann.try_to("publish", "two", dry_run=is_dry).content
        assert (refused["code"], refused["conflicts"]) == ("version_conflict", ["acme/my_runtime@1.0.0"])
    assert held(ann) == ["registry/acme/my_runtime@1.0.0", "registry/acme/one@1.0.0"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-04")
def test_a_version_keeps_the_executor_it_was_published_on(ann: Machine) -> None:
    write_runtime(ann)
    ann.script("one", says="$1 one", on="my_runtime@^1")
    ann.do("publish", "one")
    write_runtime(ann, "1.1.0", ', "newer"')
    ann.do("publish", "my_runtime")
    for path in (ann.ai / "tools").rglob("*.*"):
        path.unlink()

    assert ann.do("run", "one")["result"] == "one"
    assert [as_object(link)["version"] for link in as_list(ann.do("why", "one")["chain"])][:2] == ["1.0.0", "1.0.0"]
    ann.script("two", says="$1 two", on="my_runtime@^1")
    assert ann.do("run", "two")["result"] == "newer two"
    ann.script("three", says="$1 three", on="my_runtime@1.0.0")
    assert ann.do("run", "three")["result"] == "three"


@pytest.mark.usefixtures("sandbox")
def test_an_invalid_item_is_refused_and_nothing_is_written(ann: Machine) -> None:
    folder = ann.script("greet")
    (folder / "main.sh").write_text("if then\n")
    assert ann.refused("publish", "greet") == "invalid_manifest"
    ann.script("greet", on="no_such_runtime")
    assert ann.refused("publish", "greet") in {"executor_not_found", "invalid_manifest"}
    assert ann.refused("publish", "nothing") == "tool_not_found"
    assert held(ann) == []


@pytest.mark.req("K-SI-01")
def test_an_item_that_changed_after_signing_is_not_published(ann: Machine) -> None:
    write_runtime(ann)
    folder = ann.script("greet", on="my_runtime")
    ann.do("sign", "greet")
    (folder / "main.sh").write_text("echo changed\n")
    assert ann.refused("publish", "greet") == "content_hash_mismatch"

    ann.do("sign", "greet")
    ann.do("sign", "my_runtime")
    runtime = ann.ai / "tools" / "my_runtime.yaml"
    runtime.write_text(runtime.read_text().replace("Runs Bash", "Runs something"))
    assert ann.refused("publish", "greet") == "invalid_manifest"
    assert held(ann) == []


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("version", ["1.0", "one", "1.0.0+build", "v1.0.0"])
def test_a_version_without_an_order_is_refused(ann: Machine, version: str) -> None:
    ann.script("greet", version)
    assert ann.refused("publish", "greet") in {"invalid_request", "invalid_manifest"}
    assert held(ann) == []


@pytest.mark.usefixtures("sandbox")
def test_a_published_or_built_in_item_is_not_published_again(ann: Machine) -> None:
    ann.publish("greet")
    assert ann.refused("publish", "greet") == "version_sealed"
    assert ann.refused("publish", "registry/acme/greet") == "version_sealed"
    assert ann.refused("publish", "python_runtime") == "version_sealed"
    for action in ("delete", "sign", "update"):
        assert ann.refused(action, "registry/acme/greet") == "version_sealed"
    assert ann.do("run", "greet")["result"] == "hi"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-04")
def test_namespace_and_visibility_are_chosen_and_the_visibility_stays(ann: Machine) -> None:
    assert ann.publish("greet", namespace="public", visibility="unlisted")["identity"] == "registry/public/greet@1.0.0"
    assert ann.publish("greet", "1.1.0", namespace="public")["visibility"] == "unlisted"
    assert held(ann) == ["registry/public/greet@1.1.0"]
    ann.script("greet", "2.0.0")
    assert ann.refused("publish", "greet", {"namespace": "elsewhere"}) == "namespace_denied"
    assert ann.refused("publish", "greet", {"namespace": "../x"}) == "namespace_denied"
    assert ann.refused("publish", "greet", {"visibility": "secret"}) == "invalid_request"
    assert ann.refused("publish", "greet", {"changes": "typo"}) == "invalid_request"
    assert ann.refused("publish") == "invalid_request"


@pytest.mark.req("K-RG-04")
def test_an_item_is_never_more_visible_than_its_executors(ann: Machine) -> None:
    write_runtime(ann)
    ann.do("publish", "my_runtime", {"visibility": "private"})
    ann.script("greet", on="my_runtime")

    refused = ann.try_to("publish", "greet").content
    assert "which is private" in str(refused["message"])
    assert ann.do("publish", "greet", {"visibility": "private"})["status"] == "published"


@pytest.mark.usefixtures("sandbox")
def test_an_unsigned_item_is_published_with_a_warning(ann: Machine) -> None:
    (warning,) = as_list(ann.publish("greet")["warnings"])
    assert as_object(warning)["reason"] == "it is not signed"


@pytest.mark.usefixtures("sandbox")
def test_the_location_to_publish_from_can_be_named(ann: Machine) -> None:
    ann.script("greet", says="project")
    ann.ask("load", item_id="greet", destination="user")
    ann.script("greet", "2.0.0", says="project")

    assert ann.do("publish", "greet", {"location": "user"})["version"] == "1.0.0"
    assert ann.do("publish", "greet")["version"] == "2.0.0"


@pytest.mark.usefixtures("sandbox")
def test_a_refusing_remote_leaves_nothing_published(ann: Machine, a_machine: MakeMachine, tmp_path: Path) -> None:
    eve = a_machine("eve", namespaces=["acme"])
    share: JsonObject = {"to": str(tmp_path / "share")}
    eve.script("greet", says="eve")
    eve.do("publish", "greet", share)
    ann.script("greet", says="ann")

    assert ann.refused("publish", "greet", share) == "version_conflict"
    assert ann.refused("publish", "greet", {"to": "nowhere"}) == "remote_not_found"
    assert held(ann) == []


@pytest.mark.usefixtures("sandbox")
def test_a_private_item_of_a_shared_database_is_answered_like_one_that_does_not_exist(
    a_machine: MakeMachine, tmp_path: Path
) -> None:
    url = f"sqlite://{tmp_path}/shared.db"
    ann, bob = a_machine("ann", namespaces=["acme"], url=url), a_machine("bob", namespaces=["other"], url=url)
    ann.publish("invoice", visibility="private")

    for private, unknown in (("acme/invoice", "acme/nothing"), ("invoice", "nothing")):
        refused, missing = (bob.ask("execute", item_id=item).content for item in (private, unknown))
        assert refused["code"] == "tool_not_found"
        assert str(refused).replace("invoice", "nothing") == str(missing)
