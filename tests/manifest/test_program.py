"""Directives as programs: inputs, context, what they extend, limits, outputs, threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidArguments, InvalidManifest
from kiwi_mcp.domain.grants import Allow, Rights
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.manifest.directive import limit_faults, read_directive
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.program import (
    DirectiveLimits,
    DirectiveProgram,
    Load,
    McpUse,
    ModelPreference,
    TextItem,
    directive_program,
    fill,
    folder_issues,
    return_faults,
    return_schema,
    thread_program,
    undeclared,
)
from kiwi_mcp.manifest.source_file import read_manifest

SEEDS = Path(__file__).parents[1] / "data/seeds"
KNOWLEDGE = {"house/rules": "Be kind.", "house/tone": "Be brief."}


def directive(name: str, inner: str = "", *, head: str = "", after: str = "") -> TextItem:
    text = f'# {name}\n\n```xml\n<directive name="{name}" version="1.0.0" {head}>\n{inner}\n</directive>\n```\n{after}'
    manifest = parse({**read_directive(text, what=name), "tool_type": "directive"}, stem=name)
    return TextItem(manifest, text, f"project/local/{name}@1.0.0")


def folder(manifest: JsonObject, text: str) -> TextItem:
    return TextItem(parse(manifest, stem="x"), text, "project/local/x@1.0.0")


def made(item: TextItem, *others: TextItem, **inputs: object) -> DirectiveProgram:
    return directive_program(item, inputs, loading(*others))  # type: ignore[arg-type]  # JSON, as tests write it


def loading(*others: TextItem) -> Load:
    known = {one.manifest.tool_id: one for one in others}
    entry = parse({"tool_id": "x", "tool_type": "knowledge", "version": "1.0.0"}, stem="x")

    def load(ref: str, item_type: str, by: str) -> TextItem | None:
        assert by
        if item_type == "knowledge":
            return TextItem(entry, KNOWLEDGE[ref]) if ref in KNOWLEDGE else None
        return known.get(ref)

    return load


def step(action: str) -> str:
    return f'<process><step name="go"><action>{action}</action></step></process>'


INPUTS = '<inputs><input name="who" required="true">Whom</input><input name="mood" /></inputs>'


@pytest.mark.req("K-DI-02")
def test_inputs_are_filled_in_once_and_the_written_text_stays() -> None:
    item = directive(
        "greet", INPUTS + step("Greet {input:who} {input:mood:gladly}{input:title?}, {input:lost}, {who}.")
    )

    program = made(item, who="{input:mood} Ada")

    assert "Greet {input:mood} Ada gladly, {input:lost}, {who}." in program.text
    assert "{input:who}" in str(program.written["process"])
    assert undeclared(item.text, program.input_schema) == ("lost",)


@given(st.text(), st.text())
def test_a_value_is_never_filled_in_itself(first: str, second: str) -> None:
    values: JsonObject = {"a": f"{{input:b}}{first}{{input:a}}", "b": second}

    assert fill("{input:a}|{input:b}", values) == f"{values['a']}|{second}"


def test_values_other_than_text_are_written_as_json() -> None:
    assert fill("{input:a} {input:b|x} {input:c}", {"a": [1, True], "c": None}) == "[1,true] x null"


@pytest.mark.req("K-DI-02")
@pytest.mark.parametrize("inputs", [{}, {"who": ""}, {"who": "  \n"}, {"who": 3}, {"who": "Ada", "lost": "x"}])
def test_inputs_that_are_missing_blank_wrong_or_unknown_are_refused(inputs: JsonObject) -> None:
    with pytest.raises(InvalidArguments):
        directive_program(directive("greet", INPUTS), inputs, loading())


def test_a_process_after_the_fence_is_the_program() -> None:
    inner = '<step name="one">Use `a < b && c` with {input:who}; end with </directive>.</step>'
    after = f"\n<process>\n  {inner}\n</process>\n"

    program = made(directive("greet", INPUTS, after=after), who="Ada")

    assert '<step name="one">' in program.text
    assert "Use `a < b && c` with Ada; end with </directive>." in program.text


def test_prose_after_the_fence_is_the_program_where_there_is_no_process() -> None:
    assert "Summarise Ada." in made(directive("greet", INPUTS, after="\nSummarise {input:who}.\n"), who="Ada").text
    assert "Not this." not in made(directive("greet", INPUTS + step("x"), after="\nNot this.\n"), who="Ada").text


BASE = directive(
    "base",
    """<metadata><permissions><execute><tool>*</tool></execute></permissions>
