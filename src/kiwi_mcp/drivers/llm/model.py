"""One request to a model: its plan, the conversation as it is sent, its reply, retries by a table of failures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from hashlib import sha256
from itertools import groupby

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.data import FOLDER
from kiwi_mcp.domain.errors import Invalid, KiwiError, ModelFailed, RequestFailed
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, as_object, as_text, compact
from kiwi_mcp.domain.messages import (
    Message,
    ModelReply,
    Prompt,
    ReasoningPart,
    ReplyDelta,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolResultPart,
)
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.drivers.llm.dialect import ErrorEvent, ReplyReader
from kiwi_mcp.drivers.llm.dialects import DIALECTS
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.templates import defaulted, variables
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.sse import ServerEvent

CONTINUE = Message("user", (TextPart("Continue."),))
"""Sent where a conversation needs a message of the user and has none."""
NO_RESULT = "No result of this call was recorded."
_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")
_ReplyPart = TextPart | ReasoningPart | ToolCallPart


class Conversation:
    """The messages of a thread in the dialect of its model. What was sent before is stored as bytes.

    Each call is followed by exactly one result, in the order of the calls. Ids are unique and of a form that every
    provider takes. Empty texts and the reasoning of other models are left out. It ends with a message to the model.
    """

    def __init__(self, choice: ModelChoice) -> None:
        self.choice = choice
        self._dialect = DIALECTS[choice.dialect]
        auth = {choice.auth_header: choice.auth} if choice.auth else {}
        own = {"content-type": "application/json", **self._dialect.headers}
        self.headers: Mapping[str, str] = {**own, **choice.headers, **auth}
        """The headers of each request; their values may hold `${NAME}`."""
        sent: Json = [choice.url, {**self.headers}]
        self.variables, self.defaulted = variables(sent), defaulted(sent)
        self._head = b""
        self._hash = sha256()
        self._begin(())

    def _begin(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._count = 0
        """How many of them were added."""
        self._before: Prompt | None = None
        self._done = bytearray()
        """All messages but those of `_group`, as they are sent."""
        self._group: list[Message] = []
        """The last replies of the model, or the last messages to it: a dialect may send them as one."""
        self._calls: list[tuple[str, ToolCallPart]] = []
        """The open calls with the ids that the model gave them."""
        self._results: list[ToolResultPart] = []
        self._ids: set[str] = set()

    def request(self, prompt: Prompt) -> tuple[bytes, str]:
        """Return the next request in the format of the provider, and its hash.

        The same list of messages may have grown; another one begins anew.
        """
        if prompt.messages is not self._messages:
            self._begin(prompt.messages)
        before = replace(prompt, messages=())
        if before != self._before:
            body = self._dialect.head(before, self.choice)
            first = body.setdefault(self._dialect.messages, [])
            # The request up to its first message: it is written in the order of its keys.
            self._head = msgspec.json.encode(body)[:-2] + (b"," if first else b"")
            self._before, self._hash = before, sha256(self._head + self._done)
        for message in self._messages[self._count :]:
            match message.role:
                case "assistant":
                    self._add_reply(_sent_parts(message, self.choice))
                case "tool":
                    self._results += [part for part in message.parts if isinstance(part, ToolResultPart)]
                case _:
                    self._close_calls()
                    if parts := [part for part in message.parts if isinstance(part, TextPart) and part.text.strip()]:
                        self._append(Message("user", tuple(parts)))
        self._count = len(self._messages)
        end = self._end()
        digest = self._hash.copy()
        digest.update(end)
        return b"".join((self._head, self._done, end)), digest.hexdigest()

    def _add_reply(self, parts: list[_ReplyPart]) -> None:
        self._close_calls()
        if not parts:
            return
        if not self._group or self._group[-1].role == "assistant":
            self._append(CONTINUE)
        given = [part.id for part in parts if isinstance(part, ToolCallPart)]
        renamed = [self._with_own_id(part) if isinstance(part, ToolCallPart) else part for part in parts]
        self._append(Message("assistant", tuple(renamed)))
        self._calls = list(zip(given, (part for part in renamed if isinstance(part, ToolCallPart)), strict=True))

    def _with_own_id(self, call: ToolCallPart) -> ToolCallPart:
        own = call.id
        while not _ID.fullmatch(own) or own in self._ids:
            own = f"call_{sha256(f'{own}/{len(self._ids)}'.encode()).hexdigest()[:24]}"
        self._ids.add(own)
        return replace(call, id=own)

    def _append(self, message: Message) -> None:
        if self._group and _is_reply(self._group[-1]) != _is_reply(message):
            data = self._rendered(self._group, is_last=False)
            self._done += data
            self._hash.update(data)
            self._group = []
        self._group.append(message)

    def _rendered(self, group: list[Message], *, is_last: bool) -> bytes:
        """Return messages as they are sent; a comma follows them, or the end of the request."""
        rows = self._dialect.rows(group, self.choice, is_last)
        return b",".join(map(msgspec.json.encode, rows)) + (b"]}" if is_last else b",")

    def _close_calls(self) -> None:
        for message in self._closing():
            self._append(message)
        self._calls, self._results = [], []

    def _closing(self) -> list[Message]:
        """Return the results of the open calls; a result of no call is sent as text."""
        left = list(self._results)
        found: list[ToolResultPart] = []
        for given, call in self._calls:
            match = next((one for one in left if one.id == given), None)
            if match is not None:
                left.remove(match)
            result = match or ToolResultPart(call.id, call.name, NO_RESULT, is_error=True)
            found.append(replace(result, id=call.id, name=call.name))
        results = [Message("tool", tuple(found))] if found else []
        texts = tuple(TextPart(part.content) for part in left if part.content.strip())
        return [*results, Message("user", texts)] if texts else results

    def _end(self) -> bytes:
        """Return the last messages and the end of the request, which the next request may write in another way."""
        messages = [*self._group, *self._closing()]
        if not messages or _is_reply(messages[-1]):
            messages.append(CONTINUE)
        groups = [list(group) for _, group in groupby(messages, key=_is_reply)]
        return b"".join(self._rendered(group, is_last=group is groups[-1]) for group in groups)


def _is_reply(message: Message) -> bool:
    return message.role == "assistant"


def _sent_parts(message: Message, choice: ModelChoice) -> list[_ReplyPart]:
    """Return the reply of a model as it is sent back: no text after a call, and no reasoning at the end."""
    own = (choice.provider, choice.model)
    parts = list[_ReplyPart]()
    for part in message.parts:
        match part:
            case TextPart(text=text) if not text.strip():
                pass
            case ReasoningPart(provider=provider, model=model) if (provider, model) != own:
                pass
            case TextPart() | ReasoningPart() | ToolCallPart():
                parts.append(part)
    first = next((at for at, part in enumerate(parts) if isinstance(part, ToolCallPart)), len(parts))
    parts = [*parts[:first], *sorted(parts[first:], key=lambda part: not isinstance(part, TextPart))]
    while parts and isinstance(parts[-1], ReasoningPart):
        parts.pop()
    return parts


RETRIES = 3
TIMEOUT = 900.0
"""The longest that one answer may take, in seconds."""
IDLE = 180.0
"""The longest that a stream may be silent, in seconds: models think before they write."""
_EVENTS, _BYTES = 2_000, 2_000_000
_EVENTS_PER_TOKEN, _BYTES_PER_TOKEN = 4, 2_000
"""The most events and bytes of an answer for each token of output; a stream with more does not end."""
_QUOTED = 500
_TOKEN_LENGTH = 4
"""About how many characters a token has, for a provider that counts none."""
_NOT_SENT = ("dns", "connect", "tls")
"""Causes of failure before anything was sent."""


class ModelErrorClass(Struct, frozen=True):
    """One class of failures, as `data/model_errors.yaml` describes it."""

    kind: str
    suggestion: str
    statuses: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    base: float = 0.0
    max: float = 0.0

    def matches(self, status: int, cause: str, text: str) -> bool:
        """Whether a failure is of this class; one without conditions takes all."""
        if not (self.statuses or self.causes or self.words):
            return True
        lowered = text.lower()
        return status in self.statuses or cause in self.causes or any(word.lower() in lowered for word in self.words)


def bind_request(prompt: Prompt, conversation: Conversation, chain: Chain) -> Plan:
    """Return the plan of a request to a model. It shows the hash of the conversation, and names instead of secrets."""
    choice = conversation.choice
    data, digest = conversation.request(prompt)
    spec = HttpSpec(
        method="POST",
        url=choice.url,
        headers=conversation.headers,
        data=data,
        timeout=TIMEOUT,
        idle=IDLE,
        max_bytes=_BYTES + _BYTES_PER_TOKEN * prompt.max_output,
        max_events=_EVENTS + _EVENTS_PER_TOKEN * prompt.max_output,
        max_redirects=0,
        stream=DIALECTS[choice.dialect].stream,
    )
    return Plan(
        identity=chain.tool.identity,
        tool_digest=chain.tool.digest,
        driver="llm",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=spec,
        inputs={},
        variables=conversation.variables,
        defaulted=conversation.defaulted,
        facts={
            "provider": choice.provider,
            "model": choice.model,
            "dialect": choice.dialect,
            "request_sha256": digest,
        },
        effect="idempotent",
    )


async def complete(
    plan: Plan,
    choice: ModelChoice,
    secrets: Mapping[str, str],
    on_delta: Callable[[ReplyDelta], None],
    *,
    retries: int = RETRIES,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> ModelReply:
    """Send a planned request and return the reply. Only what was surely not answered is sent again."""
    assert isinstance(plan.spec, HttpSpec)  # noqa: S101 - bind_request makes no other
    for attempt in range(retries + 1):
        try:
            return await _attempt(plan.spec, choice, secrets, on_delta)
        except _Failed as failed:
            row, asked = failed.row, failed.retry_after
            wait = min(row.base * 2.0**attempt, row.max) if asked is None else asked
            if attempt == retries or not row.base or wait > row.max:
                raise ModelFailed(
                    f"{choice.provider}/{choice.model} gave no answer. {failed.message}",
                    suggestion=row.suggestion,
                    kind=row.kind,
                    is_lost=failed.is_lost,
                    status=failed.status,
                    attempts=attempt + 1,
                    retry_after=asked,
                    provider=choice.provider,
                    model=choice.model,
                ) from None
            await sleep(wait)
    raise AssertionError("attempts are counted")


class _Failed(Exception):
    def __init__(self, message: str, *, status: int = 0, cause: str = "", text: str = "", after: Json = None) -> None:
        super().__init__(message)
        self.message, self.status = message, status
        self.is_lost = not status and cause not in _NOT_SENT
        self.row = next(row for row in error_classes() if row.matches(status, cause, text))
        self.retry_after = float(after) if isinstance(after, int | float) else None


@cache
def error_classes() -> tuple[ModelErrorClass, ...]:
    """Return the classes of failures, in the order in which they are tried."""
    path = FOLDER / "model_errors.yaml"
    return msgspec.convert(read_yaml(path.read_text(), what=path.name).value, tuple[ModelErrorClass, ...])


async def _attempt(
    spec: HttpSpec, choice: ModelChoice, secrets: Mapping[str, str], on_delta: Callable[[ReplyDelta], None]
) -> ModelReply:
    reader: ReplyReader = DIALECTS[choice.dialect].reader(choice)
    has_begun, left = False, spec.max_events
    ask = client.events if spec.stream == "sse" else client.lines
    stream: AsyncGenerator[ServerEvent | str, None] = ask(spec, secrets=secrets)
    try:
        async with aclosing(stream) as events:
            async for event in events:
                for delta in reader.feed(event.data if isinstance(event, ServerEvent) else event):
                    has_begun = True
                    on_delta(delta)
                left -= 1
    except ErrorEvent as error:
        if not has_begun:
            raise _Failed(error.message, status=error.status, text=f"{error.kind} {error.message}") from None
    except RequestFailed as error:
        if not has_begun:
            raise _refused(error) from None
    except msgspec.MsgspecError as error:
        raise _Failed(f"The model's stream is not in the format of its dialect: {error}") from None
    except Invalid as error:  # more bytes than any answer has
        raise _Failed(f"{error.message} The stream was closed.") from None
    if left <= 0:
        raise _Failed(f"The answer did not end within {spec.max_events:,} events. The stream was closed.")
    reply = reader.finish()
    if not reply.parts and reply.stop in {"end", "broken"}:
        raise _Failed("The model answered nothing.")
    if not reply.usage.is_estimated:
        return reply
    texts = [part.text for part in reply.parts if isinstance(part, TextPart | ReasoningPart)]
    texts += [part.name + part.arguments for part in reply.parts if isinstance(part, ToolCallPart)]
    return replace(reply, usage=estimated_usage(spec.data, "".join(texts)))


def _refused(error: KiwiError) -> _Failed:
    """Return why a request got no stream, in the provider's own words where it has some."""
    status, body = error.details.get("status"), as_text(error.details.get("body"))
    try:
        value: Json = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    first = as_object(value[0] if isinstance(value, list) and value else value)
    said = first.get("error", first.get("message", ""))
    message = as_text(as_object(said).get("message")) or (said if isinstance(said, str) else compact(said))
    return _Failed(
        f"{error.message} {f'It said: {message[:_QUOTED]}' if message else ''}".strip(),
        status=status if isinstance(status, int) else 0,
        cause=as_text(error.details.get("cause")) if not isinstance(status, int) else "",
        text=body,
        after=error.details.get("retry_after"),
    )


def estimated_usage(request: bytes, reply: str) -> TokenUsage:
    """Return about how many tokens a request and the text of its reply have."""
    return TokenUsage(
        input=-(-len(request) // _TOKEN_LENGTH), output=-(-len(reply) // _TOKEN_LENGTH), is_estimated=True
    )
