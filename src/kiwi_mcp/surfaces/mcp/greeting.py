"""Stage one: the opening of a conversation, answered from prepared text before anything large is imported.

Importing the SDK takes thirty times as long as starting Python, and a client waits for its list of tools before it
does anything. So `prepare` asks the SDK once, when Kiwi is built, for its answers to `initialize`, `ping`,
`server/discover` and `tools/list`, and this stage gives them out. An owner who prefers other tools, or has servers, has
a list of their own: this stage gives out the one that stage two has made since either was last changed, and stage two
tells the client if it is another by now.

It answers only what the SDK would answer in the same way for certain. The first line that is anything else goes to
the SDK unanswered, together with the lines that decide how the SDK sees the connection.
Nothing is imported here that `json` does not import already.
"""

from __future__ import annotations

import json
import os

from kiwi_mcp.surfaces.mcp.lines import Lines
from kiwi_mcp.surfaces.mcp.lists import recall, stamp
from kiwi_mcp.surfaces.mcp.stdio import Wire

VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"

_READ_SIZE = 65_536
_LONGEST_OPENING = 65_536
_MOST_BRACKETS = 100
"""How many brackets an opening may hold: far below any parser's limit on nesting."""
_LARGEST_ID = 2**53

# Shapes: a type stands for itself, `{}` for any object, a dict for an object whose known members fit, `"*"` for
# every member, a list for a list of the shape in it, None for what is left to the SDK. Members that no shape names
# are ignored, as the SDK does.
_CREATE: dict[str, object] = {"create": {}, "createMessage": {}}
_CAPABILITIES = {
    "roots": {"listChanged": bool},
    "sampling": {"context": {}, "tools": {}},
    "elicitation": {"form": {}, "url": {}},
    "experimental": {"*": {}},
    "extensions": {"*": {}},
    "tasks": {"cancel": {}, "list": {}, "requests": {"elicitation": _CREATE, "sampling": _CREATE}},
}
_ICON = {"src": str, "mimeType": str, "sizes": [str], "theme": None}
_CLIENT = {"name": str, "version": str, "title": str, "description": str, "websiteUrl": str, "icons": [_ICON]}
_INITIALIZE = {"protocolVersion": str, "capabilities": _CAPABILITIES, "clientInfo": _CLIENT}


class Opening:
    """What stage one leaves: the lines that the SDK has to hear as well, and those that nobody answered yet.

    `listed` is the list of tools that was given out, with the era it was given in.
    """

    __slots__ = ("heard", "lines", "listed")

    def __init__(self, lines: Lines, heard: list[bytes], listed: tuple[str, str] | None = None) -> None:
        self.lines = lines
        self.heard = heard
        self.listed = listed


class Greeting:
    """What was said so far, and what can be answered to it."""

    def __init__(self, prepared: dict[str, dict[str, str]], tools: dict[str, str]) -> None:
        self._prepared = prepared
        self._tools = tools
        self._era = ""
        self.heard: list[bytes] = []
        self.listed: tuple[str, str] | None = None

    def answer(self, line: bytes) -> bytes | None:
        """Return the reply to a line, empty where none is due; None where the SDK has to answer."""
        if not line.strip():
            return b""
        message = read(line)
        if message is None:
            return None
        if "id" not in message:
            return b"" if self._notes(message, line) else None
        result = self._result(message, line)
        number = json.dumps(message["id"], ensure_ascii=False)
        return None if result is None else f'{{"jsonrpc":"2.0","id":{number},"result":{result}}}\n'.encode()

    def _notes(self, message: dict[str, object], line: bytes) -> bool:
        if self._era != "legacy" or message["method"] != "notifications/initialized" or "params" in message:
            return False
        self.heard.append(line)
        return True

    def _result(self, message: dict[str, object], line: bytes) -> str | None:
        method, params = str(message["method"]), message.get("params", {})
        if not isinstance(params, dict):
            return None
        if method == "initialize":
            return self._initialize(params, line)
        era = self._era_of(params)
        text = self._tools.get(era) if method == "tools/list" else self._prepared.get(era, {}).get(method)
        if text is not None and not self._era:
            self._open(era, line)
        if text is not None and method == "tools/list":
            self.listed = (era, text)
        return text

    def _initialize(self, params: dict[str, object], line: bytes) -> str | None:
        if self._era or not is_handshake(params):
            return None
        self._open("legacy", line)
        answers = self._prepared["initialize"]
        return answers.get(str(params["protocolVersion"])) or answers["else"]

    def _open(self, era: str, line: bytes) -> None:
        # The first request decides the era for good, so the SDK has to hear it too.
        self._era = era
        self.heard.append(line)

    def _era_of(self, params: dict[str, object]) -> str:
        """Return the era of a request that fits this conversation for certain; nothing where that is open."""
        if is_envelope(params, self._prepared["versions"]["modern"]):
            return "modern" if self._era != "legacy" else ""
        return "legacy" if self._era == "legacy" and is_plain(params) else ""