<model tier="fast" id="m" /><limits turns="9" spend="1" /><git_checkpoint mode="auto" />
<context><system>house/rules</system><before>House text for {input:place}.</before><after>house/tone</after></context>
</metadata><inputs><input name="place" required="true" /><input name="who" type="number" /></inputs>""",
)
CHILD = directive(
    "child",
    """<metadata><permissions><execute><tool>a</tool></execute></permissions><limits turns="3" />
<context><system>house/rules</system><system>Own words here.</system><suppress>house/tone</suppress></context>
</metadata><inputs><input name="who" required="true" /></inputs>""",
    head='extends="base"',
)


def test_a_directive_adds_to_what_it_extends_and_narrows_its_rights() -> None:
    program = made(CHILD, BASE, who="Ada", place="Bath")
    rights = Rights(program.permissions)

    assert (program.system, program.before, program.after) == (
        "Be kind.\n\nOwn words here.",
        "House text for Bath.",
        "",
    )
    assert program.limits == DirectiveLimits(turns=3, spend=1.0)
    assert program.model == ModelPreference("fast", "m")
    assert program.git_checkpoint == "auto"
    assert as_object(program.input_schema["properties"]).keys() == {"place", "who"}
    assert isinstance(rights.item_verdict(["project/local/a@1.0.0"], ["item/tool/a"]), Allow)
    assert not isinstance(rights.item_verdict(["project/local/b@1.0.0"], ["item/tool/b"]), Allow)
    with pytest.raises(InvalidArguments):
        made(CHILD, BASE, who="Ada")


def test_a_directive_without_permissions_has_those_of_the_nearest_that_it_extends() -> None:
    heir = directive("heir", head='extends="child"')
    rights = Rights(made(heir, CHILD, BASE, who="Ada", place="Bath").permissions)

    assert isinstance(rights.item_verdict(["project/local/a@1.0.0"], ["item/tool/a"]), Allow)
    assert not isinstance(rights.item_verdict(["project/local/b@1.0.0"], ["item/tool/b"]), Allow)


def test_a_child_cannot_widen_what_it_extends() -> None:
    wide = directive("wide", "<metadata><permissions>*</permissions></metadata>", head='extends="child"')
    rights = Rights(made(wide, CHILD, BASE, who="Ada", place="Bath").permissions)

    assert not isinstance(rights.item_verdict(["project/local/b@1.0.0"], ["item/tool/b"]), Allow)
    assert not isinstance(rights.verdict("spawn", "x"), Allow)


@pytest.mark.parametrize(("head", "reason"), [('extends="d"', "leads back"), ('extends="lost"', "not in any catalog")])
def test_extending_itself_or_nothing_is_an_issue(head: str, reason: str) -> None:
    item = directive("d", head=head)
    with pytest.raises(InvalidManifest) as caught:
        made(item, item)
    (issue,) = caught.value.issues
    assert (issue.place, reason in issue.reason) == ("config.extends", True)


def test_knowledge_of_the_context_that_is_not_here_is_a_notice() -> None:
    program = made(directive("d", "<metadata><context><before>no/such</before></context></metadata>"))
    assert program.before == ""
    assert "no/such" in program.notices[0]


def test_servers_hooks_and_old_costs_are_part_of_the_program() -> None:
    inner = """<metadata><mcps><mcp name="github" required="true" tools="a, b" /><mcp name="mail" /></mcps>
