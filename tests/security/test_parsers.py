"""Malicious manifests: refused quickly, with every other item still found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import process_time

import pytest
import ruamel.yaml
import yaml
from yaml.events import Event

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]

HEAD = "tool_id: bad\ntool_type: api\nexecutor: http_client\nconfig: {method: GET, url: 'https://a.example.com/'}\n"
GOOD = f"{HEAD.replace('bad', 'good')}version: 1.0.0\ndescription: A good tool\n"
LEVELS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGES = "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10))
BOMBS: Mapping[str, str] = {
    "aliases": f"{HEAD}version: 1.0.0\nl0: &l0 [x]\n{LEVELS}",
    "merge keys": f"{HEAD}version: 1.0.0\nm0: &m0 {{a: 1}}\n{MERGES}",
    "nesting": f"{HEAD}version: 1.0.0\nextra: {'[' * 5_000}{']' * 5_000}\n",
    "size": f"{HEAD}version: 1.0.0\ndescription: {'x' * 10_000_000}\n",
    "a long list": f"{HEAD}version: 1.0.0\ntags: [{'a, ' * 100_000}b]\n",
    "objects": f"{HEAD}version: !!python/object/apply:os.system ['touch canary']\n",
    "duplicate keys": f"{HEAD}version: 1.0.0\nversion: 2.0.0\n",
    "an open quote": f'{HEAD}version: "1.0\n',
    "control characters": f"{HEAD}version: 1.0.0\ndescription: a\x01b\n",
}
MARKS = [
    pytest.param("aliases", marks=pytest.mark.case("BOMB-01")),
    pytest.param("merge keys", marks=pytest.mark.case("BOMB-01")),
    pytest.param("nesting", marks=pytest.mark.case("BOMB-02")),
    pytest.param("size", marks=pytest.mark.case("BOMB-03")),
    pytest.param("a long list", marks=pytest.mark.case("BOMB-03")),
    pytest.param("objects", marks=pytest.mark.case("BOMB-04")),
    pytest.param("duplicate keys", marks=pytest.mark.case("BOMB-05")),
    "an open quote",
    "control characters",
]


def put(project: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = project / ".ai" / "tools" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("bomb", MARKS)
def test_a_malicious_manifest_is_refused_quickly_by_every_verb(bomb: str, project: Path, ask: Ask) -> None:
    put(project, {"good.yaml": GOOD, "bad.yaml": BOMBS[bomb]})
    started = process_time()

    found = ask("search", query="good tool")
    loaded = ask("load", item_id="bad")
    ran = ask("execute", item_id="bad")
    created = ask("execute", action="create", item_id="worse", parameters={"content": BOMBS[bomb]})

    assert process_time() - started < 6
    assert as_object(as_list(found.content["results"])[0])["name"] == "good"
    assert "bad.yaml" in str(found.content["broken"])
    for answer in (loaded, ran, created):
        assert answer.is_error
        assert answer.content["code"] in {"invalid_manifest", "too_large"}, answer.content
        assert answer.content["suggestion"]
        assert len(json.dumps(answer.content)) < 10_000
    assert not (project / ".ai" / "tools" / "worse.yaml").exists()
    assert not list(project.rglob("canary"))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each long text that the YAML parser was given: the events it made, and how far into the text it was."""
    counts: list[tuple[int, int]] = []
    parse = yaml.parse

    def counted(text: str, Loader: type) -> Iterator[Event]:  # noqa: N803 - PyYAML's
        made, at = 0, 0
        try:
            for event in parse(text, Loader=Loader):
                made, at = made + 1, event.end_mark.index
                yield event
        finally:
            if len(text) >= 20_000:
                counts.append((made, at))

    monkeypatch.setattr(yaml, "parse", counted)
    return counts


