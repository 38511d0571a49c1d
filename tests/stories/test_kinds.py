"""Tools of any kind are added as data and answer in the same form."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp import drivers
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Serve = Callable[..., tuple[str, list[JsonObject]]]

PARAMETERS: list[Json] = [{"name": "word", "type": "string", "required": True}]
ARGUMENTS: list[Json] = [{"name": "arguments", "type": "array", "items": {"type": "string"}, "required": True}]
GIT = (
    "import subprocess, sys\n\n\n"
    "def main(arguments):\n"
    "    done = subprocess.run(['git', *arguments], capture_output=True, text=True)\n"
    "    sys.stdout.write(done.stdout)\n"
    "    sys.stderr.write(done.stderr)\n"
    "    if done.returncode:\n"
    "        sys.exit(done.returncode)\n"
    "    return done.stdout\n"
)


def script(runtime: str, file: str, text: str) -> JsonObject:
    return {
        "tool_type": "script",
        "executor": runtime,
        "version": "1.0.0",
        "description": "Say a word",
        "config": {"entrypoint": file},
        "parameters": PARAMETERS,
        "files": {file: text},
    }


def api(url: str) -> JsonObject:
    return {
        "tool_type": "api",
        "executor": "http_client",
        "version": "1.0.0",
        "description": "Say a word",
        "config": {"method": "GET", "url_template": f"{url}/say?word={{word}}"},
        "parameters": PARAMETERS,
    }


DIRECTIVE = """# Say

