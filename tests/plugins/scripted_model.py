"""A scripted model on loopback: it answers in all five dialects, and refuses every request that breaks a rule of one.

A test says what the model will do (`scripted_model.will(use("search", query="x"), say("Found."))`) and points a
provider at it (`scripted_model.config("anthropic")`). A request that breaks a rule gets the status 400 and is listed in
`faults`; the fixture fails the test that leaves some there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any, Literal

import jsonschema_rs
import msgspec
import pytest

KEY = "scripted-key"
MODEL, OTHER_MODEL = "scripted-1", "scripted-2"
DIALECT_NAMES = ("openai_chat", "openai_responses", "anthropic", "gemini", "ollama")
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": f"/v1beta/models/{MODEL}:streamGenerateContent",
    "ollama": "/api/chat",
}
_CUT = b""
"""Where a broken stream ends: before the last piece of its last part."""
_PIECE = 7
_COMPACTED = "Summary of what was done before"


@dataclass(frozen=True)
class ScriptedCall:
    """A call that the model asks for."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class ScriptedTurn:
    """What the model does for one request."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    how: Literal["whole", "broken", "stalled", "endless", "html", "json", "empty", "silent"] = "whole"
    status: int = 200
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stop: Literal["", "length", "filtered"] = ""
    usage: tuple[int, int, int] = (100, 0, 20)
    """Tokens of the input in all, of those from the cache, and of the output; nothing is counted if all are 0."""

    def __and__(self, other: ScriptedTurn) -> ScriptedTurn:
        """Return one turn that does both."""
        return replace(
            self,
            text=self.text + other.text,
            reasoning=self.reasoning + other.reasoning,
            calls=(*self.calls, *other.calls),
        )


def say(text: str, *, reasoning: str = "") -> ScriptedTurn:
    """Answer with a text."""
    return ScriptedTurn(text, reasoning)


def use(name: str, /, **arguments: object) -> ScriptedTurn:
    """Call a tool; `use(…) & use(…)` calls two at once."""
    return use_text(name, json.dumps(arguments))


def use_text(name: str, arguments: str) -> ScriptedTurn:
    """Call a tool with arguments as text, which need not be JSON where the dialect sends text."""
    return ScriptedTurn(calls=(ScriptedCall(name, arguments),))


def break_off(turn: ScriptedTurn) -> ScriptedTurn:
    """Lose the connection before the last piece of a turn."""
    return replace(turn, how="broken")


def stall(text: str) -> ScriptedTurn:
    """Write a text without its last piece, and then nothing until the model is closed."""
    return ScriptedTurn(text, how="stalled")


def fail(status: int, message: str = "Scripted failure.", *, retry_after: str = "") -> ScriptedTurn:
    """Answer with an error."""
    return ScriptedTurn(status=status, message=message, headers={"Retry-After": retry_after} if retry_after else {})


def endless() -> ScriptedTurn:
    """Answer with a text that never ends."""
    return ScriptedTurn("and so on ", how="endless")


def html() -> ScriptedTurn:
    """Answer with a web page."""
    return ScriptedTurn(how="html")


def empty() -> ScriptedTurn:
    """Answer with a stream that has an end and nothing else."""
    return ScriptedTurn()


@dataclass(frozen=True)
class ModelRequest:
    """One request that the model received."""

    dialect: str
    headers: Mapping[str, str]
    body: bytes
    json: Any

    @property
    def messages(self) -> list[Any]:
        """The conversation, in the format of the dialect."""
        return list(self.json[CONVERSATION[self.dialect]])

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools that the model sees."""
        return [name for name, _ in _tools(self.dialect, self.json)]