<cost><max_turns>4</max_turns><on_exceeded>warn</on_exceeded></cost>
<hooks><hook when="cost.turns > 2" directive="pause" /></hooks></metadata>"""
    program = made(directive("d", inner))

    assert program.mcps == (McpUse("github", is_required=True, tools=("a", "b")), McpUse("mail"))
    assert program.limits == DirectiveLimits(turns=4, on_exceeded="warn")
    assert [hook.item_id for hook in program.hooks] == ["pause"]
    assert program.git_checkpoint == "explicit"


@pytest.mark.parametrize(
    ("limits", "places"),
    [
        ({"turns": 5, "duration": "5m", "spend": 0.5, "tool_calls": 3, "on_exceeded": "stop"}, []),
        ({"truns": 5}, ["config.limits.truns"]),
        ({"turns": "many", "spend": True}, ["config.limits.turns", "config.limits.spend"]),
        ({"on_exceeded": "shout"}, ["config.limits.on_exceeded"]),
        ([5], ["config.limits"]),
    ],
)
def test_limits_in_yaml_are_checked(limits: JsonObject, places: list[str]) -> None:
    assert [issue.place for issue in limit_faults(limits)] == places


def test_the_outputs_of_seed_001_are_what_return_takes() -> None:
    text = (SEEDS / "001_git_checkpoint.md").read_text()
    outputs = as_object(as_object(read_directive(text, what="x")["config"])["outputs"])

    assert return_schema(outputs) == {
        "type": "object",
        "properties": {
            "commit_sha": {"type": "string"},
            "commit_message": {"type": "string"},
            "files_changed": {"type": "number"},
            "insertions": {"type": "number"},
            "deletions": {"type": "number"},
            "reason": {"type": "string"},
            "state": {"enum": ["rolled_back", "unchanged"]},
        },
    }
    assert not return_faults(outputs, {"reason": "nothing to do", "state": "unchanged"})
    assert return_faults(outputs, {"reason": "nothing to do", "state": "gone"})
    assert return_faults(outputs, {"commit_sha": "abc"})
    counts: JsonObject = {"files_changed": 1, "insertions": 1, "deletions": 1}
    success: JsonObject = {"commit_sha": "a", "commit_message": "b", **counts}
    assert not return_faults(outputs, success)
    assert return_faults(outputs, {**success, "reason": "nothing to do"})


@pytest.mark.parametrize(
    ("outputs", "good", "bad"),
    [
        ({}, {"result": "x"}, {}),
        ({"fields": [{"name": "n", "type": "int", "required": "true"}, {"name": "m"}]}, {"n": 1}, {"n": "1"}),
        ({"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}, {"n": "1"}, {}),
        ({"success": "A report in prose"}, {"result": "x"}, {"n": 1}),
    ],
)
def test_what_is_returned_is_checked_against_the_outputs(
    outputs: JsonObject, good: JsonObject, bad: JsonObject
) -> None:
    assert not return_faults(outputs, good)
    assert return_faults(outputs, bad)
    assert return_schema(outputs)["type"] == "object"


RESEARCH = read_manifest(Path("tool.yaml"), (SEEDS / "000_01_research_topic.yaml").read_text())
assert RESEARCH is not None
TOPIC = TextItem(parse(RESEARCH.value, stem="x"), "Research {input:topic}.\n", "project/local/research_topic@1.0.0")


@pytest.mark.req("K-DI-06")
def test_the_directive_of_seed_000_is_a_program_as_printed() -> None:
    program = made(TOPIC, topic="kiwis")
    rights = Rights(program.permissions)

    assert program.text == "Research kiwis.\n\n## Inputs\n\n- topic: kiwis\n"
    assert program.limits.tokens == 50_000
    assert program.model.tier == "balanced"
    assert isinstance(rights.verdict("item", "mcp/web/web_search@1"), Allow)
    assert not isinstance(rights.verdict("item", "mcp/web/send@1"), Allow)
    assert not list(folder_issues(TOPIC.manifest, TOPIC.text, "directive.md"))


WRITTEN: JsonObject = {
    "tool_id": "tidy",
    "tool_type": "directive",
    "version": "1.0.0",
    "parameters": [{"name": "who", "type": "string", "required": True}],
    "config": {"permissions": {"tools": ["a"]}},
}


HEAD = 'name="tidy" version="1.0.0"'


@pytest.mark.req("K-DI-06")
@pytest.mark.parametrize(
    ("inner", "head", "places"),
    [
        ('<inputs><input name="who" required="true" /></inputs>', HEAD, []),
        ("", HEAD, []),
        ("", 'name="other" version="1.0.1"', ["name", "version"]),
        ('<inputs><input name="whom" required="true" /></inputs>', HEAD, ["inputs", "required inputs"]),
        ('<inputs><input name="who" /></inputs>', HEAD, ["required inputs"]),
        ("<permissions><execute><tool>a</tool></execute></permissions>", HEAD, []),
        ("<permissions><execute><tool>*</tool></execute></permissions>", HEAD, ["permissions"]),
        ("<oops>", HEAD, [""]),
    ],
)
def test_a_difference_between_manifest_and_text_is_an_issue_with_its_place(
    inner: str, head: str, places: list[str]
) -> None:
    item = folder(WRITTEN, f"<directive {head}>{inner}{step('Tidy {input:who}.')}</directive>")
    found = [issue.place for issue in folder_issues(item.manifest, item.text, "directive.md")]

    assert found == [f"directive.md:{place}".rstrip(":") for place in places]
    if not places:
        program = made(item, who="Ada")
        assert "Tidy Ada." in program.text
        assert not isinstance(Rights(program.permissions).verdict("item", "project/local/b@1"), Allow)


def test_the_permissions_of_a_folder_are_those_of_its_manifest() -> None:
    silent = {word: value for word, value in WRITTEN.items() if word != "config"}
    text = '<directive name="tidy" version="1.0.0"><permissions>*</permissions></directive>'

    assert made(folder(silent, text), who="Ada").permissions[0].to_json() == {}


THREAD: JsonObject = {
    "tool_id": "t",
    "tool_type": "thread",
    "version": "1.0.0",
    "executor": "llm_runtime",
    "config": {"directive": "research_topic"},
}


def thread(**config: object) -> TextItem:
    written = {**THREAD, "config": {**as_object(THREAD["config"]), **config}}
    return TextItem(parse(written, stem="t"), "", "project/local/t@1.0.0")  # type: ignore[arg-type]  # JSON


def test_a_thread_sets_model_and_limits_and_narrows_rights() -> None:
    item = thread(
        model_tier="fast", max_tokens=10, timeout=300, limits={"turns": 2}, permissions={"tools": ["web_search"]}
    )
    program = thread_program(item, {"topic": "kiwis"}, loading(TOPIC))
    rights = Rights(program.permissions)

    assert program.model == ModelPreference("fast")
    assert program.limits == DirectiveLimits(turns=2, tokens=10, duration=300)
    assert isinstance(rights.verdict("item", "mcp/web/web_search@1"), Allow)
    assert not isinstance(rights.verdict("item", "mcp/web/read_web_page@1"), Allow)
    assert thread_program(thread(model="m"), {}, loading(TOPIC)).model == ModelPreference("balanced", "m")


@pytest.mark.case("PERM-05")
def test_a_thread_that_inherits_no_permissions_has_none() -> None:
    program = thread_program(thread(inherit_permissions=False, permissions={"tools": ["*"]}), {}, loading(TOPIC))
    assert [grant.to_json() for grant in program.permissions] == [{}]


def test_a_thread_without_its_directive_is_refused_with_the_place() -> None:
    with pytest.raises(InvalidManifest) as caught:
        thread_program(thread(), {}, loading())
    assert caught.value.issues == (
        Issue(
            "config.directive",
            "'research_topic' is not in any catalog",
            "Create `research_topic`, or name one that exists.",
        ),
    )