```xml
<directive name="say_directive" version="1.0.0">
  <metadata><description>Say a word</description><model tier="fast" /><permissions /></metadata>
  <inputs><input name="word" type="string" required="true">The word</input></inputs>
  <process><step name="say"><action>Say it.</action></step></process>
</directive>
```
"""
KNOWLEDGE = "---\nid: say_knowledge\ntitle: Words\nversion: 1.0.0\nentry_type: reference\n---\nA word is a word.\n"


@pytest.fixture
def every_kind(ask: Ask, serve: Serve, sandbox: None) -> list[tuple[str, str, JsonObject]]:
    """One tool of every runnable kind, as the requests that create them."""
    url, _ = serve(lambda _: (200, {"content-type": "application/json"}, b'{"word": "kiwi"}'))
    return [
        ("tool", "say_python", script("python_runtime", "main.py", "def main(word):\n    return {'word': word}\n")),
        ("tool", "say_node", script("node_runtime", "main.mjs", "export const main = ({ word }) => ({ word });\n")),
        ("tool", "say_bash", script("bash_runtime", "main.sh", 'printf \'{"word": "%s"}\' "$KIWI_PARAM_word"\n')),
        ("tool", "say_api", api(url)),
        ("directive", "say_directive", {"content": DIRECTIVE}),
        ("knowledge", "say_knowledge", {"content": KNOWLEDGE}),
    ]


def component_sources() -> str:
    """One hash over all of Kiwi's own code."""
    package = Path(kiwi_mcp.__file__).parent
    files = sorted(package.rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def called(ask: Ask, item_type: str, name: str) -> Answer:
    parameters = {} if item_type == "knowledge" else {"word": "kiwi"}
    return ask("execute", item_type=item_type, action="run", item_id=name, parameters=parameters)


@pytest.mark.smoke
@pytest.mark.req("A4")
def test_one_tool_of_every_kind_answers_in_the_same_envelope(
    every_kind: list[tuple[str, str, JsonObject]], project: Path, ask: Ask
) -> None:
    shapes, records = set(), set()
    for item_type, name, words in every_kind:
        ask("execute", item_type=item_type, action="create", item_id=name, parameters=words)
        response = called(ask, item_type, name).content
        assert response.get("status") in {"success", "ready"}, response
        shapes.add(tuple(key for key in response if key not in {"http_status", "logs", "isolation"}))
        records.add(tuple(json.loads((project / str(response["output_path"])).read_text())))

    assert shapes == {
        ("tool_id", "action", "status", "result", "execution_time_ms", "output_path", "run_id", "identity", "integrity")
    }
    assert len(records) == 1


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("A4", "F7")
def test_a_failure_of_every_kind_is_an_answer_of_one_shape(ask: Ask, serve: Serve) -> None:
    url, _ = serve(lambda _: (500, {"content-type": "text/plain"}, b"no"))
    failing = {
        "say_python": script("python_runtime", "main.py", "def main(word):\n    raise ValueError(word)\n"),
        "say_node": script("node_runtime", "main.mjs", "export const main = () => { throw new Error('no'); };\n"),
        "say_bash": script("bash_runtime", "main.sh", "exit 3\n"),
        "say_api": api(url),
    }
    for name, words in failing.items():
        ask("execute", action="create", item_id=name, parameters=words)
        answer = called(ask, "tool", name)
        assert answer.is_error
        assert (answer.content["error"], answer.content["code"]) == ("Execution failed", "execution_failed")
        assert list(answer.content)[:5] == ["error", "code", "item_type", "message", "suggestion"]

    assert ask("search", query="say").content["total"] == 4


@pytest.mark.req("A9")
def test_new_types_need_no_code_change(every_kind: list[tuple[str, str, JsonObject]], ask: Ask) -> None:
    before = component_sources()

    for item_type, name, words in every_kind:
        created = ask("execute", item_type=item_type, action="create", item_id=name, parameters=words)
        assert created.content["status"] == "created", created.content
        assert not called(ask, item_type, name).is_error

    assert component_sources() == before


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("A5")
def test_a_copied_tool_folder_works_at_once_and_a_deleted_one_is_gone_at_once(
    ask: Ask, project: Path, tmp_path: Path
) -> None:
    made = tmp_path / "say"
    made.mkdir()
    (made / "tool.yaml").write_text(
        "tool_id: say\ntool_type: script\nexecutor: python_runtime\nversion: 1.0.0\n"
        "description: Say a word\nconfig: {entrypoint: main.py}\n"
        "parameters: [{name: word, type: string, required: true}]\n"
    )
    (made / "main.py").write_text("def main(word):\n    return word\n")
    home = project / ".ai" / "tools" / "speech" / "say"

    for _ in range(2):
        assert called(ask, "tool", "say").content["code"] == "tool_not_found"
        assert ask("search", query="say").content["total"] == 0
        shutil.copytree(made, home)
        assert called(ask, "tool", "say").content["result"] == "kiwi"
        assert ask("search", query="say").content["total"] == 1
        (home / "main.py").write_text("def main(word):\n    return word * 2\n")
        assert called(ask, "tool", "say").content["result"] == "kiwikiwi"
        shutil.rmtree(home)


@pytest.mark.req("A10")
def test_equal_inputs_behave_equally_after_a_restart(
    every_kind: list[tuple[str, str, JsonObject]], project: Path, ask: Ask
) -> None:
    first: dict[str, Json] = {}
    for item_type, name, words in every_kind:
        ask("execute", item_type=item_type, action="create", item_id=name, parameters=words)
        first[name] = called(ask, item_type, name).content["result"]

    async def restarted(verb: str, request: JsonObject) -> Answer:
        kernel = Kernel(project)
        try:
            return await kernel.call(verb, request)
        finally:
            await kernel.aclose()

    def again(verb: str, **request: Json) -> Answer:
        return asyncio.run(restarted(verb, request))

    for item_type, name, _ in every_kind:
        assert called(again, item_type, name).content["result"] == first[name]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("G4")
def test_a_wrapped_git_gets_its_arguments_and_returns_its_streams(ask: Ask, project: Path) -> None:
    words = {**script("python_runtime", "main.py", GIT), "parameters": ARGUMENTS}
    ask("execute", action="create", item_id="git", parameters=words)
    # A sandbox that may write to the project keeps what git itself obeys as it is.
    ask("relax", action="apply", item_id="git", to="trusted")
    git = partial(ask, "execute", item_id="git")

    assert not git(parameters={"arguments": ["init", "--quiet", "."]}).is_error
    assert git(parameters={"arguments": ["status", "--porcelain"]}).content["result"] == "?? .ai/\n"
    (project / "a b;c").write_text("x")
    assert not git(parameters={"arguments": ["add", "a b;c"]}).is_error
    listed = subprocess.run(["git", "ls-files"], cwd=project, capture_output=True, text=True, check=True)
    assert listed.stdout == "a b;c\n"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("G4")
def test_an_exit_code_of_a_wrapped_git_is_an_error_with_both_streams_bounded(ask: Ask) -> None:
    noisy = GIT.replace(
        "    if done", "    sys.stdout.write('o' * 3_000_000)\n    sys.stderr.write('e' * 3_000_000)\n    if done"
    )
    words = {**script("python_runtime", "main.py", noisy), "parameters": ARGUMENTS}
    ask("execute", action="create", item_id="git", parameters=words)

    answer = ask("execute", item_id="git", parameters={"arguments": ["lost-command"]})

    logs = as_object(answer.content["logs"])
    assert answer.is_error
    assert answer.content["exit_code"] == 1
    assert "lost-command" in str(logs["stderr"])
    assert logs["truncated"] is True
    assert len(str(logs["stdout"])) <= 1_000_100
    assert len(str(logs["stderr"])) <= 1_000_100
    assert int(str(logs["stdout_bytes"])) == 3_000_000


DRIVER = """
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec


class Reverse:
    async def check(self, chain, space):
        return ()

    async def aclose(self):
        pass

    def bind(self, chain, inputs, space):
        tool = chain.tool
        spec = ReadSpec(path=tool.origin.path.name, sha256=tool.digest)
        return Plan(tool.identity, tool.digest, "reverse", ((tool.identity, tool.digest),), spec, inputs)

    async def prepare(self, plan, chain, space):
        pass

    async def drive(self, plan, chain, space, *, secrets, caller, dispatch):
        return Outcome("success", result=plan.inputs["word"][::-1])


create_driver = Reverse
"""
SHEET = """
type: reversal
description: Turns a word around
driver: reverse
needs_executor: required
executor_types: [primitive]
files: optional
config: {type: object, additionalProperties: false, properties: {}}
"""


TURN = """
tool_id: turn
tool_type: reversal
executor: subprocess
version: 1.0.0
description: Turn a word around
parameters: [{name: word, type: string, required: true}]
"""


@pytest.fixture
def another_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "drivers"
    folder.mkdir()
    (folder / "reverse.py").write_text(DRIVER)
    monkeypatch.setattr(drivers, "__path__", [*drivers.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "kiwi_mcp.drivers.reverse", raising=False)


@pytest.mark.req("G3")
@pytest.mark.usefixtures("another_driver")
def test_a_new_mechanism_is_one_module_and_a_type_spec(ask: Ask, project: Path) -> None:
    for name, text in {"types/reversal.yaml": SHEET, "tools/turn.yaml": TURN}.items():
        path = project / ".ai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    answer = ask("execute", item_id="turn", parameters={"word": "kiwi"})

    assert answer.content.get("result") == "iwik", answer.content


@pytest.mark.parametrize("word", ["port", "__init__", "lost", "process.bind"])
def test_a_type_spec_without_a_driver_makes_items_that_cannot_run(word: str, ask: Ask, project: Path) -> None:
    for name, text in {"types/reversal.yaml": SHEET.replace("reverse", word), "tools/turn.yaml": TURN}.items():
        path = project / ".ai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    refused = ask("execute", item_id="turn", parameters={"word": "kiwi"}).content

    assert refused["code"] in {"driver_missing", "chain_mistyped"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-TY-05")
def test_a_new_type_is_a_type_spec_of_data(ask: Ask, project: Path) -> None:
    sheet = """
type: recipe
description: A shell file with words of its own
driver: process
needs_executor: required
executor_types: [runtime]
files: required
config:
  type: object
  additionalProperties: false
  required: [entrypoint, serves]
  properties:
    entrypoint: {type: string, format: path}
    serves: {type: integer, minimum: 1}
"""
    (project / ".ai" / "types").mkdir()
    (project / ".ai" / "types" / "recipe.yaml").write_text(sheet)
    words: Mapping[str, Json] = {
        **script("bash_runtime", "main.sh", 'echo "soup with $KIWI_PARAM_word"\n'),
        "tool_type": "recipe",
    }

    refused = ask("execute", action="create", item_id="soup", parameters=words)
    created = ask(
        "execute",
        action="create",
        item_id="soup",
        parameters={**words, "config": {"entrypoint": "main.sh", "serves": 4}},
    )

    assert refused.content["code"] == "invalid_manifest"
    assert "serves" in str(refused.content["message"])
    assert created.content["status"] == "created"
    assert called(ask, "tool", "soup").content["result"] == "soup with kiwi"
