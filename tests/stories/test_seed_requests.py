"""The original tool API: every request is answered with the documented fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]

MY_TOOL = '''"""Say a text several times."""

__version__ = "1.0.0"
__tool_type__ = "python"
__executor_id__ = "python_runtime"
__category__ = "utility"


def main(input_text: str, count: int = 1, option_flag: bool = False) -> dict:
    return {"result": input_text * count}
'''
FAILING = MY_TOOL.replace("return", "raise ValueError('no such text') #")
FETCH = MY_TOOL.replace("Say a text several times.", "Make an http api request and give its data.")

_VOLATILE = (
    (r"\b[0-9a-f]{64}\b", "<hash>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "<time>"),
    (r"output_\d{8}_\d{6}(_\d+)?", "output_<time>"),
    (r"\b[0-9A-HJKMNP-TV-Z]{26}\b", "<run>"),
)


@pytest.fixture
def steady(project: Path, home: Path) -> Callable[[Answer], Json]:
    """An answer without what differs from run to run."""

    def normalised(answer: Answer) -> Json:
        text = json.dumps(answer.content, ensure_ascii=False)
        text = text.replace(str(project), "<project>").replace(str(home), "<home>")
        for pattern, word in _VOLATILE:
            text = re.sub(pattern, word, text)
        text = re.sub(r'("(?:execution_time_ms|score|size)": )[\d.]+', r"\1 0", text)
        text = re.sub(r'("properties": \[)"cpu_limit[^\]]*\]', r'\1"<what holds it here>"]', text)
        text = re.sub(r'("limited_by": )"\w+"', r'\1"<what limits it here>"', text)
        value: Json = json.loads(text)
        return value

    return normalised


Steady = Callable[[Answer], Json]


@pytest.fixture(autouse=True)
def tools(project: Path) -> Path:
    folder = project / ".ai" / "tools" / "utility"
    folder.mkdir(parents=True)
    for name, text in {"my_tool": MY_TOOL, "failing": FAILING, "fetch": FETCH}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def subset(answer: Mapping[str, Json], *names: str) -> JsonObject:
    return {name: answer[name] for name in names}


@pytest.mark.req("K-ME-01")
def test_search_answers_with_results_total_query_and_source(project: Path, ask: Ask, steady: Steady) -> None:
    answer = ask("search", item_type="tool", query="http api request", project_path=str(project))

    assert steady(answer) == snapshot(
        {
            "results": [
                {
                    "name": "fetch",
                    "description": "Make an http api request and give its data.",
                    "source": "project",
                    "path": "<project>/.ai/tools/utility/fetch.py",
                    "score": 0,
                    "tool_type": "script",
                    "identity": "project/local/fetch@1.0.0",
                    "why": ["api", "http", "request"],
                }
            ],
            "total": 1,
            "query": "http api request",
            "source": "local",
        }
    )


@pytest.mark.req("K-ME-01")
def test_search_sorts_by_date_and_respects_its_limit(project: Path, ask: Ask) -> None:
    request = {"item_type": "tool", "query": "text data", "limit": 1, "sort_by": "date", "project_path": str(project)}

    answer = ask("search", **request)

    assert len(as_list(answer.content["results"])) == 1
    assert answer.content["total"] == 3


@pytest.mark.req("K-ME-01")
def test_load_returns_the_text_and_the_metadata(project: Path, ask: Ask, steady: Steady) -> None:
    answer = ask("load", item_type="tool", item_id="my_tool", source="project", project_path=str(project))

    assert steady(answer) == snapshot(
        {
            "name": "my_tool",
            "path": "<project>/.ai/tools/utility/my_tool.py",
            "content": '''\
"""Say a text several times."""

__version__ = "1.0.0"
__tool_type__ = "python"
__executor_id__ = "python_runtime"
__category__ = "utility"


def main(input_text: str, count: int = 1, option_flag: bool = False) -> dict:
    return {"result": input_text * count}
''',
            "source": "project",
            "metadata": {
                "name": "my_tool",
                "description": "Say a text several times.",
                "version": "1.0.0",
                "tool_type": "python",
                "executor_id": "python_runtime",
                "category": "utility",
                "tags": [],
            },
            "parameters": {
                "type": "object",
                "properties": {
                    "input_text": {"type": "string"},
                    "count": {"type": "integer", "default": 1},
                    "option_flag": {"type": "boolean", "default": False},
                },
                "additionalProperties": False,
                "required": ["input_text"],
            },
            "identity": "project/local/my_tool@1.0.0",
            "digest": "<hash>",
            "integrity": "unsigned",
            "trust": "unsigned",
            "files": [{"path": "my_tool.py", "size": 0}],
            "chain": ["my_tool", "python_runtime", "subprocess"],
        }
    )


@pytest.mark.req("K-ME-01", "K-ME-04")
def test_load_with_a_destination_copies(project: Path, home: Path, ask: Ask, steady: Steady) -> None:
    answer = ask(
        "load",
        item_type="tool",
        item_id="my_tool",
        source="project",
        destination="user",
        project_path=str(project),
    )

    response = as_object(steady(answer))
    assert subset(response, "name", "path", "source", "destination", "message") == snapshot(
        {
            "name": "my_tool",
            "path": "<home>/.ai/tools/utility/my_tool.py",
            "source": "project",
            "destination": "user",
            "message": "Tool copied from project to user",
        }
    )
    assert response["content"] == MY_TOOL
    assert (home / ".ai" / "tools" / "utility" / "my_tool.py").read_text() == MY_TOOL


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-01", "K-RT-05")
def test_run_returns_the_result_the_time_and_the_output(project: Path, ask: Ask, steady: Steady) -> None:
    answer = ask(
        "execute",
        item_type="tool",
        action="run",
        item_id="my_tool",
        parameters={"input_text": "hello", "count": 3},
        project_path=str(project),
    )

    assert steady(answer) == snapshot(
        {
            "tool_id": "my_tool",
            "action": "run",
            "status": "success",
            "result": {"result": "hellohellohello"},
            "execution_time_ms": 0,
            "output_path": ".ai/outputs/tools/my_tool/output_<time>.json",
            "run_id": "<run>",
            "identity": "project/local/my_tool@1.0.0",
            "integrity": "unsigned",
            "isolation": {
                "asked": "trusted",
                "used": "restricted",
                "backend": "bubblewrap",
                "limited_by": "<what limits it here>",
                "properties": ["<what holds it here>"],
                "policy": "<hash>",
                "provenance": "unknown",
            },
        }
    )
    kept = json.loads((project / str(answer.content["output_path"])).read_text())
    assert kept["result"] == {"result": "hellohellohello"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-01", "K-ME-03")
def test_a_failing_run_is_reported(project: Path, ask: Ask, steady: Steady) -> None:
    answer = ask(
        "execute",
        item_type="tool",
        action="run",
        item_id="failing",
        parameters={"input_text": "hello"},
        project_path=str(project),
    )

    assert answer.is_error
    response = as_object(steady(answer))
    assert "ValueError: no such text" in str(response["logs"])
    assert {name: value for name, value in response.items() if name != "logs"} == snapshot(
        {
            "error": "Execution failed",
            "code": "execution_failed",
            "item_type": "tool",
            "message": "`failing` ended with exit code 1: ValueError: no such text",
            "suggestion": "The logs contain all its output. Fix the tool or the parameters, then run it again.",
            "tool_id": "failing",
            "action": "run",
            "status": "error",
            "result": None,
            "execution_time_ms": 0,
            "output_path": ".ai/outputs/tools/failing/output_<time>.json",
            "run_id": "<run>",
            "identity": "project/local/failing@1.0.0",
            "integrity": "unsigned",
            "isolation": {
                "asked": "trusted",
                "used": "restricted",
                "backend": "bubblewrap",
                "limited_by": "<what limits it here>",
                "properties": ["<what holds it here>"],
                "policy": "<hash>",
                "provenance": "unknown",
            },
            "exit_code": 1,
        }
    )


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-01", "K-SI-01")
def test_sign_returns_the_signature_and_the_hash(project: Path, tools: Path, ask: Ask, steady: Steady) -> None:
    answer = ask(
        "execute",
        item_type="tool",
        action="sign",
        item_id="my_tool",
        parameters={"location": "project", "category": "utility"},
        project_path=str(project),
    )

    assert steady(answer) == snapshot(
        {
            "tool_id": "my_tool",
            "action": "sign",
            "status": "signed",
            "message": "Tool signed successfully",
            "signature": "kiwi-mcp:validated:<time>:<hash>",
            "hash": "<hash>",
            "path": "<project>/.ai/tools/utility/my_tool.py",
        }
    )
    first, rest = (tools / "my_tool.py").read_text().split("\n", 1)
    assert first == f"# {answer.content['signature']}"
    assert rest == MY_TOOL


@pytest.mark.req("K-ME-01")
def test_help_returns_text_topic_and_examples(ask: Ask) -> None:
    answers = [ask("help"), ask("help", topic="tool"), ask("help", topic="execute")]

    assert [answer.content["topic"] for answer in answers] == ["overview", "tool", "execute"]
    assert all(str(answer.content["help"]).startswith("# ") for answer in answers)
    assert all(as_list(answer.content["examples"]) for answer in answers)


@pytest.mark.req("K-ME-03")
def test_an_unknown_tool_is_not_found(project: Path, ask: Ask, steady: Steady) -> None:
    answer = ask("execute", item_type="tool", action="run", item_id="my_tol", project_path=str(project))

    assert answer.is_error
    assert steady(answer) == snapshot(
        {
            "error": "Tool not found",
            "code": "tool_not_found",
            "item_type": "tool",
            "message": "No tool named 'my_tol' in the project, user, registry or built-in catalog, "
            "or on an MCP server.",
            "suggestion": "Did you mean `my_tool`? If not, search for it.",
            "tool_id": "my_tol",
            "action": "run",
        }
    )


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-03")
def test_a_file_modified_after_signing_is_a_content_hash_mismatch(
    project: Path, tools: Path, ask: Ask, steady: Steady
) -> None:
    ask("execute", action="sign", item_id="my_tool")
    path = tools / "my_tool.py"
    path.write_text(path.read_text().replace("* count", "* (count + 1)"))

    answer = ask("execute", action="run", item_id="my_tool", parameters={"input_text": "a"})

    assert steady(answer) == snapshot(
        {
            "error": "Content hash mismatch",
            "code": "content_hash_mismatch",
            "item_type": "tool",
            "message": "'my_tool' was changed after it was signed (<project>/.ai/tools/utility/my_tool.py).",
            "suggestion": "Look at what changed. If it is right, the owner signs again: `kiwi sign my_tool`.",
            "tool_id": "my_tool",
            "expected": "<hash>",
            "actual": "<hash>",
            "action": "run",
        }
    )


@pytest.mark.req("K-ME-03", "K-VA-02")
def test_a_file_without_its_metadata_has_invalid_metadata(tools: Path, ask: Ask, steady: Steady) -> None:
    (tools / "bare.py").write_text(MY_TOOL.replace('__version__ = "1.0.0"\n', ""))

    answer = ask("execute", item_type="tool", action="sign", item_id="bare")

    assert steady(answer) == snapshot(
        {
            "error": "Invalid metadata",
            "code": "invalid_manifest",
            "item_type": "tool",
            "message": "bare has 1 issue: version: is required.",
            "suggestion": "Fix each issue as its `fix` says, then validate again.",
            "issues": [{"place": "version", "reason": "is required", "fix": 'Add `version: "1.0.0"`.'}],
            "action": "sign",
        }
    )


@pytest.mark.req("K-ME-03")
async def test_a_project_request_without_a_project_asks_for_one(steady: Steady) -> None:
    answer = await Kernel().call("search", {"item_type": "tool", "query": "x", "source": "project"})

    assert steady(answer) == snapshot(
        {
            "error": "project_path is required",
            "code": "project_path_required",
            "item_type": "tool",
            "message": "The request does not say which project it is about.",
            "suggestion": 'Add `project_path: "/absolute/path"`.',
        }
    )
