"""The client under test: the Kiwi kernel, which uses all that the server at an address offers. `python client.py URL`

The suite names the scenario in MCP_CONFORMANCE_SCENARIO, and what it needs to know in MCP_CONFORMANCE_CONTEXT.
`python client.py --wait SOCKET` loads everything once; each `forked.py SOCKET URL` is then a fork of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import urlopen

from kiwi_mcp.domain.calls import Answers, Caller, Questions
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel

# What is otherwise loaded at the first call: the forks have it from the start.
import_module("kiwi_mcp.drivers.mcp")

SERVER = "suite"
WORDS: JsonObject = {"string": "test", "number": 2, "integer": 2, "boolean": True, "array": [], "object": {}}
ONLY_LISTED = {"json-schema-ref-no-deref"}
"""Scenarios with a server that answers no calls."""
CAPABILITIES: JsonObject = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
CLIENT_METADATA = "https://conformance-test.local/client-metadata.json"
"""The client's own page, as the suite knows it; nothing is at that address."""
LOGINS = 3
"""How often the owner is asked to allow more, until they have enough of it."""
LIMIT = 120.0
AT_ONCE = 4


async def answer(questions: Questions) -> Answers:
    """Say yes to every question, and no word more; an address is opened, as by a browser that allows everything."""
    for question in questions.values():
        if question.params.get("mode") == "url":
            await asyncio.to_thread(browse, as_text(question.params["url"]))
    return {key: {"action": "accept", "content": {}} for key in questions}


def browse(url: str) -> None:
    try:
        with urlopen(url, timeout=120) as page:
            page.read()
    except OSError as error:
        sys.stderr.write(f"browser: {error}\n")


def issuer_of(url: str) -> str:
    """The authorization server of a server, which its owner knows: they have registered a client there."""
    parts = urlsplit(url)
    for path in (parts.path, ""):
        place = f"{parts.scheme}://{parts.netloc}/.well-known/oauth-protected-resource{path}"
        try:
            with urlopen(place, timeout=120) as page:
                return as_text(as_list(json.load(page)["authorization_servers"])[0])
        except OSError:
            continue
    return ""


def arguments(schema: JsonObject) -> JsonObject:
    """What a tool needs, with the simplest values there are."""
    needed = set(map(as_text, as_list(schema.get("required"))))
    return {
        name: WORDS.get(as_text(as_object(one).get("type")), "test")
        for name, one in as_object(schema.get("properties")).items()
        if name in needed
    }


def present(given: JsonObject) -> JsonObject:
    """Arguments without those that are null, which the schemas of the suite do not allow."""
    return {name: value for name, value in given.items() if value is not None}


