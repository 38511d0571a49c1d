"""Placements and spellings of a tool, and that reading it runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]

MANIFEST = """tool_id: say
tool_type: script
version: "1.0.0"
executor: python_runtime
description: Say a word
parameters:
  - {name: word, type: string, required: true}
"""
CODE = "def main(word: str):\n    return {'word': word}\n"
DUNDERS = (
    '"""Say a word"""\n\n__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n'
    '__category__ = ""\n\n\n'
)
PLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "a folder": {"tools/say/tool.yaml": f"{MANIFEST}config: {{entrypoint: main.py}}\n", "tools/say/main.py": CODE},
    "a docstring": {"tools/say.py": f'"""\n{MANIFEST}"""\n\n\n{CODE}'},
    "dunders": {"tools/say.py": DUNDERS + CODE},
    "an old script": {"scripts/say.py": DUNDERS + CODE},
}


def put(project: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = project / ".ai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-02", "K-TY-07")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tool_works_the_same_in_every_placement(placement: str, project: Path, ask: Ask) -> None:
    put(project, PLACEMENTS[placement])

    found = ask("search", query="say a word").content
    loaded = ask("load", item_id="say").content
    checked = ask("execute", action="validate", item_id="say").content
    ran = ask("execute", item_id="say", parameters={"word": "kiwi"}).content
    missing = ask("execute", item_id="say", parameters={}).content

    assert found["total"] == 1
    assert as_object(loaded["metadata"])["description"] == "Say a word"
    assert loaded["parameters"] == {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
        "additionalProperties": False,
    }
    assert checked["status"] == "valid"
    assert ran["result"] == {"word": "kiwi"}
    assert missing["code"] == "invalid_input"


@pytest.mark.req("K-TY-02")
def test_a_single_yaml_file_is_a_whole_tool(project: Path, ask: Ask) -> None:
    text = MANIFEST.replace("script", "api").replace("python_runtime", "http_client")
    put(project, {"tools/say.yaml": f"{text}config: {{method: GET, url: 'https://words.example.com/{{word}}'}}\n"})

    assert ask("execute", action="validate", item_id="say").content["status"] == "valid"
    planned = ask("execute", item_id="say", parameters={"word": "a b"}, dry_run=True).content
    assert as_object(as_object(planned["plan"])["spec"])["url"] == "https://words.example.com/a%20b"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-03")
def test_a_tool_of_several_files_imports_them_and_all_count_in_its_digest(project: Path, ask: Ask) -> None:
    put(project, PLACEMENTS["a folder"])
    put(project, {"tools/say/lib/loud.py": "def loud(word):\n    return word.upper()\n"})
    put(project, {"tools/say/main.py": "from lib.loud import loud\n\n\ndef main(word):\n    return loud(word)\n"})
    first = ask("load", item_id="say").content

    ran = ask("execute", item_id="say", parameters={"word": "kiwi"}).content
    put(project, {"tools/say/lib/loud.py": "def loud(word):\n    return word.title()\n"})
    second = ask("load", item_id="say").content

    assert ran["result"] == "KIWI"
    assert [as_object(file)["path"] for file in files(first)] == ["lib/loud.py", "main.py", "tool.yaml"]
    assert first["digest"] != second["digest"]
    assert ask("execute", item_id="say", parameters={"word": "kiwi"}).content["result"] == "Kiwi"


def files(loaded: Mapping[str, Json]) -> list[Json]:
    listed = loaded["files"]
    assert isinstance(listed, list)
    return listed


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-04")
@pytest.mark.case("BOMB-12")
def test_metadata_is_read_and_never_executed(project: Path, ask: Ask) -> None:
    canary = project / "canary"
    act = f"open({str(canary)!r}, 'w').close()\n"
    computed = DUNDERS.replace('"1.0.0"', "str(open('/dev/null'))")
    put(project, {"tools/say.py": DUNDERS + act + CODE, "tools/computed.py": computed + act + CODE})

    for action in ("validate", "sign", "why"):
        ask("execute", action=action, item_id="say")
        ask("execute", action=action, item_id="computed")
    ask("search", query="say")
    ask("load", item_id="say")
    ask("load", item_id="say", destination="user")
    ask("doctor")
    assert not canary.exists()

    ask("relax", action="apply", item_id="say", to="trusted")
    ask("execute", item_id="say", parameters={"word": "kiwi"})
    assert canary.exists()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-07")
def test_shared_code_of_a_legacy_project_is_imported(project: Path, ask: Ask) -> None:
    text = (
        "tool_id: say\ntool_type: python\nversion: '1.0.0'\ndescription: Say a word\n"
        "executor: {type: python, entrypoint: main.py, lib_imports: [loud]}\n"
        "parameters: [{name: word, type: string, required: true}]\n"
    )
    put(
        project,
        {
            "tools/say/tool.yaml": text,
            "tools/say/main.py": "from lib.loud import loud\n\n\ndef main(word):\n    return loud(word)\n",
            "tools/lib/loud.py": "def loud(word):\n    return word.upper()\n",
        },
    )

    ran = ask("execute", item_id="say", parameters={"word": "kiwi"}).content
    copied = ask("load", item_id="say", destination="user").content

    assert ran.get("result") == "KIWI", ran
    assert copied["destination"] == "user"
    elsewhere = ask("execute", item_id="user/local/say@1.0.0", parameters={"word": "kiwi"}).content
    assert elsewhere["result"] == "KIWI"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-02")
@pytest.mark.parametrize(
    "code",
    [
        "def main(word):\n    print('noise')\n    return word\n",
        "import asyncio\n\n\nasync def main(word):\n    print('noise')\n    await asyncio.sleep(0)\n    return word\n",
        "def run(word):\n    print('noise')\n    return word\n",
        "def execute(params, project_path):\n    print('noise')\n    return params['word']\n",
    ],
    ids=["main", "async main", "run", "execute"],
)
def test_prints_of_a_python_tool_are_logs_and_never_the_result(code: str, project: Path, ask: Ask) -> None:
    put(project, {**PLACEMENTS["a folder"], "tools/say/main.py": code})

    ran = ask("execute", item_id="say", parameters={"word": "kiwi"}).content

    assert ran["result"] == "kiwi"
    assert as_object(ran["logs"])["stdout"] == "noise\n"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-02")
def test_a_plain_script_reads_flags_and_prints_its_result(project: Path, ask: Ask) -> None:
    code = "import json, sys\n\nprint(json.dumps(sys.argv[1:]))\n"
    put(project, {**PLACEMENTS["a folder"], "tools/say/main.py": code})

    assert ask("execute", item_id="say", parameters={"word": "kiwi"}).content["result"] == ["--word=kiwi"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-04")
def test_every_value_arrives_as_it_was_sent(project: Path, ask: Ask) -> None:
    manifest = (
        "tool_id: say\ntool_type: script\nversion: 1.0.0\nexecutor: python_runtime\ndescription: Echo\n"
        "config: {entrypoint: main.py}\nparameters: {type: object, additionalProperties: true}\n"
    )
    put(project, {"tools/say/tool.yaml": manifest, "tools/say/main.py": "def main(**given):\n    return given\n"})
    values = {
        "no": False, "nothing": None, "empty": "", "zero": 0, "text": "žluťoučký 🥝", "flag": "--help", "PATH": "mine",
        "HOME": "${HOME}", "template": "{word} $(id) `id`", "deep": {"a": [1, 2.5, {"b": None}]},
    }  # fmt: skip

    assert ask("execute", item_id="say", parameters=values).content["result"] == values
