"""Directives and threads as items: validated with what they name, run as programs, shared with what they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

SEEDS = Path(__file__).parents[1] / "data/seeds"
TOPIC = (SEEDS / "000_01_research_topic.yaml").read_text()
THREAD = (SEEDS / "000_04_research_thread.yaml").read_text()
BASE = """<directive name="base" version="1.0.0"><metadata><description>Base</description>
<context><before>tone</before></context><permissions><execute><tool>*</tool></execute></permissions></metadata>
<inputs><input name="place" required="true" /></inputs></directive>
"""
GREET = """<directive name="greet" version="1.0.0" extends="base"><metadata><description>Greet</description>
<mcps><mcp name="mail_server" required="true" /></mcps></metadata>
<inputs><input name="who" required="true" /></inputs>
<process><step name="go"><action>Greet {input:who} in {input:place}.</action></step></process></directive>
"""
TONE = "---\nid: tone\ntitle: Tone\nversion: 1.0.0\n---\nBe kind.\n"


@pytest.fixture
def machine(a_machine: MakeMachine) -> Machine:
    return a_machine("ann")


def put_greet(machine: Machine) -> None:
    machine.put("directives/base.md", BASE)
    machine.put("directives/greet.md", GREET)
    machine.put("knowledge/tone.md", TONE)


def put_research(machine: Machine, thread: str = THREAD, text: str = "Research {input:topic}.\n") -> None:
    machine.put("tools/research_topic/tool.yaml", TOPIC)
    machine.put("tools/research_topic/directive.md", text)
    machine.put("tools/research_thread.yaml", thread)


def issues(machine: Machine, name: str) -> dict[str, str]:
    found = machine.ask("execute", action="validate", item_id=name).content
    rows = [*as_list(found["issues"]), *as_list(found.get("warnings"))]
    return {str(as_object(one)["place"]): str(as_object(one)["reason"]) for one in rows}


@pytest.mark.req("K-DI-06")
def test_the_directive_of_seed_000_as_printed_is_a_program(machine: Machine) -> None:
    put_research(machine)

    assert machine.ask("execute", action="validate", item_id="research_topic").content["status"] == "valid"
    program = as_object(machine.do("run", "research_topic", item_type="directive")["result"])

    assert program["text"] == "Research {input:topic}.\n"
    assert program["permissions"] == {
        "verbs": {"allow": ["execute.run", "search", "load"]},
        "items": {"allow": ["*/web_search@*", "*/read_web_page@*"]},
    }


@pytest.mark.req("K-DI-06")
def test_a_text_that_says_other_than_its_manifest_is_an_issue(machine: Machine) -> None:
    put_research(machine, text='<directive name="research_topic" version="2.0.0"></directive>\n')

    assert "directive.md:version" in issues(machine, "research_topic")


@pytest.mark.req("K-DI-02")
def test_execute_gives_the_program_of_a_directive_with_what_it_extends(machine: Machine) -> None:
    put_greet(machine)

    answer = machine.do("run", "greet", {"who": "Ada", "place": "Bath"}, item_type="directive")
    program = as_object(answer["result"])

    assert answer["status"] == "ready"
    assert "Greet Ada in Bath." in str(program["text"])
    assert "Greet {input:who} in {input:place}." in str(program["process"])
    assert any("'mail_server'" in str(warning) for warning in as_list(answer["warnings"]))
    assert machine.refused("run", "greet", {"who": "Ada"}, item_type="directive") == "invalid_input"
    assert machine.refused("run", "greet", {"who": "Ada", "place": " "}, item_type="directive") == "invalid_input"


@pytest.mark.parametrize(
    ("thread", "places"),
    [
        (THREAD, []),
        (THREAD.replace("directive: research_topic", "directive: nothing"), ["config.directive"]),
        (THREAD.replace("directive: research_topic", "directive: say_tool"), ["config.directive"]),
        (THREAD.replace("model_tier: fast", "model_tier: huge"), ["config.model_tier"]),
        (THREAD.replace("executor: llm_runtime", "executor: bash_runtime"), ["executor"]),
        (THREAD.replace("directive: research_topic", "directive: greet"),
         ["parameters.topic", "parameters.depth", "parameters"]),
        (THREAD.replace("  timeout: 300", "  limits: {truns: 3}\n  timeout: 300"), ["config.limits.truns"]),
        (THREAD.replace("  timeout: 300", "  permissions: {tolls: [a]}\n  timeout: 300"), ["config.permissions.tolls"]),
    ],
)  # fmt: skip
def test_a_thread_is_checked_with_its_directive(machine: Machine, thread: str, places: list[str]) -> None:
    put_research(machine, thread)
    put_greet(machine)
    machine.put(
        "tools/say_tool.sh", "# tool_id: say_tool\n# tool_type: script\n# version: 1.0.0\n# executor: bash_runtime\n"
    )

    assert set(issues(machine, "research_thread")) == {*places}


def test_hooks_context_and_cycles_of_a_directive_are_checked(machine: Machine) -> None:
    machine.put("directives/a.md", '<directive name="a" version="1.0.0" extends="b"></directive>')
    machine.put("directives/b.md", '<directive name="b" version="1.0.0" extends="a"></directive>')
    machine.put(
        "directives/c.md",
        '<directive name="c" version="1.0.0"><metadata><hooks><hook when="((( ==" directive="nothing" /></hooks>'
        "<context><system>no/such</system></context></metadata></directive>",
    )

    assert "leads back to itself" in issues(machine, "a")["config.extends"]
    assert {"config.hooks[0]", "config.hooks[0].when", "config.context"} <= set(issues(machine, "c"))
    assert machine.refused("run", "a", item_type="directive") == "invalid_manifest"


def test_what_an_item_names_travels_with_it(a_machine: MakeMachine, tmp_path: Path) -> None:
    share, ann, bob = str(tmp_path / "share"), a_machine("ann"), a_machine("bob")
    put_research(ann)
    put_greet(ann)

    published = ann.do("publish", "research_thread", {"to": share})
    assert published["also_published"] == ["public/research_topic@1.0.0"]
    assert "without a version" in str(published["warnings"])
    ann.do("publish", "greet", {"to": share}, item_type="directive")

    pulled = bob.do("pull", "research_thread", {"from": share})
    assert pulled["new"] == ["public/research_topic@1.0.0", "public/research_thread@1.0.0"]
    assert bob.do("run", "research_topic", item_type="directive")["status"] == "ready"
    assert set(bob.do("pull", "greet", {"from": share})["new"]) == {  # type: ignore[arg-type]  # JSON
        "public/greet@1.0.0", "public/base@1.0.0", "public/tone@1.0.0",
    }  # fmt: skip

    copied = bob.ask("load", item_id="research_thread", destination="project").content
    assert copied["also_copied"] == ["research_topic"]
    assert (bob.ai / "tools/research_topic/directive.md").read_text() == "Research {input:topic}.\n"
    bob.ask("load", item_id="greet", destination="project")
    assert (bob.ai / "knowledge/tone.md").read_text() == TONE


def test_a_changed_directive_is_a_changed_thread(machine: Machine) -> None:
    put_greet(machine)
    for name, kind in (("base", "directive"), ("tone", "knowledge"), ("greet", "directive")):
        machine.do("sign", name, item_type=kind)
    inputs: JsonObject = {"who": "Ada", "place": "Bath"}
    call: JsonObject = {"item_id": "greet", "item_type": "directive", "parameters": inputs, "frozen": True}
    assert machine.ask("execute", **call).content["status"] == "ready"

    machine.put("knowledge/tone.md", TONE.replace("kind", "cruel"))
    machine.do("sign", "tone", item_type="knowledge")

    assert machine.ask("execute", **call).content["code"] == "lock_mismatch"