@pytest.mark.case("TR-F02")
@pytest.mark.parametrize("brackets", ["[" * 20_000, "{" * 20_000, "[{" * 10_000, "[\n" * 20_000, "[ {a: " * 10_000])
@pytest.mark.parametrize(
    ("name", "lead"), [("bad.yaml", ""), ("bad.yaml", f"{HEAD}extra: "), ("bad.sh", "# tool_id: bad\n# extra: ")]
)
def test_nested_brackets_stop_the_parser_at_the_depth_limit(
    brackets: str, name: str, lead: str, project: Path, ask: Ask, parsed: list[tuple[int, int]]
) -> None:
    text = f"{lead}{brackets}"
    text = text.replace("\n", "\n# ").replace("# # ", "# ") if name.endswith(".sh") else text
    put(project, {"good.yaml": GOOD, name: text})

    found = ask("search", query="good tool").content
    planned = ask("execute", item_id="good", dry_run=True).content
    refused = ask("execute", item_id="bad").content
    created = ask("execute", action="create", item_id="w", parameters={"content": text, "filename": f"w{name}"}).content

    assert as_object(as_list(found["results"])[0])["name"] == "good"
    assert name in str(found["broken"])
    assert planned["status"] == "planned"
    assert (refused["code"], created["code"]) == ("invalid_manifest", "invalid_manifest")
    # libyaml takes time in proportion to the number of open brackets for each character that it reads.
    assert parsed
    assert max(made for made, _ in parsed) < 500
    assert max(at for _, at in parsed) < 5_000


@pytest.mark.case("TR-F03")
@pytest.mark.parametrize(
    "words",
    [
        {"manifest": {"parameters": [{"name": f"p{n}", "type": "string"} for n in range(50_000)]}},
        {"manifest": {"parameters": {"type": "object", "properties": {f"p{n}": {} for n in range(50_000)}}}},
        {"parameters": [{"name": f"p{n}"} for n in range(10_000)]},
        {"manifest": {"description": "word " * 60_000}},
        {"manifest": {"extra": {f"{n}{'x' * 100}": n for n in range(3_000)}}},
        {"manifest": {"extra": json.loads("[" * 200 + "]" * 200)}},
    ],
    ids=["parameters", "a schema", "beside the manifest", "text", "keys", "depth"],
)
@pytest.mark.parametrize("action", ["create", "update", "validate"])
def test_an_oversized_manifest_is_refused_before_it_is_written_as_yaml(
    action: str, words: JsonObject, project: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(project, {"good.yaml": GOOD})
    dumped: list[object] = []
    monkeypatch.setattr(yaml, "dump", lambda *_, **__: dumped.append(1))
    monkeypatch.setattr(ruamel.yaml.YAML, "dump", lambda *_, **__: dumped.append(1))

    item_id = "good" if action == "update" else "odd"
    refused = ask("execute", action=action, item_id=item_id, parameters={"tool_type": "api", **words}).content

    assert refused["code"] in {"too_large", "invalid_manifest"}
    assert refused["suggestion"]
    assert dumped == []
    assert sorted(path.name for path in (project / ".ai" / "tools").rglob("*")) == ["good.yaml"]


@pytest.mark.case("TR-F03")
def test_a_manifest_is_written_as_yaml_on_another_thread_than_the_event_loop(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    dump = yaml.dump

    def watched(*args: object, **words: object) -> object:
        threads.append(threading.get_ident())
        return dump(*args, **words)  # type: ignore[call-overload]  # passed on as it came

    monkeypatch.setattr(yaml, "dump", watched)
    config = {"method": "GET", "url": "https://a.example.com/"}
    manifest = {"tool_type": "api", "executor": "http_client", "version": "1.0.0", "description": "x", "config": config}

    assert ask("execute", action="create", item_id="good", parameters={"manifest": manifest}).content["tool_id"]
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.case("BOMB-02")
def test_deeply_nested_json_is_refused(project: Path, ask: Ask) -> None:
    put(project, {"bad/tool.json": f'{{"tool_id": "bad", "extra": {"[" * 100_000}{"]" * 100_000}}}'})

    assert ask("load", item_id="bad").content["code"] in {"invalid_manifest", "too_large", "tool_not_found"}
    assert ask("search", query="bad").content["total"] == 0


@pytest.mark.case("BOMB-06")
@pytest.mark.parametrize(
    ("written", "version"),
    [("1.10.0", "1.10.0"), *((odd, None) for odd in ("1.10", "no", "1:30", "2026-01-01", "0x10"))],
)
def test_a_version_is_never_silently_converted(written: str, version: str | None, project: Path, ask: Ask) -> None:
    put(project, {"bad.yaml": f"{HEAD}version: {written}\n"})

    checked = ask("execute", action="validate", item_id="bad").content
    loaded = ask("load", item_id="bad").content

    if version is None:
        assert checked["status"] == "invalid"
        assert as_object(loaded["metadata"])["version"] == written
    else:
        assert checked["status"] == "valid"
        assert as_object(loaded["metadata"])["version"] == version


@pytest.mark.case("BOMB-10")
def test_one_broken_manifest_among_thousands_hides_no_other(project: Path, ask: Ask) -> None:
    put(project, {f"t{n % 20}/good_{n}.yaml": GOOD.replace("good", f"good_{n}") for n in range(2_000)})
    put(project, {"t1/broken.yaml": "tool_id: [\n"})

    found = ask("search", query="good tool", limit=100).content

    assert found["total"] == 2_000
    assert len(as_list(found["broken"])) == 1


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("INJ-08")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}},
        {"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10_000)}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(" * 500}}},
    ],
    ids=["remote", "file", "recursive", "10,000 properties", "bad pattern"],
)
def test_a_schema_is_never_fetched_and_never_endless(schema: JsonObject, ask: Ask) -> None:
    words = {
        "tool_type": "script",
        "executor": "bash_runtime",
        "version": "1.0.0",
        "description": "x",
        "config": {"entrypoint": "main.sh"},
        "parameters": schema,
        "files": {"main.sh": "echo hello\n"},
    }
    started = process_time()

    created = ask("execute", action="create", item_id="odd", parameters=words)
    ran = ask("execute", item_id="odd", parameters={"a": "x"})

    assert process_time() - started < 4
    assert created.content.get("code", "") != "internal"
    assert created.is_error or not ran.is_error or ran.content["code"] == "invalid_input"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("INJ-08")