class ScriptedModel:
    """A model that follows a script, and the requests that it received."""

    def __init__(self) -> None:
        self.host = ""
        self.requests: list[ModelRequest] = []
        self.faults: list[str] = []
        """The rules that requests broke."""
        self.default: Callable[[ModelRequest], ScriptedTurn] | None = None
        """What the model does after the script has ended; without it the status 500."""
        self.closed = Event()
        self.on_request: Callable[[ModelRequest], None] = lambda _: None
        """Called for every request, in the thread of its connection, before it is answered."""
        self._script: list[ScriptedTurn] = []
        self._before: dict[bytes, ModelRequest] = {}
        self._calls = 0
        self._lock = Lock()

    def will(self, *turns: ScriptedTurn) -> None:
        """Add turns to the script."""
        with self._lock:
            self._script += turns

    def will_by_text(self, scripts: Mapping[str, list[ScriptedTurn]]) -> None:
        """Follow one script for each conversation, chosen by a text that its requests contain."""

        def turn(request: ModelRequest) -> ScriptedTurn:
            said = json.dumps(request.messages[:2], ensure_ascii=False)
            script = next((script for text, script in scripts.items() if text in said and script), None)
            return script.pop(0) if script else fail(500, "The script of this conversation has ended.")

        self.default = turn

    @property
    def left(self) -> int:
        """The number of turns that have not been played."""
        return len(self._script)

    def url(self, dialect: str) -> str:
        """The URL of the model in a dialect."""
        return f"http://{self.host}{PATHS[dialect]}{'?alt=sse' if dialect == 'gemini' else ''}"

    def config(self, dialect: str, **more: object) -> dict[str, Any]:
        """The config of a runtime that uses the model; its key is the variable `SCRIPTED_KEY`."""
        auth = {} if dialect == "ollama" else {"auth": "Bearer ${SCRIPTED_KEY}"}
        model = {"context": 32_768, "max_output": 4_096, "price": "free"}
        tiers = dict.fromkeys(("fast", "balanced", "powerful"), MODEL)
        return {"dialect": dialect, "url": self.url(dialect), **auth, "models": {MODEL: model}, "tiers": tiers, **more}

    def receive(self, request: ModelRequest) -> ScriptedTurn:
        """Check a request and return what to do."""
        with self._lock:
            found = [*_faults(request), *self._prefix_faults(request)]
            self.requests.append(request)
            if found:
                self.faults += found
                return fail(400, "; ".join(found))
            if not self._script and self.default is None:
                return fail(500, "The script has ended.")
            turn = self._script.pop(0) if self._script else self.default(request)  # type: ignore[misc]  # checked above
            return replace(turn, calls=tuple(self._with_id(call) for call in turn.calls))

    def _with_id(self, call: ScriptedCall) -> ScriptedCall:
        self._calls += 1
        return replace(call, id=call.id or f"call_{self._calls}")

    def _prefix_faults(self, request: ModelRequest) -> Iterator[str]:
        """Yield how a request does not begin with the one before it; one with fewer messages begins anew."""
        if not request.messages:
            return
        now = _parts_of(request)
        # A compaction begins a new prefix, with its summary.
        first = [*request.messages[:2], *(one for one in request.messages if _COMPACTED in json.dumps(one))]
        key = b"\n".join([request.dialect.encode(), now["system"], json.dumps(first).encode()])
        before = self._before.get(key)
        self._before[key] = request
        if before is None or len(before.messages) > len(request.messages):
            return
        then = _parts_of(before)
        for part in ("tools", "messages"):
            if not now[part].startswith(then[part].rstrip(b"]}")):
                yield f"{part} do not begin with those of the request before"


def _parts_of(request: ModelRequest) -> dict[str, bytes]:
    """Return the bytes of tools, system text and messages, without cache markers."""
    raw = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    names = {"tools": "tools", "system": SYSTEM[request.dialect], "messages": CONVERSATION[request.dialect]}
    parts = {part: bytes(raw.get(name, msgspec.Raw(b""))) for part, name in names.items()}
    return {part: re.sub(rb',"cache_control":\{"type":"ephemeral"\}', b"", text) for part, text in parts.items()}


CONVERSATION = {
    "openai_chat": "messages",
    "openai_responses": "input",
    "anthropic": "messages",
    "gemini": "contents",
    "ollama": "messages",
}
SYSTEM = {
    "openai_chat": "",
    "openai_responses": "instructions",
    "anthropic": "system",
    "gemini": "systemInstruction",
    "ollama": "",
}