def greet(wire: Wire, greeting: Greeting) -> Opening:
    """Answer lines until the list of tools was given, or the SDK is needed, or the client left."""
    lines = Lines()
    while greeting.listed is None:
        line = lines.take()
        if line is None:
            if lines.is_ended:
                break
            lines.feed(os.read(wire.inbound, _READ_SIZE))
            continue
        reply = greeting.answer(line)
        if reply is None:
            lines.push_back(line)
            break
        wire.write(reply)
    return Opening(lines, greeting.heard, greeting.listed)


def load_prepared() -> dict[str, dict[str, str]]:
    """Return the SDK's answers, as they were written when Kiwi was built."""
    folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would cost as much as the rest of this stage
    with open(os.path.join(folder, "prepared.json"), encoding="utf-8") as file:  # noqa: PTH118, PTH123 - the same
        prepared: dict[str, dict[str, str]] = json.load(file)
    return prepared


def load_tools(prepared: dict[str, dict[str, str]], project: str) -> dict[str, str]:
    """Return the list of tools by era: as it was here last, or as prepared; nothing if neither holds."""
    return recall(project) or (prepared["tools"] if stamp() is None else {})


def read(line: bytes) -> dict[str, object] | None:
    """Return a line as a JSON-RPC request or notification; None unless every parser would agree on it."""
    if len(line) > _LONGEST_OPENING or b"\\u" in line or line.count(b"{") + line.count(b"[") > _MOST_BRACKETS:
        return None
    try:
        message = json.loads(line.decode(), parse_constant=_refuse)
    except ValueError:
        return None
    if type(message) is not dict or not message.keys() <= {"jsonrpc", "id", "method", "params"}:
        return None
    is_named = message.get("jsonrpc") == "2.0" and type(message.get("method")) is str
    return message if is_named and fits(message, {"params": {}}) and _is_id(message.get("id", 0)) else None


def fits(value: object, shape: object) -> bool:
    """Whether a value has a shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        others = shape.get("*", object)
        return all(fits(part, shape.get(name, others)) for name, part in value.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(part, shape[0]) for part in value)
    return shape is object or type(value) is shape


def is_handshake(params: dict[str, object]) -> bool:
    """Whether the SDK accepts these parameters of `initialize`."""
    if not params.keys() >= _INITIALIZE.keys() or not is_plain({"_meta": params.get("_meta", {})}):
        return False
    return fits(params, _INITIALIZE) and is_client(params["clientInfo"])


def is_plain(params: dict[str, object]) -> bool:
    """Whether the parameters say nothing, or ask for progress at most."""
    meta = params.get("_meta", {})
    return (
        params.keys() <= {"_meta"} and isinstance(meta, dict) and meta.keys() <= {"progressToken"} and _asks_well(meta)
    )


def is_envelope(params: dict[str, object], version: str) -> bool:
    """Whether the parameters are nothing but the envelope that every request of the modern era carries."""
    meta = params.get("_meta")
    if params.keys() != {"_meta"} or not isinstance(meta, dict):
        return False
    if not meta.keys() <= {VERSION_KEY, CAPABILITIES_KEY, CLIENT_KEY, "progressToken"} or not _asks_well(meta):
        return False
    is_known = meta.get(VERSION_KEY) == version and fits(meta.get(CAPABILITIES_KEY), _CAPABILITIES)
    return is_known and (CLIENT_KEY not in meta or is_client(meta[CLIENT_KEY]))


def is_client(value: object) -> bool:
    """Whether a client says who it is in the form that the SDK takes."""
    if not isinstance(value, dict) or not value.keys() >= {"name", "version"} or not fits(value, _CLIENT):
        return False
    return all("src" in icon for icon in value.get("icons", []))


def _asks_well(meta: dict[str, object]) -> bool:
    return _is_id(meta.get("progressToken", 0))


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and abs(value) < _LARGEST_ID)


def _refuse(constant: str) -> object:
    raise ValueError(constant)
