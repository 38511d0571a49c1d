"""Threads that cannot start or lose their model: a clear error or result, and nothing hangs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.plugins.scripted_model import ScriptedTurn, empty, endless, fail, html, say, use

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread

pytestmark = pytest.mark.usefixtures("loopback")
NEEDS_TOPIC = '<inputs><input name="topic" type="string" required="true">What about</input></inputs>'


@pytest.mark.parametrize(
    ("item", "words", "code", "named"),
    [
        ("no_such_directive", {}, "tool_not_found", "no_such_directive"),
        ("strict", {}, "invalid_input", "topic"),
        ("strict", {"inputs": {"topic": 3}}, "invalid_input", "topic"),
        ("strict", {"inputs": {"topic": "x", "tpoic": "y"}}, "invalid_input", "tpoic"),
        ("tiered", {}, "invalid_request", "gigantic"),
        ("study", {"limits": {"turms": 3}}, "invalid_input", "turns"),
        ("study", {"limits": {"turns": -1}}, "invalid_input", "turns"),
        ("study", {"model": "scripted_llm/other-1"}, "invalid_request", "scripted-1"),
    ],
)
async def test_what_cannot_start_is_refused_with_a_reason(
    agents: Agents, item: str, words: dict[str, Any], code: str, named: str
) -> None:
    agents.directive("study")
    agents.directive("strict")
    path = agents.user / "directives" / "strict.md"
    before, _, rest = path.read_text().partition("<inputs>")
    path.write_text(f"{before}{NEEDS_TOPIC}{rest.partition('</inputs>')[2]}")
    agents.directive("tiered", model='<model tier="gigantic">why</model>')
    refused = await agents.call("thread", action="start", item_id=item, wait=True, **words)
    assert refused.is_error
    assert (refused.content["code"], named in json.dumps(refused.content)) == (code, True), refused.content
    assert refused.content["suggestion"]
    assert agents.model.requests == []
    assert (await agents.call("thread", action="list")).content["threads"] == []


async def test_broken_xml_is_a_validation_error(agents: Agents) -> None:
    agents.directive("broken")
    path = agents.user / "directives" / "broken.md"
    path.write_text(path.read_text().replace("</metadata>", "</meta>"))
    refused = await agents.call("thread", action="start", item_id="broken", wait=True)
    assert refused.content["code"] in {"invalid_manifest", "tool_not_found"}, refused.content
    assert "broken" in json.dumps(refused.content)


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        (fail(401, "Invalid API key."), "Invalid API key"),
        (fail(403, "No access."), "No access"),
        (html(), "scripted-1"),
        (empty(), "answered nothing"),
        (endless(), "closed"),
    ],
)
async def test_a_model_that_fails_ends_the_thread_with_a_reason(agents: Agents, turn: ScriptedTurn, named: str) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(turn)
    done = await agents.start("study")
    assert (done["status"], done["finish_reason"]) == ("failed", "error"), done
    assert named in done["message"], done
    events = await agents.events(done["thread_id"])
    assert [event["kind"] for event in events][-2:] == ["model_failed", "ended"]
    verified = await agents.call("thread", action="verify", thread_id=done["thread_id"])
    assert verified.content["valid"] is True


async def test_a_directive_falls_back_to_a_model_that_there_is(agents: Agents) -> None:
    agents.directive("study", model='<model tier="huge" fallback="fast"/>')
    agents.directive("bad", model='<model tier="huge"/>')
    await agents.sign("study", "bad")
    agents.model.will(say("Done."))
    assert (await agents.start("study"))["status"] == "completed"
    assert "huge" in (await agents.start("bad"))["message"]


async def test_a_missing_key_is_named_before_anything_is_sent(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    (agents.user / ".env").unlink()
    done = await agents.start("study")
    assert (done["status"], done["code"]) == ("failed", "variable_missing"), done
    assert "SCRIPTED_KEY" in done["message"]
    assert agents.model.requests == []


async def test_without_a_provider_nothing_starts_and_the_error_says_what_to_write(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    (agents.user / "config.yaml").unlink()
    (agents.user / "tools" / "scripted_llm.yaml").rename(agents.user / "scripted")
    refused = await agents.start("study")
    assert (refused["code"], "None is configured." in refused["message"]) == ("provider_not_chosen", True), refused
    for named in ("--model PROVIDER/MODEL", "provider_adapter: PROVIDER", "openai_runtime (OPENAI_API_KEY)"):
        assert named in refused["suggestion"]

    with (agents.user / ".env").open("a") as env:  # a preset needs its key and nothing else
        env.write("OPENAI_API_KEY=sk-1\n")
    services = agents.kernel._services
    context = services.context(NO_CALLER, services.catalogs.at(None))
    assert new_thread(StartRequest("study", {}), context)[0].model.startswith("openai_runtime/")

    (agents.user / "scripted").rename(agents.user / "tools" / "scripted_llm.yaml")
    write_provider(agents.user, agents.model, "openai_chat", name="other_llm", auth="Bearer ${OTHER_KEY}")
    (agents.user / "config.yaml").unlink()
    agents.model.will(say("Done."))
    assert (await agents.start("study"))["status"] == "completed"  # the only one with its key

    write_provider(agents.user, agents.model, "ollama", name="third_llm")
    (agents.user / "config.yaml").unlink()
    refused = await agents.start("study")
    assert "Configured: other_llm (needs OTHER_KEY), scripted_llm, third_llm." in refused["message"]
    agents.model.will(say("Done."))
    assert (await agents.start("study", model="third_llm/scripted-1"))["status"] == "completed"
    assert len((await agents.read("thread", action="list"))["threads"]) == 2


async def test_a_provider_that_cannot_be_reached_is_an_error(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    agents.directive("study")
    await agents.sign("study")
    monkeypatch.setattr(agents.model, "host", "127.0.0.1:1")
    write_provider(agents.user, agents.model, "openai_chat")
    done = await agents.start("study", limits={"seconds": 3})
    assert done["status"] in {"failed", "exhausted"}, done
    assert done["message"]


async def test_nonsense_is_a_result_and_not_the_end(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("%%% 7 \x00\x1b[31m"))
    done = await agents.start("study")
    assert done["status"] == "completed", done


async def test_outputs_of_two_outcomes_at_once_are_refused(agents: Agents) -> None:
    outputs = "<outputs><success>`sum`: number</success><failure>`reason`: string</failure></outputs>"
    agents.directive("study", outputs=outputs)
    await agents.sign("study")
    agents.model.will(use("return", sum=1, reason="none"), use("return", sum=1))
    done = await agents.start("study")
    assert (done["status"], done["result"]) == ("completed", {"sum": 1}), done
    results = [event["status"] for event in await agents.events(done["thread_id"]) if event["kind"] == "result"]
    assert results == ["invalid_input", "ok"]


@pytest.mark.usefixtures("sandbox")
async def test_a_fault_in_the_environment_file_stops_a_thread_and_doctor_shows_it(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    for text in ("provider_adaptor: scripted_llm", "provider_adapter: [scripted_llm]"):
        (agents.user / "config.yaml").write_text(text)
        refused = await agents.call("thread", action="start", item_id="study")
        assert refused.content["code"] == "invalid_manifest", refused.content
    (agents.user / "config.yaml").write_text("provider_adapter: scripted_llm\nauth_mode: local")
    checks: Any = (await agents.read("doctor"))["checks"]
    (found,) = (one for one in checks if one["check"] == "config.yaml")
    assert (found["status"], found["fix"]) == ("problem", "auth_mode: Write one of: policy, locked.")
