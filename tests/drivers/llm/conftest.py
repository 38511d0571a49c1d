"""Models that are asked directly, without a thread around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.plugins.scripted_model import KEY

from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import ModelReply, Prompt, ReplyDelta
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.llm.model import Conversation, bind_request, complete
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.primitives.http import client

Ask = Callable[..., Awaitable[ModelReply]]


def chain_of(config: JsonObject, tool_id: str = "local_llm") -> Chain:
    """Return the chain of a runtime with a config."""
    manifest = Manifest(tool_id, "runtime", "1.0.0", executor="http_client", config=config)
    tool = Tool(manifest, Location("user", Path("local.yaml"), Path()), digest="0" * 64)
    return Chain((tool,), (TypeTraits(),))


@pytest.fixture
async def ask_model(loopback: None) -> AsyncIterator[Ask]:
    """Send a prompt to a model on loopback and return its reply; `waits` collects the seconds between attempts."""

    async def ask(
        prompt: Prompt,
        choice: ModelChoice,
        *,
        deltas: list[ReplyDelta] | None = None,
        waits: list[float] | None = None,
        key: str = KEY,
        idle: float = 30.0,
    ) -> ModelReply:
        plan = bind_request(prompt, Conversation(choice), chain_of({}))
        assert isinstance(plan.spec, HttpSpec)
        plan = replace(plan, spec=replace(plan.spec, granted=("127.0.0.1",), idle=idle))

        async def sleep(seconds: float) -> None:
            if waits is not None:
                waits.append(seconds)

        found = deltas if deltas is not None else []
        return await complete(plan, choice, dict.fromkeys(plan.variables, key), found.append, sleep=sleep)

    yield ask
    await client.aclose()
