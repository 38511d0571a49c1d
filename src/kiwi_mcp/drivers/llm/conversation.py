"""What every dialect sends: each call with its result, and JSON that the next request only appends to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256

import msgspec
from msgspec import Raw, Struct

from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.domain.messages import Message, Prompt, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from kiwi_mcp.drivers.llm.provider import ModelChoice

CONTINUE = Message("user", (TextPart("Continue."),))
"""Stands where a conversation needs a message of the user and has none."""
NO_RESULT = "No result of this call was recorded."
_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


class DialectRequest(Struct, frozen=True):
    """A request in the format of a provider; header values may hold `${NAME}`."""

    url: str
    headers: Mapping[str, str]
    body: bytes


def request_to(choice: ModelChoice, body: Mapping[str, object], **headers: str) -> DialectRequest:
    """Return a request with the headers of the provider. The body is written in the order of its keys."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    auth = {choice.auth_header: choice.auth} if choice.auth else {}
    return DialectRequest(
        choice.url, {"content-type": "application/json", **named, **choice.headers, **auth}, dump(body)
    )


def dump(value: object) -> bytes:
    """Return JSON; equal values give equal bytes."""
    return msgspec.json.encode(value)


def input_schema(parameters: JsonObject) -> JsonObject:
    """Return the schema of a tool's arguments, which providers want to be an object's."""
    return parameters if parameters.get("type") == "object" else {"type": "object", "properties": {}, **parameters}


def arguments_text(call: ToolCallPart) -> str:
    """Return a call's arguments as the text of an object: exactly the model's own, or below a key if it is no object.

    Many servers parse the arguments of earlier calls, and refuse the whole conversation for ever if they cannot.
    """
    if is_object(call.arguments):
        return call.arguments
    return compact({"unreadable_arguments": call.arguments} if call.arguments.strip() else {})


def arguments_of(call: ToolCallPart) -> Raw:
    """Return a call's arguments as an object that is written as `arguments_text` has it."""
    return Raw(arguments_text(call).encode())


def is_object(text: str) -> bool:
    """Whether a text is one whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def turns(prompt: Prompt, choice: ModelChoice) -> list[Message]:
    """Return the messages as all providers accept them.

    Each call is followed by exactly one result, in the order of the calls. Ids are unique and of a form that every
    provider takes. Empty texts and the reasoning of other models are left out. It ends with a message to the model.
    """
    found = _Turns()
    for message in prompt.messages:
        match message.role:
            case "assistant":
                found.add_reply(_said(message, choice))
            case "tool":
                found.add_results(message)
            case _:
                found.add_user([part for part in message.parts if isinstance(part, TextPart) and part.text.strip()])
    return found.finish()


_Said = TextPart | ReasoningPart | ToolCallPart


def _said(message: Message, choice: ModelChoice) -> list[_Said]:
    """Return what a model is told that it said: no text after a call, and no thought that nothing follows."""
    parts = [part for part in message.parts if not isinstance(part, ToolResultPart) and _is_sent(part, choice)]
    first = next((at for at, part in enumerate(parts) if isinstance(part, ToolCallPart)), len(parts))
    parts = [*parts[:first], *sorted(parts[first:], key=lambda part: not isinstance(part, TextPart))]
    while parts and isinstance(parts[-1], ReasoningPart):
        parts.pop()
    return parts


def _is_sent(part: _Said, choice: ModelChoice) -> bool:
    match part:
        case TextPart(text=text):
            return bool(text.strip())
        case ReasoningPart(provider=provider, model=model):
            return (provider, model) == (choice.provider, choice.model)
        case _:
            return True


class _Turns:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._calls: list[tuple[str, ToolCallPart]] = []
        """The open calls with the ids that the model gave them."""
        self._results: list[ToolResultPart] = []
        self._ids: set[str] = set()

    def add_reply(self, parts: list[_Said]) -> None:
        self._close_calls()
        if not parts:
            return
        if not self._messages or self._messages[-1].role == "assistant":
            self._messages.append(CONTINUE)
        renamed = [self._with_own_id(part) if isinstance(part, ToolCallPart) else part for part in parts]
        self._messages.append(Message("assistant", tuple(renamed)))
        given = [part.id for part in parts if isinstance(part, ToolCallPart)]
        self._calls = list(zip(given, (part for part in renamed if isinstance(part, ToolCallPart)), strict=True))

    def _with_own_id(self, call: ToolCallPart) -> ToolCallPart:
        own = call.id
        while not _ID.fullmatch(own) or own in self._ids:
            own = f"call_{sha256(f'{own}/{len(self._ids)}'.encode()).hexdigest()[:24]}"
        self._ids.add(own)
        return msgspec.structs.replace(call, id=own)

    def add_results(self, message: Message) -> None:
        self._results += [part for part in message.parts if isinstance(part, ToolResultPart)]

    def add_user(self, parts: list[TextPart]) -> None:
        self._close_calls()
        if parts:
            self._messages.append(Message("user", tuple(parts)))

    def _close_calls(self) -> None:
        left = list(self._results)
        found: list[ToolResultPart] = []
        for given, call in self._calls:
            match = next((one for one in left if one.id == given), None)
            if match is not None:
                left.remove(match)
            result = match or ToolResultPart(call.id, call.name, NO_RESULT, is_error=True)
            found.append(msgspec.structs.replace(result, id=call.id, name=call.name))
        if found:
            self._messages.append(Message("tool", tuple(found)))
        if texts := [TextPart(part.content) for part in left if part.content.strip()]:
            self._messages.append(Message("user", tuple(texts)))
        self._calls, self._results = [], []

    def finish(self) -> list[Message]:
        self._close_calls()
        if not self._messages or self._messages[-1].role == "assistant":
            self._messages.append(CONTINUE)
        return self._messages
