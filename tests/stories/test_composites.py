"""Composites as items: shared with what their steps call, locked with it, and called over every surface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

SAY = """# tool_type: script
# executor: {runtime}
# version: 1.0.0
# description: Say
# parameters:
#   - {{name: word, type: string}}
echo 1
"""
RUNTIME = {
    "tool_id": "own_runtime",
    "tool_type": "runtime",
    "executor": "subprocess",
    "version": "1.0.0",
    "description": "Runs bash files",
    "config": {"command": "bash", "args": ["{tool.files}/{tool.entrypoint}"], "result_from": "stdout"},
}


def put(machine: Machine, name: str, *steps: JsonObject) -> None:
    """Write a composite of a project."""
    manifest = {"tool_id": name, "tool_type": "composite", "version": "1.0.0", "description": "Steps"}
    machine.put(f"tools/{name}.yaml", json.dumps({**manifest, "config": {"steps": [*steps]}}))


def put_work(machine: Machine) -> None:
    """Write a composite that calls a tool and another composite, which calls a tool with a runtime of its own."""
    machine.put("tools/own_runtime.yaml", json.dumps(RUNTIME))
    machine.put("tools/say.sh", SAY.format(runtime="bash_runtime"))
    machine.put("tools/shout.sh", SAY.format(runtime="own_runtime"))
    put(machine, "inner", {"id": "s", "tool": "shout"})
    put(machine, "work", {"id": "a", "tool": "say", "parameters": {"word": "x"}}, {"id": "b", "tool": "inner"})


@pytest.mark.req("K-CO-02")
def test_the_steps_of_a_composite_travel_with_it(a_machine: MakeMachine, tmp_path: Path) -> None:
    share, ann, bob = str(tmp_path / "share"), a_machine("ann"), a_machine("bob")
    put_work(ann)

    published = ann.do("publish", "work", {"to": share})
    assert {*as_list(published["also_published"])} >= {
        "public/say@1.0.0", "public/inner@1.0.0", "public/shout@1.0.0",
    }  # fmt: skip
    pulled = bob.do("pull", "work", {"from": share})
    assert {*as_list(pulled["new"])} == {
        f"public/{name}@1.0.0" for name in ("work", "say", "inner", "shout", "own_runtime")
    }
    planned = bob.ask("execute", item_id="work", dry_run=True).content
    inner = as_list(as_object(as_list(planned["steps"])[1])["steps"])
    assert as_object(as_object(inner[0])["plan"])["identity"] == "registry/public/shout@1.0.0"

    copied = bob.ask("load", item_id="work", destination="project").content
    assert {*as_list(copied["also_copied"])} == {"say", "inner", "shout", "own_runtime"}
    again = bob.ask("execute", item_id="project/local/work", dry_run=True).content
    assert again["status"] == "planned", again


@pytest.mark.usefixtures("sandbox")
def test_a_changed_step_is_a_changed_composite(a_machine: MakeMachine) -> None:
    ann = a_machine("ann")
    put_work(ann)
    for name in ("own_runtime", "say", "shout", "inner", "work"):
        ann.do("sign", name)
    call: JsonObject = {"item_id": "work", "frozen": True, "dry_run": True}
    assert ann.ask("execute", **call).content["status"] == "planned"
    digest = ann.ask("execute", **call).content["plan_digest"]

    ann.put("tools/shout.sh", SAY.format(runtime="own_runtime").replace("echo 1", "echo 2"))
    ann.do("sign", "shout")

    assert ann.ask("execute", **call).content["code"] == "lock_mismatch"
    assert ann.ask("execute", **{**call, "frozen": False}).content["plan_digest"] != digest


def test_a_composite_that_calls_itself_is_refused_and_never_runs(a_machine: MakeMachine) -> None:
    ann = a_machine("ann")
    put(ann, "one", {"id": "a", "tool": "two"})
    put(ann, "two", {"id": "b", "tool": "one"}, {"id": "c", "tool": "nowhere"})

    found = ann.ask("execute", action="validate", item_id="two").content
    reasons = [(as_object(one)["place"], as_object(one)["reason"]) for one in as_list(found["issues"])]
    assert reasons == [
        ("config.steps[1].tool", "no tool is named 'nowhere'"),
        ("config.steps", "calls itself: two → one → two"),
    ]
    assert ann.refused("run", "one") == "invalid_manifest"
    assert ann.ask("thread", action="start", item_id="one").content["code"] == "invalid_manifest"
