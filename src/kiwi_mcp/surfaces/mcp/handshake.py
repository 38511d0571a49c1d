"""Stage one of `kiwi serve`: claims stdin and stdout, and answers the opening from prepared text or a cached list."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys

from kiwi_mcp import __version__

LINE_LIMIT = 16_000_000
"""The longest message that is read, in bytes."""

OVERLONG = b"\xff"
"""The placeholder of a line over the limit. It is not UTF-8, so it cannot be mistaken for a message."""
_LARGEST_LIST = 8_000_000
_LONGEST_FILE_NAME = 200
PREFERENCES = "memory/preferences.yaml"
"""The file with the preferences below the user's folder, unless `config.yaml` names another memory."""
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
_READ_SIZE = 65_536
_LONGEST_OPENING = 65_536
_MOST_BRACKETS = 100
"""How many brackets an opening may hold: far below any parser's limit on nesting."""
_LARGEST_ID = 2**53
# Shapes: a type stands for itself, `{}` for any object, a dict for an object with known members that fit, `"*"` for
# every member, a list for a list of the shape in it, None for what is left to the SDK. Members that no shape names are
# ignored, as the SDK does.
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


class LineBuffer:
    """Bytes that arrived and were not taken yet, one line at a time."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._returned: bytes | None = None
        self._scanned = 0
        self._is_skipping = False
        self._is_closed = False

    @property
    def is_ended(self) -> bool:
        """Whether no line is left and none will come."""
        return self._is_closed and not self._buffer and self._returned is None

    def feed(self, data: bytes) -> None:
        """Add what was read; no data is the end of the stream."""
        self._buffer += data
        self._is_closed = self._is_closed or not data

    def push_back(self, line: bytes) -> None:
        """Put the last line back, to be read again."""
        self._returned = line

    def take(self) -> bytes | None:
        """Return the next line without its end, `OVERLONG` in the place of one over the limit; None for now."""
        if self._returned is not None:
            line, self._returned = self._returned, None
            return line
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            if not self._is_skipping:
                return line if len(line) <= self._limit else OVERLONG
            self._is_skipping = False  # that was the tail of a line already reported as overlong
        if self._is_closed:
            line = bytes(self._buffer)
            self._buffer.clear()
            return line if line and not self._is_skipping else None
        self._scanned = len(self._buffer)
        if self._scanned <= self._limit:
            return None
        self._buffer.clear()
        self._scanned = 0
        is_new, self._is_skipping = not self._is_skipping, True
        return OVERLONG if is_new else None


class StdioPipe:
    """The two ends that carry the conversation: private duplicates, which no child inherits."""

    def __init__(self, inbound: int, outbound: int) -> None:
        self.inbound = inbound
        self.outbound = outbound

    def write(self, data: bytes) -> None:
        """Write all of the data, however long it takes; a client that has left ends the process quietly."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.outbound, rest) :]
        except BrokenPipeError:
            raise SystemExit(0) from None


def claim() -> StdioPipe:
    """Take standard input and output for the protocol, and leave nothing and standard error in their places.

    A stray `print`, of Kiwi or of a library, then goes to standard error and never between two messages; and a
    program that reads standard input finds it empty instead of eating a request.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    wire = StdioPipe(_duplicate(0), _duplicate(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # started without standard error
        os.dup2(nothing, 1)
    os.close(nothing)
    return wire


def _duplicate(number: int) -> int:
    try:
        # Above the standard three: one of them may be closed, and its number must not become the wire.
        private = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        raise SystemExit(0) from None  # there is no client to talk to
    os.set_blocking(private, True)
    return private


def stamp(preferences: str = PREFERENCES) -> list[int] | None:
    """Return what tells one version of the owner's choices and servers from another; None without any."""
    found: list[int] = []
    for name in ("config.yaml", preferences, "preferences.yaml", "state/servers"):
        try:
            state = os.stat(os.path.join(_user(), name))  # noqa: PTH116, PTH118 - pathlib costs as much as the rest of stage one
        except OSError:
            found += [0, 0, 0]
        else:
            found += [state.st_mtime_ns, state.st_size, state.st_ino]
    return found if any(found) else None


