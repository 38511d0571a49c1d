"""The certificates of the owner's file, for Kiwi's own connections and for processes that reach hosts."""

from __future__ import annotations

import os
import re
import ssl
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

from kiwi_mcp.domain.errors import Unavailable

FILE_NAME = "certificates.pem"
"""The owner's file, in the user space. No item and no project can name another one."""
_SYSTEM = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_LARGEST = 4_194_304


def owner_certificates(user: Path) -> str:
    """Return the certificates of the owner's file, without anything else that is in it; empty if there is no file."""
    path = user / FILE_NAME
    try:
        state = path.stat()
        text = path.read_text(encoding="utf-8") if state.st_size <= _LARGEST else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as fault:
        raise _unusable(path, str(fault), "Give yourself the right to read it, or remove it.") from fault
    if state.st_uid not in {0, os.geteuid()} or state.st_mode & 0o022:
        raise _unusable(path, "others can change it", f"`chmod go-w {path}`, and own it yourself.")
    found = "\n".join(one.rstrip() for one in _BLOCK.findall(text)) + "\n"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found)
    except ssl.SSLError as fault:
        raise _unusable(
            path, "it contains no valid certificate in PEM form", "Write `-----BEGIN CERTIFICATE-----` blocks into it."
        ) from fault
    return found


def certificate_file(user: Path, cache: Path) -> str:
    """Return the file of certificates that processes trust: the machine's own, and the owner's; empty without any."""
    system = next((path for path in _SYSTEM if Path(path).is_file()), "")
    own = owner_certificates(user)
    return _joined(own, Path(system).read_text(encoding="utf-8") if system else "", cache) if own else system


@lru_cache(maxsize=8)
def _joined(own: str, system: str, cache: Path) -> str:
    text = f"{system}{own}".encode()
    path = Path(os.path.realpath(cache)) / "certificates" / f"{sha256(text).hexdigest()}.pem"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(text)
        Path(draft.name).chmod(0o644)
        Path(draft.name).replace(path)
    except OSError as fault:
        raise Unavailable(
            f"{path} cannot be written: {fault.strerror or fault}.", suggestion="Make room or give yourself access."
        ) from fault
    return str(path)


def _unusable(path: Path, reason: str, suggestion: str) -> Unavailable:
    return Unavailable(f"{path} cannot be used: {reason}.", suggestion=suggestion, path=str(path))
