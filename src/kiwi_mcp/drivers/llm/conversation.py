"""The conversation with one model as it is sent: each call has one result, and a request only appends to the last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.messages import Message, Prompt, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from kiwi_mcp.drivers.llm.dialects import DIALECTS
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.manifest.templates import defaulted, variables

CONTINUE = Message("user", (TextPart("Continue."),))
"""Sent where a conversation needs a message of the user and has none."""
NO_RESULT = "No result of this call was recorded."
_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")
_ReplyPart = TextPart | ReasoningPart | ToolCallPart


class DialectRequest(Struct, frozen=True):
    """A request in the format of a provider; header values may hold `${NAME}`."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    sha256: str


class Conversation:
    """The messages of a thread in the dialect of its model. What was sent before is stored as bytes.

    Each call is followed by exactly one result, in the order of the calls. Ids are unique and of a form that every
    provider takes. Empty texts and the reasoning of other models are left out. It ends with a message to the model.
    """

    def __init__(self, choice: ModelChoice) -> None:
        self.choice = choice
        self._dialect = DIALECTS[choice.dialect]
        auth = {choice.auth_header: choice.auth} if choice.auth else {}
        self._headers: dict[str, str] = {
            "content-type": "application/json",
            **self._dialect.headers,
            **choice.headers,
            **auth,
        }
        sent: Json = [choice.url, {**self._headers}]
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

    def request(self, prompt: Prompt) -> DialectRequest:
        """Return the next request. The same list of messages may have grown; another one begins anew."""
        if prompt.messages is not self._messages:
            self._begin(prompt.messages)
        before = replace(prompt, messages=())
        if before != self._before:
            self._before, self._head = before, self._head_of(before)
            self._hash = sha256(self._head + self._done)
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
        body = b"".join((self._head, self._done, end))
        return DialectRequest(self.choice.url, self._headers, body, digest.hexdigest())

    def _head_of(self, before: Prompt) -> bytes:
        """Return a request up to its first message. It is written in the order of its keys."""
        body = self._dialect.head(before, self.choice)
        first = body.setdefault(self._dialect.messages, [])
        return msgspec.json.encode(body)[:-2] + (b"," if first else b"")

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
    parts = [part for part in message.parts if not isinstance(part, ToolResultPart) and _is_sent(part, choice)]
    first = next((at for at, part in enumerate(parts) if isinstance(part, ToolCallPart)), len(parts))
    parts = [*parts[:first], *sorted(parts[first:], key=lambda part: not isinstance(part, TextPart))]
    while parts and isinstance(parts[-1], ReasoningPart):
        parts.pop()
    return parts


def _is_sent(part: _ReplyPart, choice: ModelChoice) -> bool:
    match part:
        case TextPart(text=text):
            return bool(text.strip())
        case ReasoningPart(provider=provider, model=model):
            return (provider, model) == (choice.provider, choice.model)
        case _:
            return True