def recall(project: str) -> dict[str, str]:
    """Return the list by era, if it was made for this project under the stamp that holds now; else nothing."""
    try:
        with open(path_of(project), encoding="utf-8") as file:  # noqa: PTH123 - as above
            kept = json.loads(file.read(_LARGEST_LIST))
        tools: dict[str, str] = kept.pop("tools")
        made_under = stamp(kept.pop("preferences", PREFERENCES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    is_sound = type(tools) is dict and all(type(text) is str for text in tools.values())
    return tools if is_sound and kept == conditions(project, made_under) else {}


def conditions(project: str, made_under: list[int] | None) -> dict[str, object]:
    """Return what has to be the same for a list to hold."""
    return {"version": __version__, "project": _absolute(project), "stamp": made_under}


def path_of(project: str) -> str:
    """Return the file of a project's list, named by the end of its path; the file itself names its project."""
    name = os.fsencode(_absolute(project).replace("%", "%25").replace(os.sep, "%2F"))[-_LONGEST_FILE_NAME:]
    return f"{_user()}/state/mcp/tools{os.fsdecode(name)}.json"


def _user() -> str:
    """Return the user's own `.ai` folder, as the kernel does."""
    return os.path.expanduser(os.environ.get("USER_SPACE") or "~/.ai")  # noqa: PTH111 - as above


def _absolute(project: str) -> str:
    return os.path.abspath(os.path.expanduser(project)) if project else ""  # noqa: PTH100, PTH111 - as above


class HandshakeResult:
    """The result of stage one: the lines that the SDK must also process, and the lines without an answer yet.

    `listed` is the list of tools that was given out, with the era it was given in.
    """

    def __init__(self, lines: LineBuffer, heard: list[bytes], listed: tuple[str, str] | None = None) -> None:
        self.lines = lines
        self.heard = heard
        self.listed = listed


class Handshake:
    """The messages so far, and the possible answers."""

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
            if self._era != "legacy" or message["method"] != "notifications/initialized" or "params" in message:
                return None
            self.heard.append(line)
            return b""
        result = self._result(message, line)
        number = json.dumps(message["id"], ensure_ascii=False)
        return None if result is None else f'{{"jsonrpc":"2.0","id":{number},"result":{result}}}\n'.encode()

    def _result(self, message: dict[str, object], line: bytes) -> str | None:
        method, params = str(message["method"]), message.get("params", {})
        if not isinstance(params, dict):
            return None
        text: str | None
        era = ""  # of a request that fits this conversation for certain
        if method == "initialize":
            if self._era or not is_handshake(params):
                return None
            era, answers = "legacy", self._prepared["initialize"]
            text = answers.get(str(params["protocolVersion"])) or answers["else"]
        else:
            if is_envelope(params, self._prepared["versions"]["modern"]):
                era = "modern" if self._era != "legacy" else ""
            elif self._era == "legacy" and is_plain(params):
                era = "legacy"
            text = self._tools.get(era) if method == "tools/list" else self._prepared.get(era, {}).get(method)
        if text is not None and not self._era:
            # The first request decides the era permanently, so the SDK must also process it.
            self._era = era
            self.heard.append(line)
        if text is not None and method == "tools/list":
            self.listed = (era, text)
        return text


def greet(wire: StdioPipe, greeting: Handshake) -> HandshakeResult:
    """Answer lines until the list of tools was given, or the SDK is needed, or the client left."""
    lines = LineBuffer()
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
    return HandshakeResult(lines, greeting.heard, greeting.listed)


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
    if not params.keys() <= {"_meta"} or not isinstance(meta, dict) or not meta.keys() <= {"progressToken"}:
        return False
    return _is_id(meta.get("progressToken", 0))


def is_envelope(params: dict[str, object], version: str) -> bool:
    """Whether the parameters are nothing but the envelope that every request of the modern era carries."""
    meta = params.get("_meta")
    if params.keys() != {"_meta"} or not isinstance(meta, dict):
        return False
    if not meta.keys() <= {VERSION_KEY, CAPABILITIES_KEY, CLIENT_KEY, "progressToken"}:
        return False
    if not _is_id(meta.get("progressToken", 0)):
        return False
    is_known = meta.get(VERSION_KEY) == version and fits(meta.get(CAPABILITIES_KEY), _CAPABILITIES)
    return is_known and (CLIENT_KEY not in meta or is_client(meta[CLIENT_KEY]))


def is_client(value: object) -> bool:
    """Whether a client says who it is in the form that the SDK takes."""
    if not isinstance(value, dict) or not value.keys() >= {"name", "version"} or not fits(value, _CLIENT):
        return False
    return all("src" in icon for icon in value.get("icons", []))


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and abs(value) < _LARGEST_ID)


def _refuse(constant: str) -> object:
    raise ValueError(constant)
