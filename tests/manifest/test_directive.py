from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.manifest.directive import read_directive

FULL = """<!-- a comment -->
# Tidy

```xml
<directive name="tidy" version="2.0.0">
  <metadata>
    <description>
      Tidies a
      folder
    </description>
    <category>house</category>
    <author>someone</author>
    <tags>a, b</tags>
    <model tier="fast" fallback_id="big" parallel="true">cheap enough</model>
    <permissions>
      <read resource="filesystem" path="src/**" />
      <cap>fs.read</cap>
    </permissions>
    <limits><turns>10</turns><duration>5m</duration><spend currency="eur">0.5</spend></limits>
    <hooks>
      <hook><when>event.code == "x"</when><directive>repair</directive><inputs><input name="a">1</input></inputs></hook>
    </hooks>
    <git_checkpoint mode="auto" />
    <context_budget estimated_usage="20%" />
  </metadata>
  <inputs>
    <input name="path" type="string" required="TRUE">Where to begin</input>
    <input name="depth" type="int" default="3" enum="1,2,3" />
    <input name="names" type="file"><schema>{"type": "array", "items": {"type": "string"}}</schema></input>
  </inputs>
  <process>
    <step name="look">
      <description>Look around</description>
      <action>List {path} {CDATA_OPEN}x{CDATA_CLOSE}
        then stop</action>
      <verification><check>all seen</check></verification>
    </step>
    <step name="do"><search query="a &amp; b" /></step>
    <step name="show"><action>Write</action><template>
```xml
<directive name="inner">a < b && c</directive>
```</template></step>
  </process>
  <success_criteria><criterion>tidy</criterion></success_criteria>
  <outputs><success>done: true</success><output name="n" type="number">how many</output></outputs>
  <wishes><wish>one</wish><wish>two</wish></wishes>
</directive>
```
"""


def directive(inner: str, head: str = 'name="d" version="1.0.0"') -> str:
    return f"# D\n\n```xml\n<directive {head}>\n{inner}\n</directive>\n```\n"


def config(inner: str) -> JsonObject:
    return as_object(read_directive(directive(inner), what="d.md")["config"])


def test_a_directive_becomes_one_manifest() -> None:
    assert read_directive(FULL, what="tidy.md") == snapshot(
        {
            "tool_id": "tidy",
            "version": "2.0.0",
            "description": "Tidies a folder",
            "parameters": [
                {"name": "path", "type": "string", "required": True, "description": "Where to begin"},
                {"name": "depth", "type": "integer", "required": False, "default": 3, "enum": [1, 2, 3]},
                {"name": "names", "type": "array", "items": {"type": "string"}, "required": False},
            ],
            "config": {
                "model_tier": "fast",
                "model": {"tier": "fast", "fallback": "big", "parallel": "true", "why": "cheap enough"},
                "permissions": [
                    {"tag": "read", "attrs": {"resource": "filesystem", "path": "src/**"}, "content": ""},
                    {"tag": "cap", "attrs": {}, "content": "fs.read"},
                ],
                "limits": {"turns": 10, "duration": 300, "spend_currency": "EUR", "spend": 0.5},
                "hooks": [{"when": 'event.code == "x"', "directive": "repair", "inputs": {"a": "1"}}],
                "git_checkpoint": "auto",
                "process": [
                    {
                        "name": "look",
                        "description": "Look around",
                        "action": """\
List {path} <![CDATA[x]]>
then stop\
""",
                        "verification": {"check": "all seen"},
                    },
                    {"name": "do", "description": "", "action": '<search query="a &amp; b" />'},
                    {
                        "name": "show",
                        "description": "",
                        "action": "Write",
                        "template": """\
```xml
<directive name="inner">a < b && c</directive>
```\
""",
                    },
                ],
                "outputs": {
                    "success": "done: true",
                    "fields": [{"name": "n", "type": "number", "description": "how many"}],
                },
                "success_criteria": ["tidy"],
                "extra": {"context_budget": {"_attrs": {"estimated_usage": "20%"}}, "wishes": {"wish": ["one", "two"]}},
            },
            "category": "house",
            "author": "someone",
            "tags": ["a", "b"],
        }
    )


@pytest.mark.req("K-DI-01")
def test_the_printed_checkpoint_directive_is_read() -> None:
    text = (Path(__file__).parents[1] / "data/seeds/001_git_checkpoint.md").read_text()
    read = read_directive(text, what="git_checkpoint.md")
    assert [as_object(each)["name"] for each in as_list(read["parameters"])] == ["operation", "caller_directive"]
    steps = [as_object(each) for each in as_list(as_object(read["config"])["process"])]
    assert [step["name"] for step in steps] == [
        "check_git_status",
        "show_diff",
        "generate_commit_message",
        "commit_or_abort",
    ]
    assert steps[0]["action"] == 'Run: git status --porcelain\nIf empty: Return early with "no_changes"'


@pytest.mark.req("K-DI-01")
def test_an_opaque_part_may_hold_another_directive() -> None:
    steps = as_list(config("<process><step><action>x</action><raw><directive></raw></step></process>")["process"])
    assert as_object(steps[0])["raw"] == "<directive>"


def test_prose_after_a_directive_may_mention_its_closing_tag() -> None:
    text = directive("<metadata />") + "\nEnd a directive with `</directive>`.\n"
    assert read_directive(text, what="d.md")["tool_id"] == "d"


