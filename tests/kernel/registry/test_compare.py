"""Version comparison: every kind of change in a readable form."""

from __future__ import annotations

import pytest
from inline_snapshot import snapshot
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

pytestmark = pytest.mark.req("K-RG-03")


@pytest.fixture
def ann(a_machine: MakeMachine, sandbox: None) -> Machine:
    """A machine on which a tool was published, and then changed in every way."""
    machine = a_machine("ann", namespaces=["acme", "public"])
    folder = machine.script("greet")
    machine.put("tools/greet/data.bin", b"\0\1\2")
    machine.put("tools/greet/old.txt", "gone\n")
    machine.put("tools/greet/tool.sh", "true\n")
    machine.do("publish", "greet")
    machine.script("greet", "1.1.0", says="hello")
    machine.put("tools/greet/data.bin", b"\0\1\2\3")
    machine.put("tools/greet/new.txt", "no newline at the end")
    machine.put("tools/greet/tool.sh", "true\n", 0o755)
    (folder / "old.txt").unlink()
    return machine


def changes(answer: JsonObject) -> dict[object, JsonObject]:
    return {as_object(one)["path"]: as_object(one) for one in as_list(answer["changes"])}


def test_the_local_item_is_compared_with_the_latest_version(ann: Machine) -> None:
    response = ann.do("diff", "greet")

    assert as_object(response["from"])["identity"] == "registry/acme/greet@1.0.0"
    assert as_object(response["to"])["identity"] == "project/local/greet@1.1.0"
    assert response["status"] == "different"
    assert list(changes(response).values()) == snapshot(
        [
            {"path": "data.bin", "change": "changed", "from_bytes": 3, "to_bytes": 4},
            {
                "path": "main.sh",
                "change": "changed",
                "diff": """\
--- a/main.sh
+++ b/main.sh
@@ -1 +1 @@
-echo hi
+echo hello
""",
            },
            {
                "path": "new.txt",
                "change": "added",
                "diff": """\
--- a/new.txt
+++ b/new.txt
@@ -0,0 +1 @@
+no newline at the end
""",
            },
            {
                "path": "old.txt",
                "change": "removed",
                "diff": """\
--- a/old.txt
+++ b/old.txt
@@ -1 +0,0 @@
-gone
""",
            },
            {
                "path": "tool.sh",
                "change": "changed",
                "executable": True,
            },
            {
                "path": "tool.yaml",
                "change": "changed",
                "diff": """\
--- a/tool.yaml
+++ b/tool.yaml
@@ -1,6 +1,6 @@
 tool_id: greet
 tool_type: script
-version: "1.0.0"
+version: "1.1.0"
 executor: "bash_runtime"
 description: Says a word called greet
 config:
""",
            },
        ]
    )


def test_any_two_are_compared_in_either_direction(ann: Machine) -> None:
    ann.do("publish", "greet")
    there = ann.do("diff", "greet", {"from": "1.0.0", "to": "1.1.0"})
    back = ann.do("diff", "greet", {"from": "1.1.0", "to": "1.0.0"})

    assert changes(there).keys() == changes(back).keys()
    assert (changes(there)["new.txt"]["change"], changes(back)["new.txt"]["change"]) == ("added", "removed")
    for words in (
        {"from": "1.1.0", "to": "project"},
        {"from": "^1", "to": "1.1.0"},
        {"to": "1.1.0"},
        {"from": "1.1.0"},
    ):
        same = ann.do("diff", "greet", words)
        assert (same["status"], same["changes"]) == ("same", []), words
    assert ann.do("diff", "greet")["status"] == "same"


def test_without_a_local_copy_the_last_two_versions_are_compared(ann: Machine) -> None:
    ann.do("publish", "greet")
    for path in (ann.ai / "tools" / "greet").iterdir():
        path.unlink()

    response = ann.do("diff", "greet")
    assert [as_object(response[word])["identity"] for word in ("from", "to")] == [
        "registry/acme/greet@1.0.0",
        "registry/acme/greet@1.1.0",
    ]
    ann.publish("once")
    assert ann.refused("diff", "once") == "invalid_request"
    assert ann.refused("diff", "greet", {"from": "project"}) == "not_found"
    assert ann.refused("diff", "greet", {"from": "1.0.0", "to": "5.0.0"}) == "version_not_found"
    assert ann.refused("diff", "greet", {"from": "no version at all"}) == "invalid_request"


def test_a_namespace_selects_the_item(ann: Machine) -> None:
    ann.do("publish", "greet", {"namespace": "public"})

    assert ann.do("diff", "registry/public/greet")["status"] == "same"
    assert ann.do("diff", "registry/acme/greet")["status"] == "different"
    versions = {"from": "1.1.0", "to": "1.1.0"}
    assert ann.do("diff", "registry/public/greet", versions)["status"] == "same"
    assert ann.refused("diff", "registry/acme/greet", versions) == "version_not_found"


def test_the_size_of_an_answer_is_limited(ann: Machine) -> None:
    ann.put("tools/greet/a.txt", "".join(f"line {number}\n" for number in range(30_000)))
    ann.put("tools/greet/huge.txt", "x" * 1_500_000)

    found = changes(ann.do("diff", "greet"))

    assert (found["a.txt"]["diff"], found["a.txt"]["truncated"]) == ("", True)
    assert found["huge.txt"]["to_bytes"] == 1_500_000
    assert "diff" in found["main.sh"]