# Rules ----------------------------------------------------------------------------------------------------------------

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_ID = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_TEXT = {"type": "string", "pattern": "\\S"}
_COUNT = {"type": "integer", "minimum": 1}
_PARAMETERS = {"type": "object", "required": ["type", "properties"], "properties": {"type": {"const": "object"}}}
_CACHE = {"type": "object", "additionalProperties": False, "properties": {"type": {"const": "ephemeral"}}}


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def _list(*items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": {"anyOf": list(items)}}


_FUNCTION = _object({"name": _NAME, "description": {"type": "string"}, "parameters": _PARAMETERS})
_TEMPERATURE = {"type": "number", "minimum": 0, "maximum": 2}
_CHAT_TEXTS = _list(_object({"type": {"const": "text"}, "text": {"type": "string"}}))
_CHAT_CALL = _object(
    {
        "id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "type": {"const": "function"},
        "function": _object({"name": _NAME, "arguments": {"type": "string"}}),
    }
)
_CHAT_REPLY = _object(
    {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
    tool_calls=_list(_CHAT_CALL),
    reasoning_content={"type": "string"},
)
_CHAT = {
    **_object(
        {
            "model": {"enum": [MODEL, OTHER_MODEL]},
            "stream": {"const": True},
            "messages": _list(
                _object({"role": {"const": "system"}, "content": _TEXT}),
                _object({"role": {"const": "user"}, "content": _TEXT}),
                {**_CHAT_REPLY, "anyOf": [{"required": ["tool_calls"]}, {"properties": {"content": _TEXT}}]},
                _object(
                    {
                        "role": {"const": "tool"},
                        "tool_call_id": _ID,
                        "content": {"anyOf": [{"type": "string"}, _CHAT_TEXTS]},
                    }
                ),
            ),
        },
        stream_options=_object({"include_usage": {"const": True}}),
        temperature=_TEMPERATURE,
        max_completion_tokens=_COUNT,
        max_tokens=_COUNT,
        prompt_cache_key={"type": "string", "maxLength": 64},
        tools=_list(_object({"type": {"const": "function"}, "function": _FUNCTION})),
    ),
    "oneOf": [{"required": ["max_completion_tokens"]}, {"required": ["max_tokens"]}],
}
_INPUT_TEXT = _object({"type": {"const": "input_text"}, "text": {"type": "string"}})
_OUTPUT_TEXT = _object({"type": {"const": "output_text"}, "text": _TEXT})
_SUMMARY = {"type": "array", "items": _object({"type": {"const": "summary_text"}, "text": {"type": "string"}})}
_RESPONSES = _object(
    {
        "model": {"enum": [MODEL, OTHER_MODEL]},
        "stream": {"const": True},
        "store": {"const": False},
        "max_output_tokens": {"type": "integer", "minimum": 16},
        "input": _list(
            _object({"type": {"const": "message"}, "role": {"const": "user"}, "content": _list(_INPUT_TEXT)}),
            _object({"type": {"const": "message"}, "role": {"const": "assistant"}, "content": _list(_OUTPUT_TEXT)}),
            _object(
                {"type": {"const": "function_call"}, "call_id": _ID, "name": _NAME, "arguments": {"type": "string"}}
            ),
            _object(
                {
                    "type": {"const": "function_call_output"},
                    "call_id": _ID,
                    "output": {"anyOf": [{"type": "string"}, _list(_INPUT_TEXT)]},
                }
            ),
            _object(
                {
                    "type": {"const": "reasoning"},
                    "id": {"type": "string"},
                    "summary": _SUMMARY,
                    "encrypted_content": {"type": "string"},
                }
            ),
        ),
    },
    instructions=_TEXT,
    temperature=_TEMPERATURE,
    include={"const": ["reasoning.encrypted_content"]},
    prompt_cache_key={"type": "string", "maxLength": 64},
    tools=_list(
        _object(
            {
                "type": {"const": "function"},
                "name": _NAME,
                "description": {"type": "string"},
                "parameters": _PARAMETERS,
                "strict": {"const": False},
            }
        )
    ),
)
_BLOCK = _object({"type": {"const": "text"}, "text": _TEXT}, cache_control=_CACHE)
_ANTHROPIC = _object(
    {
        "model": {"enum": [MODEL, OTHER_MODEL]},
        "stream": {"const": True},
        "max_tokens": _COUNT,
        "messages": _list(
            _object(
                {
                    "role": {"const": "user"},
                    "content": _list(
                        _BLOCK,
                        _object(
                            {
                                "type": {"const": "tool_result"},
                                "tool_use_id": _ID,
                                "content": {"anyOf": [{"type": "string"}, _list(_BLOCK)]},
                            },
                            is_error={"const": True},
                            cache_control=_CACHE,
                        ),
                    ),
                }
            ),
            _object(
                {
                    "role": {"const": "assistant"},
                    "content": _list(
                        _object({"type": {"const": "text"}, "text": _TEXT}),
                        _object({"type": {"const": "tool_use"}, "id": _ID, "name": _NAME, "input": {"type": "object"}}),
                        _object(
                            {
                                "type": {"const": "thinking"},
                                "thinking": {"type": "string"},
                                "signature": {"type": "string", "minLength": 1},
                            }
                        ),
                        _object({"type": {"const": "redacted_thinking"}, "data": {"type": "string"}}),
                    ),
                }
            ),
        ),
    },
    temperature={"type": "number", "minimum": 0, "maximum": 1},
    system=_list(_BLOCK),
    tools=_list(
        _object({"name": _NAME, "description": {"type": "string"}, "input_schema": _PARAMETERS}, cache_control=_CACHE)
    ),
)
_RESPONSE = {"type": "object", "minProperties": 1}
_GEMINI = _object(
    {
        "contents": _list(
            _object(
                {
                    "role": {"const": "user"},
                    "parts": _list(
                        _object({"text": _TEXT}),
                        _object({"functionResponse": _object({"id": _ID, "name": _NAME, "response": _RESPONSE})}),
                    ),
                }
            ),
            _object(
                {
                    "role": {"const": "model"},
                    "parts": _list(
                        _object({"text": _TEXT}),
                        _object({"text": {"const": ""}, "thoughtSignature": {"type": "string"}}),
                        _object(
                            {"functionCall": _object({"id": _ID, "name": _NAME, "args": {"type": "object"}})},
                            thoughtSignature={"type": "string"},
                        ),
                    ),
                }
            ),
        ),
        "generationConfig": _object({"maxOutputTokens": _COUNT}, temperature=_TEMPERATURE),
    },
    systemInstruction=_object({"parts": _list(_object({"text": _TEXT}))}),
    tools=_list(
        _object(
            {
                "functionDeclarations": _list(
                    _object({"name": _NAME, "description": {"type": "string"}, "parametersJsonSchema": _PARAMETERS})
                )
            }
        )
    ),
)
_OLLAMA_CALL = _object({"function": _object({"name": _NAME, "arguments": {"type": "object"}})}, id=_ID)
_OLLAMA = _object(
    {
        "model": {"enum": [MODEL, OTHER_MODEL]},
        "stream": {"const": True},
        "options": _object({"num_predict": _COUNT}, num_ctx=_COUNT, temperature=_TEMPERATURE),
        "messages": _list(
            _object({"role": {"enum": ["system", "user"]}, "content": _TEXT}),
            _object(
                {"role": {"const": "assistant"}, "content": {"type": "string"}},
                thinking={"type": "string"},
                tool_calls=_list(_OLLAMA_CALL),
            ),
            _object({"role": {"const": "tool"}, "tool_name": _NAME, "content": {"type": "string"}}, tool_call_id=_ID),
        ),
    },
    tools=_list(_object({"type": {"const": "function"}, "function": _FUNCTION})),
)
SCHEMAS = {
    name: jsonschema_rs.Draft202012Validator(schema)
    for name, schema in {
        "openai_chat": _CHAT,
        "openai_responses": _RESPONSES,
        "anthropic": _ANTHROPIC,
        "gemini": _GEMINI,
        "ollama": _OLLAMA,
    }.items()
}


def request_faults(dialect: str, body: bytes) -> list[str]:
    """Return the rules of a dialect that a body breaks."""
    return list(_faults(ModelRequest(dialect, {}, body, json.loads(body))))


def _faults(request: ModelRequest) -> Iterator[str]:
    found = [
        f"{error.instance_path}: {error.message:.300}" for error in SCHEMAS[request.dialect].iter_errors(request.json)
    ]
    if found:
        yield from found[:3]
        return
    names = request.tool_names
    if len(names) != len(set(names)):
        yield "two tools have the same name"
    yield from _order_faults(request)


def _tools(dialect: str, body: Any) -> Iterator[tuple[str, Any]]:
    for tool in body.get("tools", ()):
        match dialect:
            case "gemini":
                yield from ((one["name"], one) for one in tool["functionDeclarations"])
            case "openai_chat" | "ollama":
                yield tool["function"]["name"], tool
            case _:
                yield tool["name"], tool


Step = tuple[Literal["user", "reply", "call", "result", "thought"], str, int]
"""What a message does: its kind, the id of its call, and the number of the message it is in."""


def steps_of(request: ModelRequest) -> list[Step]:
    """Return a conversation as a list of steps."""
    return [
        step for number, message in enumerate(request.messages) for step in _steps(request.dialect, message, number)
    ]


def _steps(dialect: str, message: Any, number: int) -> Iterator[Step]:  # noqa: PLR0912 - one case for each dialect
    match dialect:
        case "openai_chat" | "ollama":
            role = message["role"]
            if role == "user":
                yield "user", "", number
            elif role == "tool":
                yield "result", message.get("tool_call_id", ""), number
            elif role == "assistant":
                if message["content"]:
                    yield "reply", "", number
                for call in message.get("tool_calls", ()):
                    yield "call", call.get("id", ""), number
        case "openai_responses":
            kinds: dict[str, Any] = {"function_call": "call", "function_call_output": "result", "reasoning": "thought"}
            said: Any = kinds.get(message["type"]) or ("user" if message["role"] == "user" else "reply")
            yield said, message.get("call_id", ""), number
        case "anthropic":
            for block in message["content"]:
                match block["type"]:
                    case "tool_use":
                        yield "call", block["id"], number
                    case "tool_result":
                        yield "result", block["tool_use_id"], number
                    case "text":
                        yield ("user" if message["role"] == "user" else "reply"), "", number
                    case _:
                        yield "thought", "", number
        case _:
            for part in message["parts"]:
                if "functionCall" in part:
                    yield "call", part["functionCall"]["id"], number
                elif "functionResponse" in part:
                    yield "result", part["functionResponse"]["id"], number
                elif "thoughtSignature" in part:
                    yield "thought", "", number
                else:
                    yield ("user" if message["role"] == "user" else "reply"), "", number


def _order_faults(request: ModelRequest) -> Iterator[str]:
    """Yield how calls and results do not pair, or messages stand in an order that the dialect refuses."""
    dialect, opened, seen = request.dialect, list[str](), set[str]()
    steps = steps_of(request)
    answered: list[str] = []
    for kind, call_id, _ in steps:
        if kind == "result":
            if call_id not in opened:
                yield f"the result {call_id} has no call right before it"
                return
            opened.remove(call_id)
            answered.append(call_id)
            continue
        if opened and kind not in {"call", "thought"}:
            yield f"the calls {opened} have no results before the next message"
            return
        if kind == "call":
            if call_id in seen:
                yield f"the id {call_id} is used twice"
            seen.add(call_id)
            opened.append(call_id)
    if opened:
        yield f"the calls {opened} have no results"
    if not steps or steps[-1][0] not in {"user", "result"}:
        yield "the last message is not one to the model"
    if dialect in {"anthropic", "gemini"}:
        roles = [message["role"] for message in request.messages]
        if roles[0] != "user" or any(one == two for one, two in itertools.pairwise(roles)):
            yield f"the roles do not alternate: {roles}"
    if dialect == "gemini":
        yield from _gemini_faults(request)
    if dialect == "anthropic":
        yield from _anthropic_faults(request)


def _gemini_faults(request: ModelRequest) -> Iterator[str]:
    order = [(kind, call_id) for kind, call_id, _ in steps_of(request)]
    if [one for kind, one in order if kind == "call"] != [one for kind, one in order if kind == "result"]:
        yield "the results are not in the order of the calls"
    for message in request.messages:
        calls = [part for part in message["parts"] if "functionCall" in part]
        if calls and "thoughtSignature" not in calls[0]:
            yield "the first call of a message has no thought signature"


def _anthropic_faults(request: ModelRequest) -> Iterator[str]:
    if request.body.count(b'"cache_control"') > 4:
        yield "there are more than four cache markers"
    for message in request.messages:
        kinds = [block["type"] for block in message["content"]]
        if kinds != sorted(kinds, key=lambda kind: kind != "tool_result") and "tool_result" in kinds:
            yield "results do not come first in their message"
        if message["role"] == "assistant" and kinds[-1] in {"thinking", "redacted_thinking"}:
            yield "a message ends with a thought"


def _header_fault(dialect: str, headers: Mapping[str, str]) -> str:
    if dialect == "anthropic" and headers.get("anthropic-version") == "2026-10-21":
        return "" if headers.get("authorization") == f"Bearer {KEY}" else "authorization"
    wanted = {
        "openai_chat": {"authorization": f"Bearer {KEY}"},
        "openai_responses": {"authorization": f"Bearer {KEY}"},
        "anthropic": {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
        "gemini": {"x-goog-api-key": KEY},
        "ollama": {},
    }[dialect]
    return next((name for name, value in wanted.items() if headers.get(name) != value), "")


# Streams --------------------------------------------------------------------------------------------------------------


def stream_of(dialect: str, turn: ScriptedTurn) -> Iterator[bytes]:
    """Yield the pieces of a turn as the provider sends them, with `_CUT` before the last piece of its last part."""
    return STREAMS[dialect](turn)


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def _cut_last(pieces: list[bytes]) -> Iterator[bytes]:
    yield from pieces[:-1]
    yield _CUT
    yield from pieces[-1:]


def _sse(data: object, event: str = "") -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _stop(turn: ScriptedTurn, *, end: str, calls: str, length: str, filtered: str) -> str:
    if turn.stop:
        return length if turn.stop == "length" else filtered
    return calls if turn.calls else end


def _chat(turn: ScriptedTurn) -> Iterator[bytes]:
    def chunk(delta: object, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _sse(
            {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
        )

    yield b": a comment\n\n"
    yield chunk({"role": "assistant", "content": "" if turn.text else None})
    pieces = [chunk({"reasoning_content": piece}) for piece in _pieces(turn.reasoning)]
    pieces += [chunk({"content": piece}) for piece in _pieces(turn.text)]
    for index, call in enumerate(turn.calls):
        function = {"name": call.name, "arguments": ""}
        pieces.append(
            chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        )
        pieces += [
            chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            for piece in _pieces(call.arguments)
        ]
    yield from _cut_last(pieces)
    yield chunk({}, _stop(turn, end="stop", calls="tool_calls", length="length", filtered="content_filter"))
    total, read, output = turn.usage
    if total:
        usage = {
            "prompt_tokens": total,
            "completion_tokens": output,
            "total_tokens": total + output,
            "prompt_tokens_details": {"cached_tokens": read},
        }
        last = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": []}
        yield _sse({**last, "usage": usage})
    yield b"data: [DONE]\n\n"


def _responses(turn: ScriptedTurn) -> Iterator[bytes]:  # noqa: PLR0915 - the events in their order
    number = iter(range(10_000))
    output: list[dict[str, Any]] = []

    def event(kind: str, **data: object) -> bytes:
        return _sse({"type": kind, "sequence_number": next(number), **data}, kind)

    def response(status: str, **more: object) -> dict[str, Any]:
        base = {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": status}
        fixed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "output": output}
        return {**base, **fixed, "error": None, "incomplete_details": None, **more}

    yield event("response.created", response=response("in_progress"))
    yield event("response.in_progress", response=response("in_progress"))
    pieces: list[bytes] = []
    if turn.reasoning:
        item: dict[str, Any] = {"id": "rs_1", "type": "reasoning", "summary": []}
        pieces.append(event("response.output_item.added", output_index=0, item=item))
        pieces += [
            event("response.reasoning_summary_text.delta", item_id="rs_1", output_index=0, summary_index=0, delta=piece)
            for piece in _pieces(turn.reasoning)
        ]
        summary = [{"type": "summary_text", "text": turn.reasoning}]
        output.append({**item, "summary": summary, "encrypted_content": f"sealed:{turn.reasoning}"})
        pieces.append(event("response.output_item.done", output_index=0, item=output[-1]))
    if turn.text:
        at = len(output)
        item = {"id": f"msg_{at}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        where = {"item_id": item["id"], "output_index": at, "content_index": 0}
        pieces.append(event("response.output_item.added", output_index=at, item=item))
        blank = {"type": "output_text", "text": "", "annotations": []}
        pieces.append(event("response.content_part.added", **where, part=blank))
        pieces += [
            event("response.output_text.delta", **where, delta=piece, logprobs=[]) for piece in _pieces(turn.text)
        ]
        done = {**blank, "text": turn.text}
        output.append({**item, "status": "completed", "content": [done]})
        if not turn.calls:
            yield from _cut_last(pieces)
            pieces = []
        pieces.append(event("response.output_text.done", **where, text=turn.text, logprobs=[]))
        pieces.append(event("response.content_part.done", **where, part=done))
        pieces.append(event("response.output_item.done", output_index=at, item=output[-1]))
    for call in turn.calls:
        at = len(output)
        item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        pieces.append(event("response.output_item.added", output_index=at, item={**item, "arguments": ""}))
        pieces += [
            event("response.function_call_arguments.delta", item_id=item["id"], output_index=at, delta=piece)
            for piece in _pieces(call.arguments)
        ]
        if call is turn.calls[-1]:
            yield from _cut_last(pieces)
            pieces = []
        whole = {"item_id": item["id"], "output_index": at, "name": call.name, "arguments": call.arguments}
        output.append({**item, "arguments": call.arguments, "status": "completed"})
        pieces.append(event("response.function_call_arguments.done", **whole))
        pieces.append(event("response.output_item.done", output_index=at, item=output[-1]))
    yield from pieces
    total, read, written = turn.usage
    usage = {
        "input_tokens": total,
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total + written,
    }
    counted = {"usage": usage} if total else {}
    if turn.stop:
        reason = "max_output_tokens" if turn.stop == "length" else "content_filter"
        ended = response("incomplete", incomplete_details={"reason": reason}, **counted)
        yield event("response.incomplete", response=ended)
    else:
        yield event("response.completed", response=response("completed", **counted))


def _anthropic(turn: ScriptedTurn) -> Iterator[bytes]:
    def event(kind: str, **data: object) -> bytes:
        return _sse({"type": kind, **data}, kind)

    total, read, output = turn.usage
    counts = {
        "input_tokens": total - read,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": 0,
        "output_tokens": 1,
    }
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": []}
    ends: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**message, **ends, "usage": counts if total else {}})
    yield event("ping")
    index = 0
    pieces: list[bytes] = []

    def block(start: object, deltas: list[dict[str, Any]], *, is_last: bool) -> Iterator[bytes]:
        nonlocal index
        rows = [event("content_block_start", index=index, content_block=start)]
        rows += [event("content_block_delta", index=index, delta=delta) for delta in deltas]
        yield from (_cut_last(rows) if is_last else rows)
        yield event("content_block_stop", index=index)
        index += 1

    if turn.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(turn.reasoning)]
        deltas.append({"type": "signature_delta", "signature": f"signed:{turn.reasoning}"})
        start = {"type": "thinking", "thinking": "", "signature": ""}
        yield from block(start, deltas, is_last=not turn.text and not turn.calls)
    if turn.text:
        deltas = [{"type": "text_delta", "text": piece} for piece in _pieces(turn.text)]
        yield from block({"type": "text", "text": ""}, deltas, is_last=not turn.calls)
    for call in turn.calls:
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *_pieces(call.arguments)]]
        start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}  # type: ignore[dict-item]
        yield from block(start, deltas, is_last=call is turn.calls[-1])
    yield from pieces
    reason = _stop(turn, end="end_turn", calls="tool_use", length="max_tokens", filtered="refusal")
    used = {"output_tokens": output} if total else {}
    yield event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=used)
    yield event("message_stop")


