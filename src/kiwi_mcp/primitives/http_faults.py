"""What may go wrong with a request, in words and without its secrets."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpcore2

from kiwi_mcp.domain.errors import KiwiError, RequestFailed, TooLarge
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http_request import Request
from kiwi_mcp.primitives.secrets import Redactor

_HEADER_LIMIT = 100_000
"""About the most that the headers of an answer may have, in bytes; the protocol library keeps it."""
_HEADERS_TOO_LARGE = 431
_SUGGESTIONS = {
    "connect": "Check that the server is running and that the port is right.",
    "tls": "The server's certificate must be valid for this host; verification cannot be switched off.",
    "timeout": "Try again, ask for less, or give the tool a longer `timeout`.",
    "protocol": "Try again; if it stays, the server is at fault.",
}


def failed(request: Request, cause: str, reason: str) -> RequestFailed:
    """Return the failure of a request, with its cause in one word."""
    return RequestFailed(
        f"The request to {request.shown} failed: {reason}.", suggestion=_SUGGESTIONS[cause], cause=cause
    )


@contextmanager
def explaining(request: Request) -> Iterator[None]:
    """Turn the library's errors into ours; theirs are not kept, since they may quote headers."""
    try:
        yield
    except httpcore2.TimeoutException:
        raise failed(request, "timeout", "the server did not answer in time") from None
    except httpcore2.ConnectError as fault:
        raise connection_failed(request, fault.args[0] if fault.args else fault) from None
    except httpcore2.RemoteProtocolError as fault:
        raise _nonsense(request, fault) from None
    except httpcore2.LocalProtocolError:
        raise failed(request, "protocol", "it cannot be written as HTTP") from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError):
        raise failed(request, "protocol", "the connection was lost") from None


def connection_failed(request: Request, fault: object) -> RequestFailed:
    """Return why no connection was made: the certificate, or the network."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return failed(request, "tls", f"the certificate is not trusted ({fault.verify_message})")
    if isinstance(fault, ssl.SSLError):
        return failed(request, "tls", f"no secure connection could be agreed on ({fault.reason})")
    reason = fault.strerror if isinstance(fault, OSError) else None
    return failed(request, "connect", f"no connection ({reason})" if reason else "no connection")


def _nonsense(request: Request, fault: httpcore2.RemoteProtocolError) -> KiwiError:
    first = fault.args[0] if fault.args else None
    if getattr(first, "error_status_hint", None) == _HEADERS_TOO_LARGE:
        return TooLarge(f"The head of {request.authority}'s reply", size=None, limit=_HEADER_LIMIT)
    return failed(request, "protocol", "the server ended the connection or did not speak HTTP")


@contextmanager
def limited(spec: HttpSpec, request: Request, redactor: Redactor) -> Iterator[None]:
    """Turn the end of the time limit into an error, and take the secrets out of every error."""
    try:
        yield
    except TimeoutError:
        late = failed(request, "timeout", f"it did not end within its {spec.timeout:g} seconds")
        raise _clean(late, redactor) from None
    except KiwiError as fault:
        raise _clean(fault, redactor) from None


def _clean(fault: KiwiError, redactor: Redactor) -> KiwiError:
    fault.message = redactor.text(fault.message)
    fault.args = (fault.message,)
    fault.details = {
        name: redactor.text(value) if isinstance(value, str) else value for name, value in fault.details.items()
    }
    return fault
