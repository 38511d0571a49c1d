"""The first words of a TLS client: which server it says it means."""

from __future__ import annotations

from asyncio import StreamReader

HANDSHAKE = 22
ALERT = b"\x15\x03\x03\x00\x02\x02\x70"
"""The alert `unrecognized_name`, with which a client is told that its name was not accepted."""
_CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 1, 0, 0
_RECORD, _LARGEST = 16_640, 65_536


class Malformed(ValueError):
    """What a client said that is no TLS."""


async def client_hello(reader: StreamReader, first: bytes) -> tuple[bytes, str]:
    """Return the first message as it came, and the name of the server in it, empty where it says none."""
    raw, message = first, b""
    while len(raw) < _LARGEST:
        raw += await reader.readexactly(4)
        kind, major, length = raw[-5], raw[-4], int.from_bytes(raw[-2:], "big")
        if kind != HANDSHAKE or major != 3 or not 0 < length <= _RECORD:  # noqa: PLR2004 - 3 is every TLS
            raise Malformed("it is not TLS")
        body = await reader.readexactly(length)
        raw, message = raw + body, message + body
        if len(message) >= 4 and len(message) >= 4 + (size := int.from_bytes(message[1:4], "big")):  # noqa: PLR2004 - kind and length
            if message[0] != _CLIENT_HELLO:
                raise Malformed("it does not begin with a client's hello")
            return raw, _server_name(_Cursor(message[4 : 4 + size]))
        raw += await reader.readexactly(1)
    raise Malformed("its hello is too long")


class _Cursor:
    """A place in some bytes, which never goes beyond their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if self._at + size > len(self._data):
            raise Malformed("its hello breaks off")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        """Return the next number."""
        return int.from_bytes(self.take(size), "big")

    def rest(self) -> str:
        """Return all that is left, as text."""
        return self.take(len(self._data) - self._at).decode("latin-1")

    def part(self, size: int) -> _Cursor:
        """Return what stands after its own length, of which the next `size` bytes tell."""
        return _Cursor(self.take(self.number(size)))


def _server_name(hello: _Cursor) -> str:
    hello.take(34)  # version and random
    for size in (1, 2, 1):  # session, ciphers, compression
        hello.part(size)
    if hello.is_over:
        return ""
    extensions, names = hello.part(2), list[str]()
    while not extensions.is_over:
        kind, content = extensions.number(2), extensions.part(2)
        if kind == _SERVER_NAME:
            names += _names(content.part(2))
    if len(names) > 1:
        raise Malformed("its hello names several servers")
    return names[0] if names else ""


def _names(listed: _Cursor) -> list[str]:
    names = []
    while not listed.is_over:
        kind, name = listed.number(1), listed.part(2)
        if kind != _HOST_NAME:
            raise Malformed("its hello names a server of no known kind")
        names.append(name.rest())
    return names