def _gemini(turn: ScriptedTurn) -> Iterator[bytes]:
    def chunk(*parts: object, reason: str = "") -> bytes:
        candidate: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}, "index": 0}
        if reason:
            candidate["finishReason"] = reason
        data: dict[str, Any] = {"candidates": [candidate], "modelVersion": MODEL, "responseId": "gemini-1"}
        total, read, output = turn.usage
        if total and reason:
            data["usageMetadata"] = {
                "promptTokenCount": total,
                "cachedContentTokenCount": read,
                "candidatesTokenCount": output,
                "totalTokenCount": total + output,
            }
        return _sse(data)

    pieces = [chunk({"text": piece, "thought": True}) for piece in _pieces(turn.reasoning)]
    pieces += [chunk({"text": piece}) for piece in _pieces(turn.text)]
    malformed = False
    for number, call in enumerate(turn.calls):
        try:
            arguments = msgspec.Raw(call.arguments.encode()) if isinstance(json.loads(call.arguments), dict) else None
        except ValueError:
            arguments = None
        if arguments is None:
            malformed = True
            continue
        part: dict[str, Any] = {"functionCall": {"id": call.id, "name": call.name, "args": "@"}}
        if number == 0:
            part["thoughtSignature"] = "c2lnbmVk"
        # The arguments are sent as they were written, blanks included.
        pieces.append(chunk(part).replace(b'"@"', bytes(arguments).replace(b"\n", b" ")))
    yield from _cut_last(pieces)
    reason = _stop(turn, end="STOP", calls="STOP", length="MAX_TOKENS", filtered="SAFETY")
    yield chunk({"text": ""}, reason="MALFORMED_FUNCTION_CALL" if malformed else reason)