def test_a_backtracking_pattern_costs_no_time(ask: Ask) -> None:
    words = {
        "tool_type": "script",
        "executor": "bash_runtime",
        "version": "1.0.0",
        "description": "x",
        "config": {"entrypoint": "main.sh"},
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}},
        "files": {"main.sh": "echo hello\n"},
    }
    ask("execute", action="create", item_id="odd", parameters=words)
    started = process_time()

    refused = ask("execute", item_id="odd", parameters={"a": "a" * 5_000 + "!"})

    assert refused.content["code"] == "invalid_input"
    assert process_time() - started < 3


@pytest.mark.case("INJ-12")
@pytest.mark.parametrize(
    "package",
    ["--index-url http://e.test/", "x @ file:///etc", "-r other.txt", "git+ssh://e.test/x", "x; rm -rf /", "-e ."],
)
def test_a_package_name_is_never_an_option(package: str, ask: Ask, project: Path) -> None:
    words = {
        "tool_type": "script",
        "executor": "python_runtime",
        "version": "1.0.0",
        "description": "x",
        "config": {"entrypoint": "main.py", "requires": [package]},
        "files": {"main.py": "def main():\n    return 1\n"},
    }

    refused = ask("execute", action="create", item_id="odd", parameters=words)

    assert refused.content["code"] == "invalid_manifest"
    assert "config.requires[0]" in str(refused.content["message"])
    assert not (project / ".ai" / "tools").exists()


@pytest.mark.case("BOMB-07")
@pytest.mark.parametrize(
    "prolog",
    [
        '<!DOCTYPE d [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;">]>',
        '<!DOCTYPE d SYSTEM "http://127.0.0.1:9/d.dtd">',
        '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
    ],
    ids=["entities", "outside", "file"],
)
def test_a_directive_has_no_entities_and_no_external_documents(prolog: str, ask: Ask, project: Path) -> None:
    text = (
        f'# X\n\n```xml\n<directive name="odd" version="1.0.0">{prolog}<metadata><description>&x;&b;</description>'
        '<model tier="fast"/><permissions/></metadata>'
        '<process><step name="a"><action>x</action></step></process></directive>\n```\n'
    )

    refused = ask("execute", item_type="directive", action="create", item_id="odd", parameters={"content": text})

    assert refused.content["code"] == "invalid_manifest"
    assert "root:" not in json.dumps(refused.content)
    assert not (project / ".ai" / "directives").exists()
