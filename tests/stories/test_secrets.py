"""Stored secrets: sent where the owner granted them, and redacted in all output."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Reply = tuple[int, Mapping[str, str], bytes]
Serve = Callable[..., tuple[str, list[JsonObject]]]

JSON_TYPE = {"content-type": "application/json"}
CANARY = 'canary/7f3a "stored" välue+1'
LEAKY = """import base64, json, os, sys, urllib.parse


def main():
    key = os.environ["KEY"]
    raw = key.encode()
    forms = [key, raw.hex(), urllib.parse.quote(key, safe=""), json.dumps(key), key[::-1]]
    forms += [base64.b64encode(b"x" * pad + raw).decode() for pad in range(3)]
    forms += [base64.urlsafe_b64encode(raw).decode()]
    for form in forms:
        print(form, flush=True)
        print(form, file=sys.stderr, flush=True)
"""


def echo(request: JsonObject) -> Reply:
    return 200, JSON_TYPE, json.dumps(request).encode()


def process(ask: Ask, name: str, code: str, **config: Json) -> None:
    words: JsonObject = {
        "tool_type": "script", "version": "1.0.0", "executor": "python_runtime", "description": "Use a key",
        "config": {"entrypoint": "main.py", **config}, "parameters": [], "files": {"main.py": code},
    }  # fmt: skip
    response = ask("execute", action="create", item_id=name, parameters=words)
    assert not response.is_error, response.content


def api(ask: Ask, config: JsonObject, name: str = "call") -> None:
    words: JsonObject = {
        "tool_type": "api", "version": "1.0.0", "executor": "http_client", "description": "Call the service",
        "config": {"method": "GET", **config}, "parameters": [],
    }  # fmt: skip
    response = ask("execute", action="create", item_id=name, parameters=words)
    assert not response.is_error, response.content


def keep(ask: Ask, name: str, tool: str = "", **words: Json) -> None:
    """Set a secret, and grant it."""
    assert not ask("secrets", action="set", name=name, **{"value": CANARY, **words}).is_error
    if tool:
        assert not ask("secrets", action="grant", name=name, tool=tool).is_error


def run(ask: Ask, name: str, **parameters: Json) -> JsonObject:
    return ask("execute", item_id=name, parameters=parameters).content


def host_of(url: str) -> str:
    return url.removeprefix("http://")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-02")
def test_a_tool_gets_only_the_stored_secret_that_it_declares(ask: Ask) -> None:
    code = "import os\n\n\ndef main():\n    return [word in os.environ for word in ('KEY_A', 'KEY_B')]\n"
    process(ask, "probe", code, variables=["KEY_A"])
    keep(ask, "KEY_A", "probe")
    keep(ask, "KEY_B", "probe")

    assert run(ask, "probe")["result"] == [True, False]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-03")
@pytest.mark.parametrize("template", ["${KEY}", "${KEY:-nothing}"])
def test_a_secret_without_a_grant_starts_nothing_even_if_set_elsewhere(
    template: str, ask: Ask, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(ask, "probe", "def main():\n    open('started', 'w').close()\n", env={"KEY": template})
    keep(ask, "KEY")
    monkeypatch.setenv("KEY", "a value of the process")

    response = run(ask, "probe")

    assert (response["code"], response["secret"]) == ("secret_not_granted", "KEY")
    assert "kiwi secrets grant KEY project/local/probe" in str(response["suggestion"])
    assert not (project / "started").exists()
    [recorded] = map(as_object, as_list(ask("runs").content["runs"]))
    assert (recorded["status"], recorded["code"]) == ("refused", "secret_not_granted")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-03")
def test_a_tool_of_the_same_name_in_another_project_is_not_granted_it(ask: Ask, tmp_path: Path) -> None:
    words: JsonObject = {
        "tool_type": "script", "version": "1.0.0", "executor": "bash_runtime", "description": "Say it",
        "config": {"entrypoint": "main.sh", "variables": ["KEY"]}, "files": {"main.sh": "touch started\n"},
    }  # fmt: skip
    other = tmp_path / "from_the_net"
    other.mkdir()
    for place in ({}, {"project_path": str(other)}):
        ask("execute", action="create", item_id="probe", parameters=words, **place)
    keep(ask, "KEY", "probe")

    assert run(ask, "probe")["status"] == "success"
    assert ask("execute", item_id="probe", project_path=str(other)).content["code"] == "secret_not_granted"
    assert not (other / "started").exists()


@pytest.mark.case("SEC-09")
@pytest.mark.parametrize("is_variable", [False, True], ids=["changed tool", "changed variable"])
def test_a_secret_of_one_host_is_not_sent_to_another(
    is_variable: bool, ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home, asked), (evil, seen) = serve(echo), serve(echo)

    def aim(url: str) -> None:
        monkeypatch.setenv("BASE", url)
        ask("execute", action="delete", item_id="call")
        api(ask, {"url": "${BASE}/v1" if is_variable else f"{url}/v1", "headers": {"X-Key": "${KEY}"}})

    aim(home)
    keep(ask, "KEY", "call", hosts=[host_of(home)], value="canary-7f3a-stored-value")
    assert run(ask, "call")["status"] == "success"
    assert as_object(asked[0]["headers"])["x-key"] == "canary-7f3a-stored-value"
    assert ask("execute", action="why", item_id="call").content["would_run"] is True
    aim(evil)
    response = run(ask, "call")

    assert response["code"] == "secret_not_granted"
    assert "Nothing was sent" in str(response["message"])
    assert seen == []
    explained = ask("execute", action="why", item_id="call").content
    codes = [as_object(reason)["code"] for reason in as_list(explained["reasons"])]
    assert codes == ([] if is_variable else ["secret_not_granted"])  # what a variable holds is known when it is sent


@pytest.mark.case("SEC-09")
def test_a_secret_does_not_follow_a_redirect_to_another_host(ask: Ask, serve: Serve) -> None:
    evil, seen = serve(echo)
    home, _ = serve(lambda _: (302, {"location": f"{evil}/"}, b""))
    api(ask, {"url": home, "headers": {"X-Key": "${KEY}"}})
    keep(ask, "KEY", "call", hosts=[host_of(home)], value="canary-7f3a-stored-value")

    run(ask, "call")

    assert "canary" not in json.dumps(seen)


@pytest.mark.case("SEC-09")
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_an_mcp_server_gets_a_secret_only_for_its_own_host(transport: str, ask: Ask, serve: Serve) -> None:
    url, seen = serve(lambda _: (404, {}, b""))
    words: JsonObject = {"url": f"{url}/mcp", "headers": {"X-Key": "${KEY}"}, "transport": transport, "start": False}
    assert not ask("mcp", action="add", server="remote", **words).is_error
    keep(ask, "KEY", hosts=["elsewhere.example"], value="canary-7f3a-stored-value")

    assert ask("mcp", action="refresh", server="remote").content["code"] == "secret_not_granted"
    ask("secrets", action="grant", name="KEY", tool="remote")
    refused = ask("mcp", action="refresh", server="remote").content
    assert (refused["code"], seen) == ("secret_not_granted", [])

    ask("secrets", action="set", name="KEY", hosts=[host_of(url)])
    ask("mcp", action="refresh", server="remote")
    assert as_object(seen[0]["headers"])["x-key"] == "canary-7f3a-stored-value"


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-05", "SEC-06", "SEC-07")
@pytest.mark.parametrize(
    "ending", ["return forms", "raise ValueError(forms)", "sys.exit('failed: ' + key)", "return {key: [key, forms]}"]
)
def test_a_stored_secret_that_a_tool_returns_is_redacted(
    ending: str, kernel: Kernel, ask: Ask, project: Path, home: Path
) -> None:
    process(ask, "probe", f"{LEAKY}    {ending}\n", variables=["KEY"])
    keep(ask, "KEY", "probe")
    heard: list[Progress] = []

    async def call() -> Answer:
        try:
            return await kernel.call("execute", {"item_id": "probe"}, Caller(heard.append))
        finally:
            await kernel.aclose()

    response = asyncio.run(call()).content
    shown = json.dumps([response, [one.message for one in heard], ask("runs").content], ensure_ascii=False)

    assert "[redacted:KEY]" in shown
    assert heard
    assert leaks(shown) == []
    for path in (path for path in (*project.rglob("*"), *home.rglob("*")) if path.is_file()):
        assert leaks(path.read_bytes().decode(errors="replace")) == [], path


def leaks(text: str) -> list[str]:
    """The forms of the secret that a text holds."""
    raw = CANARY.encode()
    parts = [b64encode(b"x" * pad + raw).decode()[4:-4] for pad in range(3)]
    forms = [CANARY, raw.hex(), quote(CANARY, safe=""), CANARY[::-1], json.dumps(CANARY)[1:-1], *parts]
    return [form for form in (*forms, urlsafe_b64encode(raw).decode()[:-4]) if form in text]


@pytest.mark.case("SEC-07")
def test_a_stored_secret_in_a_url_is_not_in_the_errors_of_its_service(ask: Ask, serve: Serve) -> None:
    url, seen = serve(lambda request: (500, JSON_TYPE, json.dumps(request).encode()))
    api(ask, {"url": f"{url}/${{KEY}}/x?key=${{KEY}}"})
    api(ask, {"url": "http://127.0.0.1:9/?key=${KEY}"}, name="down")
    keep(ask, "KEY", "*", hosts=[host_of(url), "127.0.0.1:9"], form="any")

    response = [run(ask, "call"), run(ask, "down")]

    assert quote(CANARY, safe="") in json.dumps(seen)
    assert leaks(json.dumps(response, ensure_ascii=False)) == []


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-13")
def test_a_weak_secret_does_not_mangle_the_output_of_a_tool(ask: Ask) -> None:
    process(ask, "probe", "def main():\n    return {'a': True, 'text': 'a true banana'}\n", variables=["KEY"])
    for value in ("a", "true"):
        keep(ask, "KEY", "probe", value=value, weak=True)
        assert run(ask, "probe")["result"] == {"a": True, "text": "a true banana"}