class Client:
    """A kernel with one server, in one scenario."""

    def __init__(self, kernel: Kernel, scenario: str, context: JsonObject) -> None:
        self._kernel = kernel
        self._scenario = scenario
        self._context = context

    async def use(self, url: str) -> None:
        """Add the server, log in where it wants that, and make every call there is to make."""
        await self._ask("mcp", action="add", server=SERVER, **self._words(url))
        if self._scenario.startswith("auth/") and not self._has_credentials:
            await self._ask("mcp", action="login", server=SERVER)
        for name, given in await self._calls():
            for _ in range(LOGINS):
                item = f"mcp/{SERVER}/{name}"
                response = await self._ask("execute", item_type="tool", item_id=item, parameters=given)
                if response.get("code") != "login_required":
                    break
                await self._ask("mcp", action="login", server=SERVER)

    @property
    def _has_credentials(self) -> bool:
        """Whether the server knows the client itself, and no person."""
        return self._scenario.startswith("auth/client-credentials")

    def _words(self, url: str) -> JsonObject:
        """The server as its owner adds it: its address, and what is known about logging in to it."""
        if not self._scenario.startswith("auth/"):
            return {"url": url, "roots": True, "sampling": True, "questions": True}
        auth: dict[str, Json] = {"type": "oauth", "client_metadata_url": CLIENT_METADATA}
        if self._has_credentials:
            auth["grant"] = "client_credentials"
        for word in ("client_id", "signing_algorithm"):
            if word in self._context:
                auth[word] = self._context[word]
        for word, given in (("client_secret", "client_secret"), ("private_key", "private_key_pem")):
            if given in self._context:
                auth[word] = f"${{SUITE_{word.upper()}}}"
                auth["issuer"] = issuer_of(url)
                os.environ[f"SUITE_{word.upper()}"] = as_text(self._context[given])
        config: JsonObject = {"transport": "http", "url": url, "auth": auth}
        return {"manifest": {"executor": "http_client", "config": config}}

    async def _calls(self) -> list[tuple[str, JsonObject]]:
        """Each call: those that the scenario names, else one of each thing that is offered."""
        if named := as_list(self._context.get("toolCalls")):
            return [(as_text(row["name"]), present(as_object(row["arguments"]))) for row in map(as_object, named)]
        schemas = {name: await self._schema(name) for name in await self._offered()}
        if self._scenario == "json-schema-2020-12-preservation":
            return [("json_schema_echo", {"schema": schemas["json_schema_2020_12_tool"]})]
        if self._scenario in ONLY_LISTED:
            return []
        return [(name, arguments(schema)) for name, schema in schemas.items()]

    async def _offered(self) -> list[str]:
        """The names of what the server offers, and the owner accepted by adding it."""
        response = await self._ask("mcp", action="list", server=SERVER)
        rows = [as_object(row) for row in as_list(response.get("items"))]
        return [as_text(row.get("tool_id")) for row in rows if row.get("state") == "accepted"]

    async def _schema(self, name: str) -> JsonObject:
        """The parameters of one item, as a model sees them."""
        response = await self._ask("load", item_type="tool", item_id=f"mcp/{SERVER}/{name}")
        return as_object(response.get("parameters"))

    async def _ask(self, verb: str, **words: Json) -> JsonObject:
        reply = await self._kernel.call(verb, words, Caller(ask=answer, capabilities=CAPABILITIES))
        sys.stderr.write(f"{verb} {json.dumps(words)}: {json.dumps(reply.content)[:2_000]}\n")
        return reply.content


async def talk(url: str, folder: Path) -> None:
    user = folder / "home"
    for made in (folder / ".ai", user):
        made.mkdir()
    # The suite's servers are on this machine, which only the owner can permit.
    (user / "policy.yaml").write_text("hosts: {allow: [localhost]}\n")
    kernel = Kernel(folder, user=user, cache=folder / "cache")
    context = as_object(json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")))
    try:
        async with asyncio.timeout(LIMIT):
            # What is sent to them is the owner's to permit too, and the suite's answers are not the owner's.
            await kernel.call("approvals", {"action": "add_rule", "item": "mcp/*"})
            await Client(kernel, os.environ["MCP_CONFORMANCE_SCENARIO"], context).use(url)
    finally:
        await kernel.aclose()


def run(url: str) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(talk(url, Path(folder)))


def wait(path: str) -> None:
    """Fork for each that connects; it sends an address, its environment, and the streams it writes to.

    The suite starts all its scenarios at the same moment: most wait here, so that each has a machine to run on.
    """
    forks = 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            if forks == AT_ONCE:
                os.wait()
                forks -= 1
            connection, _ = listener.accept()
            if os.fork() == 0:
                os._exit(serve(connection))
            connection.close()
            forks += 1


def serve(connection: socket.socket) -> int:
    sent, streams, _, _ = socket.recv_fds(connection, 100_000, 2)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    words = json.loads(sent)
    os.environ.update(words["environ"])
    try:
        run(words["url"])
    finally:
        sys.stderr.flush()
        connection.sendall(b"done")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--wait":
        wait(sys.argv[2])
    else:
        run(sys.argv[-1])