def _ollama(turn: ScriptedTurn) -> Iterator[bytes]:
    def line(message: Mapping[str, object], **more: object) -> bytes:
        row = {"model": MODEL, "created_at": "2026-01-01T00:00:00Z", "message": {"role": "assistant", **message}}
        return f"{json.dumps({**row, 'done': False, **more}, ensure_ascii=False)}\n".encode()

    pieces = [line({"content": "", "thinking": piece}) for piece in _pieces(turn.reasoning)]
    pieces += [line({"content": piece}) for piece in _pieces(turn.text)]
    for call in turn.calls:
        try:
            is_whole = isinstance(json.loads(call.arguments), dict)
        except ValueError:
            is_whole = False
        if not is_whole:
            yield f"{json.dumps({'error': f'error parsing tool call: raw={call.arguments!r}'})}\n".encode()
            return
        function = {"name": call.name, "arguments": "@"}
        row = line({"content": "", "tool_calls": [{"id": call.id, "function": function}]})
        pieces.append(row.replace(b'"@"', call.arguments.replace("\n", " ").encode()))
    yield from _cut_last(pieces)
    total, _, output = turn.usage
    counts = {"prompt_eval_count": total, "eval_count": output} if total else {}
    yield line({"content": ""}, done=True, done_reason="length" if turn.stop == "length" else "stop", **counts)