def test_empty_permissions_grant_nothing_and_are_valid() -> None:
    assert config("<metadata><permissions /></metadata>")["permissions"] == []
    assert config("")["permissions"] == []


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        (
            '<limits turns="6" tokens="100" depth="2" duration_seconds="60" />',
            {"turns": 6, "tokens": 100, "depth": 2, "duration": 60},
        ),
        (
            "<cost><max_turns>4</max_turns><max_cost_usd>1.5</max_cost_usd></cost>",
            {"turns": 4, "spend": 1.5, "spend_currency": "USD"},
        ),
        (
            '<cost><context turns="6" spawn_threshold="3">4000</context><duration>300</duration></cost>',
            {"turns": 6, "spawns": 3, "tokens": 4000, "duration": 300},
        ),
        (
            "<cost><max_turns>4</max_turns><on_exceeded>Escalate</on_exceeded></cost>",
            {"turns": 4, "on_exceeded": "escalate"},
        ),
        ('<limits turns="4"><tool_calls>9</tool_calls></limits>', {"turns": 4, "tool_calls": 9}),
        ("<cost><duration>a while</duration></cost>", None),
    ],
)
def test_limits_of_every_spelling_are_normalised(written: str, limits: Json) -> None:
    assert config(f"<metadata>{written}</metadata>").get("limits") == limits


def test_every_content_issue_is_listed_with_its_line() -> None:
    inner = """<metadata><limits><turns>many</turns></limits>
<git_checkpoint mode="often" />
<hooks><hook /></hooks></metadata>
<inputs><input /></inputs>"""
    with pytest.raises(InvalidManifest) as caught:
        read_directive(directive(inner, head=""), what="d.md")
    assert [(issue.place, issue.line) for issue in caught.value.issues] == [
        ("name", 4), ("version", 4), ("inputs", 8), ("limits.turns", 5), ("hooks", 7), ("git_checkpoint", 6),
    ]  # fmt: skip


@pytest.mark.req("K-DI-01")
@pytest.mark.parametrize(
    ("inner", "line", "column", "hint"),
    [
        ("<process>\n  if a < b\n</process>", 6, None, "`&lt;`"),
        ("<process>\n  a && b\n</process>", 6, None, "`&amp;&amp;`"),
        ("<process>\n  Q&A\n</process>", 6, None, "`&amp;`"),
        ("<process>\n  x <- y\n</process>", 6, None, "arrow"),
        ("<process>\n  List<String> x\n</process>", 7, 3, "order it was opened"),
        ("<process>\n  <step>\n</process>", 7, 3, "order it was opened"),
        ("<process>\n  é é &nope; \n</process>", 6, 7, "`&amp;`"),
    ],
)
def test_invalid_xml_is_refused_with_line_column_and_a_hint(
    inner: str, line: int, column: int | None, hint: str
) -> None:
    with pytest.raises(InvalidManifest) as caught:
        read_directive(directive(inner), what="d.md")
    (issue,) = caught.value.issues
    assert issue.line == line
    assert f"line {line}, column {column or ''}" in issue.reason
    assert hint in issue.fix


@pytest.mark.case("BOMB-07")
@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE d [<!ENTITY a "aa"><!ENTITY b "&a;&a;"><!ENTITY c "&b;&b;">]>',
        '<!DOCTYPE d SYSTEM "http://127.0.0.1:9/x.dtd">',
        '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!doctype d [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]>',
    ],
)
def test_a_doctype_is_refused_and_nothing_is_fetched(doctype: str) -> None:
    for text in (
        f"```xml\n{doctype}\n{directive('&x;')[10:]}",
        directive(f"{doctype}&x;"),
        directive("&x;"),
        directive("&c;"),
    ):
        with pytest.raises(InvalidManifest):
            read_directive(text, what="d.md")


def test_prose_may_mention_a_doctype() -> None:
    assert read_directive(f"```html\n<!DOCTYPE html>\n```\n{directive('')}", what="d.md")["tool_id"] == "d"


@pytest.mark.slow
@pytest.mark.case("BOMB-07")
@pytest.mark.parametrize(
    "inner",
    [
        "<a>" * 65 + "</a>" * 65,
        "<a/>" * 20_001,
        "x" * 600_000,
        "<!--" * 100_000,
        "<raw>" * 90_000,
        "<template " * 40_000,
        "<a>" * 100_000,
    ],
    ids=["deep", "many", "long", "comments", "raws", "templates", "open"],
)
def test_an_entity_bomb_is_refused_at_once(inner: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidManifest):
        read_directive(directive(inner), what="d.md")
    assert time.process_time() - started < 4


def test_a_file_without_a_directive_is_reported() -> None:
    with pytest.raises(InvalidManifest, match="holds no <directive>"):
        read_directive("# Only prose", what="d.md")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<",
                ">",
                "&",
                "raw",
                "<raw>",
                "</raw>",
                "<!--",
                "-->",
                "<![CDATA[",
                "]]>",
                "</directive>",
                "é",
                "\ud800",
                "\0",
                "\n",
            ]
        )
    ).map("".join)
)
def test_any_text_gives_a_manifest_or_an_error(inner: str) -> None:
    with suppress(InvalidManifest):
        assert read_directive(directive(inner), what="d.md")["tool_id"] == "d"
