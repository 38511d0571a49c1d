"""The original tool API: its examples, sent by the official client to a real server.

Over stdio and over HTTP, by a client of each era.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CallToolResult

import kiwi_mcp

pytestmark = pytest.mark.req("K-ME-01", "K-ME-03")

MYPROJECT = "/home/user/myproject"
"""The project that the examples name."""
PATIENCE = 120.0

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "search": (
        "search",
        '{"item_type": "tool", "query": "http api request", "project_path": "/home/user/myproject"}',
    ),
    "search by date": (
        "search",
        '{"item_type": "tool", "query": "data processing", "limit": 5, "sort_by": "date", '
        '"project_path": "/home/user/myproject"}',
    ),
    "load": (
        "load",
        '{"item_type": "tool", "item_id": "my_tool", "source": "project", "project_path": "/home/user/myproject"}',
    ),
    "load and copy": (
        "load",
        '{"item_type": "tool", "item_id": "my_tool", "source": "project", "destination": "user", '
        '"project_path": "/home/user/myproject"}',
    ),
    "run": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "my_tool", '
        '"parameters": {"input_text": "hello", "option_flag": true}, "project_path": "/home/user/myproject"}',
    ),
    "run with a count": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "my_tool", '
        '"parameters": {"input_text": "hello", "count": 3}, "project_path": "/home/user/myproject"}',
    ),
    "run without parameters": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "greeting", "parameters": {}, '
        '"project_path": "/home/user/myproject"}',
    ),
    "run with parameters": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "text_processor", '
        '"parameters": {"text": "hello world", "transform": "uppercase"}, "project_path": "/home/user/myproject"}',
    ),
    "sign": (
        "execute",
        '{"item_type": "tool", "action": "sign", "item_id": "my_tool", "parameters": {"location": "project"}, '
        '"project_path": "/home/user/myproject"}',
    ),
    "sign in a category": (
        "execute",
        '{"item_type": "tool", "action": "sign", "item_id": "my_tool", '
        '"parameters": {"location": "project", "category": "my_category"}, "project_path": "/home/user/myproject"}',
    ),
    "help": ("help", "{}"),
    "help on tools": ("help", '{"topic": "tool"}'),
    "help on execute": ("help", '{"topic": "execute"}'),
}
ERRORS: Mapping[str, tuple[str, str]] = {
    "Tool not found": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "no_tool", "project_path": "/home/user/myproject"}',
    ),
    "Content hash mismatch": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "my_tool", "parameters": {"input_text": "hello"}, '
        '"project_path": "/home/user/myproject"}',
    ),
    "Invalid metadata": (
        "execute",
        '{"item_type": "tool", "action": "sign", "item_id": "unversioned", "project_path": "/home/user/myproject"}',
    ),
    "Execution failed": (
        "execute",
        '{"item_type": "tool", "action": "run", "item_id": "failing", "project_path": "/home/user/myproject"}',
    ),
    "project_path is required": ("search", '{"item_type": "tool", "query": "http", "source": "project"}'),
}

HEAD = (
    '"""{what}"""\n\n__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n'
    '__category__ = "my_category"\n\n\n'
)
MY_TOOL = HEAD.format(what="Say a text several times.") + (
    "def main(input_text: str, count: int = 1, option_flag: bool = False) -> dict:\n"
    '    return {"result": input_text * count}\n'
)
TOOLS: Mapping[str, str] = {
    "my_tool": MY_TOOL,
    "greeting": HEAD.format(what="Greet.") + 'def main() -> dict:\n    return {"greeting": "hello"}\n',
    "text_processor": HEAD.format(what="Transform a text: data processing.")
    + 'def main(text: str, transform: str) -> dict:\n    return {"text": text.upper()}\n',
    "http_fetch": HEAD.format(what="Make an http api request.") + "def main(url: str) -> dict:\n    return {}\n",
    "failing": HEAD.format(what="Fail.") + "def main() -> dict:\n    raise ValueError('no such text')\n",
    "unversioned": MY_TOOL.replace('__version__ = "1.0.0"\n', ""),
}


class SeedSession:
    """The answers of one conversation, by the name of the example; and the folders that it was about."""

    def __init__(self, root: Path) -> None:
        self.project, self.home = root / "myproject", root / "home"
        self.tools = self.project / ".ai" / "tools" / "my_category"
        self.results: dict[str, CallToolResult] = {}

    def answer(self, name: str, *, is_error: bool = False) -> dict[str, Any]:
        """Return the structured content of an answer, once it is or is not an error as expected."""
        result = self.results[name]
        assert (result.is_error or False) is is_error, result
        assert result.structured_content is not None
        return dict(result.structured_content)


LEGACY, MODERN = "2025-11-25", "2026-07-28"
CONVERSATIONS = [
    ("stdio", MODERN),
    pytest.param(("stdio", LEGACY), marks=pytest.mark.slow),
    pytest.param(("http", MODERN), marks=pytest.mark.slow),
    pytest.param(("http", LEGACY), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CONVERSATIONS, ids="-".join)
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, processes: None, loopback: None
) -> SeedSession:
    """Every example and every common error, asked in order of one server."""
    transport, revision = request.param
    response = SeedSession(tmp_path_factory.mktemp(transport))
    response.tools.mkdir(parents=True)
    response.home.mkdir()
    for name, text in TOOLS.items():
        (response.tools / f"{name}.py").write_text(text)

    async def story() -> None:
        talking = over_http if transport == "http" else over_stdio
        async with asyncio.timeout(PATIENCE), talking(response, "legacy" if revision == LEGACY else "auto") as client:
            assert client.protocol_version == revision
            for name, (verb, text) in EXAMPLES.items():
                response.results[name] = await client.call_tool(verb, asked(response, text))
            path = response.tools / "my_tool.py"
            path.write_text(path.read_text().replace("* count", "* (count + 1)"))
            for name, (verb, text) in ERRORS.items():
                response.results[name] = await client.call_tool(verb, asked(response, text))

    asyncio.run(story())
    return response


@asynccontextmanager
async def over_stdio(session: SeedSession, mode: str) -> AsyncIterator[Client]:
    """A conversation with `kiwi serve`."""
    command = StdioServerParameters(command=sys.executable, args=["-m", "kiwi_mcp", "serve"], env=surroundings(session))
    async with Client(stdio_client(command), mode=mode) as client:
        yield client


@asynccontextmanager
async def over_http(session: SeedSession, mode: str) -> AsyncIterator[Client]:
    """A conversation with `kiwi up`, with a token that may use tools."""
    kiwi = [sys.executable, "-m", "kiwi_mcp", "up"]
    words = [*kiwi, "token", "add", "ben", "--tools", "--author", "--json"]
    made = await asyncio.to_thread(
        subprocess.run, words, env=surroundings(session), capture_output=True, timeout=120, check=True
    )
    process = await asyncio.create_subprocess_exec(
        *kiwi, "--port", "0", "--json", env=surroundings(session), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout
        where = json.loads(await process.stdout.readuntil(b"}\n"))
        headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}"}
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(create_mcp_http_client(headers))
            transport = streamable_http_client(f"{where['url']}/mcp", http_client=channel)
            yield await stack.enter_async_context(Client(transport, mode=mode))
    finally:
        process.terminate()
        await process.wait()


def surroundings(session: SeedSession) -> dict[str, str]:
    home = str(session.home)
    path = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)])
    source = str(Path(kiwi_mcp.__file__).parents[1])
    return {"HOME": home, "USER_SPACE": f"{home}/.ai", "XDG_CACHE_HOME": home, "PATH": path, "PYTHONPATH": source}


def asked(session: SeedSession, text: str) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(text.replace(MYPROJECT, str(session.project)))
    return request


def test_search_returns_results_total_query_and_source(session: SeedSession) -> None:
    answer = session.answer("search")

    assert answer.keys() >= {"results", "total", "query", "source"}
    assert (answer["query"], answer["source"]) == ("http api request", "local")
    first = answer["results"][0]
    assert first.keys() >= {"name", "description", "source", "path", "score", "tool_type"}
    assert (first["name"], first["description"], first["source"]) == (
        "http_fetch",
        "Make an http api request.",
        "project",
    )
    assert first["path"] == str(session.tools / "http_fetch.py")
    assert 0 < first["score"] <= 1


def test_search_respects_its_limit_and_order(session: SeedSession) -> None:
    answer = session.answer("search by date")

    assert [result["name"] for result in answer["results"]] == ["text_processor"]
    assert answer["total"] == 1


@pytest.mark.parametrize("name", ["load", "load and copy"])
def test_load_returns_the_file_and_its_metadata(name: str, session: SeedSession) -> None:
    answer = session.answer(name)

    assert (answer["name"], answer["content"], answer["source"]) == ("my_tool", MY_TOOL, "project")
    documented = {"name", "description", "version", "tool_type", "executor_id", "category"}
    assert {word: answer["metadata"][word] for word in documented} == {
        "name": "my_tool",
        "description": "Say a text several times.",
        "version": "1.0.0",
        "tool_type": "python",
        "executor_id": "python_runtime",
        "category": "my_category",
    }


@pytest.mark.req("K-ME-04")
def test_load_returns_the_path_of_the_file_and_of_its_copy(session: SeedSession) -> None:
    read, copied = session.answer("load"), session.answer("load and copy")

    assert read["path"] == str(session.tools / "my_tool.py")
    assert "destination" not in read
    assert copied["path"] == str(session.home / ".ai" / "tools" / "my_category" / "my_tool.py")
    assert (copied["destination"], copied["message"]) == ("user", "Tool copied from project to user")
    assert Path(copied["path"]).read_text() == MY_TOOL


@pytest.mark.parametrize(
    ("name", "tool", "result"),
    [
        ("run", "my_tool", {"result": "hello"}),
        ("run with a count", "my_tool", {"result": "hellohellohello"}),
        ("run without parameters", "greeting", {"greeting": "hello"}),
        ("run with parameters", "text_processor", {"text": "HELLO WORLD"}),
    ],
)
def test_run_returns_the_result_its_time_and_its_output(
    name: str, tool: str, result: dict[str, str], session: SeedSession
) -> None:
    answer = session.answer(name)

    assert (answer["tool_id"], answer["action"], answer["status"]) == (tool, "run", "success")
    assert answer["result"] == result
    assert isinstance(answer["execution_time_ms"], int)
    assert re.fullmatch(rf"\.ai/outputs/tools/{tool}/output_\d{{8}}_\d{{6}}(_\d+)?\.json", answer["output_path"])
    assert json.loads((session.project / answer["output_path"]).read_text())["result"] == result


@pytest.mark.parametrize("name", ["sign", "sign in a category"])
def test_sign_returns_the_signature_and_the_hash(name: str, session: SeedSession) -> None:
    answer = session.answer(name)

    assert (answer["tool_id"], answer["action"], answer["status"]) == ("my_tool", "sign", "signed")
    assert answer["message"] == "Tool signed successfully"
    assert re.fullmatch(rf"kiwi-mcp:validated:\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ:{answer['hash']}", answer["signature"])


@pytest.mark.parametrize(
    ("name", "topic"), [("help", "overview"), ("help on tools", "tool"), ("help on execute", "execute")]
)
def test_help_returns_text_topic_and_examples(name: str, topic: str, session: SeedSession) -> None:
    answer = session.answer(name)

    assert answer["topic"] == topic
    assert answer["help"].startswith("# ")
    assert answer["examples"]


@pytest.mark.parametrize("error", ERRORS)
def test_a_common_error_has_its_name_an_explanation_and_a_suggestion(error: str, session: SeedSession) -> None:
    answer = session.answer(error, is_error=True)

    assert answer["error"] == error
    assert answer["item_type"] == "tool"
    assert answer["code"]
    assert answer["message"]
    assert answer["suggestion"]


@pytest.mark.parametrize(("error", "tool"), [("Execution failed", "failing"), ("Content hash mismatch", "my_tool")])
def test_a_failing_run_names_the_tool_and_the_action(error: str, tool: str, session: SeedSession) -> None:
    answer = session.answer(error, is_error=True)

    assert (answer["tool_id"], answer["action"]) == (tool, "run")