STREAMS: Mapping[str, Callable[[ScriptedTurn], Iterator[bytes]]] = {
    "openai_chat": _chat,
    "openai_responses": _responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "ollama": _ollama,
}


def _error_body(dialect: str, status: int, message: str) -> object:
    match dialect:
        case "anthropic":
            kinds = {401: "authentication_error", 429: "rate_limit_error", 529: "overloaded_error"}
            return {"type": "error", "error": {"type": kinds.get(status, "invalid_request_error"), "message": message}}
        case "gemini":
            return {"error": {"code": status, "message": message, "status": "INVALID_ARGUMENT"}}
        case "ollama":
            return {"error": message}
        case _:
            return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


# The server -----------------------------------------------------------------------------------------------------------


@contextmanager
def scripted_server() -> Iterator[ScriptedModel]:
    """Serve a scripted model on a free port of this machine for the length of a block."""
    model = ScriptedModel()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            path, _, query = self.path.partition("?")
            dialect = next((name for name, known in PATHS.items() if known == path), "")
            if not dialect:
                return self.whole(404, {"error": {"message": f"There is nothing at {path}."}})
            if wrong := _header_fault(dialect, headers):
                return self.whole(401, _error_body(dialect, 401, f"The header {wrong} is wrong."))
            if dialect == "gemini" and query != "alt=sse":
                return self.whole(400, _error_body(dialect, 400, "The query must be alt=sse."))
            request = ModelRequest(dialect, headers, body, json.loads(body))
            model.on_request(request)
            turn = model.receive(request)
            if turn.status != 200:
                return self.whole(turn.status, _error_body(dialect, turn.status, turn.message), turn.headers)
            return self.play(dialect, turn)

        def whole(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            kind = "text/html" if isinstance(value, bytes) else "application/json"
            self.send_response(status)
            for name, text in {"content-type": kind, "content-length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def play(self, dialect: str, turn: ScriptedTurn) -> None:
            if turn.how == "html":
                return self.whole(200, b"<!doctype html><title>Welcome</title>")
            if turn.how == "json":
                return self.whole(200, {"object": "not a stream"})
            self.send_response(200)
            kind = "application/x-ndjson" if dialect == "ollama" else "text/event-stream; charset=utf-8"
            self.send_header("content-type", kind)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            if turn.how == "silent":
                model.closed.wait(60)
                self.close_connection = True
                return None
            pieces = list(stream_of(dialect, turn))
            if turn.how == "endless":
                cut = pieces.index(_CUT)
                while not model.closed.is_set():
                    self.chunk(b"".join(pieces[: cut + 2]) * 20)
                    pieces, cut = pieces[cut - 1 : cut + 2], 1
            for piece in pieces:
                if piece != _CUT:
                    self.chunk(piece)
                elif turn.how == "stalled":
                    model.closed.wait(60)
                    self.close_connection = True
                    return None
                elif turn.how == "broken":
                    self.close_connection = True
                    return None
            self.wfile.write(b"0\r\n\r\n")
            return None

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the signature of the library
            """Print nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return  # the client has gone

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        model.host = f"127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield model
        finally:
            model.closed.set()
            server.shutdown()
            thread.join(120)


@pytest.fixture
def scripted_model(loopback: None) -> Iterator[ScriptedModel]:
    """A scripted model; the test fails if a request broke a rule of its dialect."""
    with scripted_server() as model:
        yield model
    assert model.faults == []
