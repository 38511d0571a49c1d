"""Run by a sandboxed process: tries one escape after another and prints the outcome of each, as JSON.

It reads where things are from its first argument. A success is reported as `worked`, an error by its name.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER = 0x10000000
CALLS = {
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, None),
    "umount2": (166, b"/proc", 0),
    "pivot_root": (155, b"/tmp", b"/tmp"),
    "chroot": (161, b"/tmp"),
    "open_tree": (428, -100, b"/tmp", 1),
    "fsopen": (430, b"tmpfs", 0),
    "move_mount": (429, -1, b"", -100, b"/tmp", 4),
    "mount_setattr": (442, -100, b"/tmp", 0, None, 32),
    "unshare": (272, NEW_USER),
    "clone": (56, NEW_USER | 17, 0, 0, 0, 0),
    "clone3": (435, None, 0),
    "setns": (308, 0, 0),
    "name_to_handle_at": (303, -100, b"/tmp", None, None, 0),
    "open_by_handle_at": (304, 0, None, 0),
    "io_uring_setup": (425, 1, None),
    "keyctl": (250, 0, -3, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "bpf": (321, 0, None, 0),
    "openat2": (437, -100, b"/tmp", None, 24),
    "memfd_create": (319, b"x", 0),
}


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except OSError as fault:
        return errno.errorcode.get(fault.errno or 0, repr(fault))
    except subprocess.SubprocessError as fault:
        return repr(fault)
    return "worked"


def call(name: str) -> str:
    number, *arguments = CALLS[name]
    answer = LIBC.syscall(number, *arguments)
    if answer == 0 and name == "clone":
        os._exit(0)
    return "worked" if answer >= 0 else errno.errorcode[ctypes.get_errno()]


def read(path: str) -> Callable[[], object]:
    def work() -> object:
        with Path(path).open("rb") as file:
            return file.read(100)

    return work


def write(path: str) -> Callable[[], object]:
    def work() -> object:
        return Path(path).write_text("marker")

    return work


def relative(folder: str, path: str) -> Callable[[], object]:
    def work() -> object:
        os.chdir(folder)
        try:
            return read(path)()
        finally:
            os.chdir("/tmp")

    return work


def changes(path: str) -> dict[str, str]:
    return {
        "write": outcome(write(path)),
        "truncate": outcome(lambda: os.truncate(path, 0)),
        "chmod": outcome(lambda: Path(path).chmod(0o777)),
        "utime": outcome(lambda: os.utime(path, (1, 1))),
        "setxattr": outcome(lambda: os.setxattr(path, "user.x", b"x")),
        "rename": outcome(lambda: Path(path).rename(f"{path}.new")),
        "unlink": outcome(lambda: Path(path).unlink()),
        "link": outcome(lambda: os.link(path, path + ".link")),
        "link_out": outcome(lambda: os.link(path, "/tmp/link")),
    }


def kernel_addresses() -> str:
    try:
        lines = Path("/proc/kallsyms").read_text().splitlines()
        return "established" if any(int(line.split()[0], 16) for line in lines) else "none"
    except OSError as fault:
        return errno.errorcode[fault.errno or 0]


def connect(family: int, kind: int, address: tuple[str, int] | str) -> Callable[[], object]:
    def work() -> object:
        with socket.socket(family, kind) as one:
            one.settimeout(2)
            one.connect(address)
            return one.send(b"hello")

    return work


def make(family: int, kind: int, protocol: int = 0) -> Callable[[], object]:
    return lambda: socket.socket(family, kind, protocol).close()


def environments() -> str:
    seen = b""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            seen += path.read_bytes()
    return seen.decode(errors="replace") + "\0".join(f"{name}={value}" for name, value in os.environ.items())


def descriptors() -> list[int]:
    held = []
    for number in range(1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        held.append(number)
    return held


def status() -> dict[str, str]:
    rows = [line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()]
    return {name: value.strip() for name, value in rows if name in {"NoNewPrivs", "CapEff", "CapBnd", "Seccomp"}}


def setuid_helpers() -> dict[str, str]:
    helpers = {"su": ["su", "root", "-c", "id -u"], "mount": ["mount", "-t", "tmpfs", "none", "/tmp"]}
    response = {}
    for name, argv in helpers.items():
        try:
            ended = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
        except (OSError, subprocess.SubprocessError) as fault:
            response[name] = type(fault).__name__
        else:
            response[name] = "worked" if ended.returncode == 0 else "failed"
    return response


def planted(workspace: str) -> dict[str, str]:
    path = f"{workspace}/planted"
    write(path)()
    return {
        "chmod": outcome(lambda: Path(path).chmod(0o4755)),
        "setgid": outcome(lambda: Path(path).chmod(0o2755)),
        "open": outcome(lambda: os.close(os.open(f"{path}2", os.O_CREAT | os.O_WRONLY, 0o4755))),
        "temporary": outcome(lambda: os.close(os.open(workspace, os.O_TMPFILE | os.O_WRONLY, 0o4755))),
        "mknod": outcome(lambda: os.mknod(f"{path}3", 0o104755)),
    }


def main(place: dict[str, str]) -> dict[str, object]:
    granted, workspace, bare = place["granted"], place["workspace"], place["bare"]
    port, held = int(place["port"]), descriptors()
    Path(workspace, "way-out").symlink_to(place["secret"])
    Path(workspace, "shadow").symlink_to("/etc/shadow")
    return {
        "FS-01": {path: outcome(read(path)) for path in json.loads(place["secrets"])},
        "FS-02": {path: outcome(write(f"{path}/marker")) for path in json.loads(place["closed"])},
        "FS-03": {
            "by_path": outcome(read(f"{granted}/../../../../../../etc/profile")),
            "by_folder": outcome(relative(granted, "../../../../../../../../etc/profile")),
            "to_sibling": outcome(read(f"{granted}/../{place['sibling_name']}/secret.txt")),
        },
        "FS-04": [outcome(read(f"{workspace}/way-out")), outcome(read(f"{workspace}/shadow"))],
        "FS-05": changes(f"{granted}/kept.txt"),
        "FS-06": sorted(path.name for path in Path(granted).parent.iterdir()),
        "FS-07": {
            "rename": outcome(lambda: Path(workspace, ".git").rename(f"{workspace}/.git2")),
            "hook": outcome(write(f"{workspace}/.git/hooks")),
            "remove": outcome(lambda: Path(workspace, ".git").rmdir()),
            "new": outcome(lambda: Path(bare, ".git/hooks").mkdir(parents=True)),
            "items": outcome(lambda: Path(bare, ".ai/tools").mkdir(parents=True)),
            "unheld": outcome(Path(bare, ".ai").unlink),
            "renamed": outcome(lambda: Path(bare, ".claude").rename(f"{bare}/other")),
            "filled": outcome(lambda: Path(bare, ".cursor").write_text("mine")),
            "elsewhere": outcome(lambda: Path(bare, "src").mkdir()),
        },
        "FS-08": {
            "pids": len([*Path("/proc").glob("[0-9]*")]),
            "host": outcome(read(f"/proc/{place['pid']}/environ")),
            "kcore": outcome(read("/proc/kcore")),
            "addresses": kernel_addresses(),
        },
        "FS-09": {
            "mknod": outcome(lambda: os.mknod("/tmp/disk", 0o60660, os.makedev(8, 0))),
            **{path: outcome(read(path)) for path in json.loads(place["devices"])},
        },
        "calls": {name: call(name) for name in CALLS},
        "FS-13": held,
        "FS-14": {"status": status(), "helpers": setuid_helpers(), "uid": os.geteuid()},
        "NET-01": outcome(connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port))),
        "NET-02": outcome(connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port))),
        "NET-03": [
            outcome(connect(socket.AF_UNIX, socket.SOCK_STREAM, place["abstract"].replace("@", "\0"))),
            outcome(connect(socket.AF_UNIX, socket.SOCK_STREAM, f"{workspace}/agent.sock")),
        ],
        "NET-04": {
            "raw": outcome(make(socket.AF_INET, socket.SOCK_RAW, 1)),
            "packet": outcome(make(socket.AF_PACKET, socket.SOCK_RAW)),
            "netlink": outcome(make(socket.AF_NETLINK, socket.SOCK_RAW)),
            "vsock": outcome(make(socket.AF_VSOCK, socket.SOCK_STREAM)),
            "pair": outcome(socket.socketpair),
        },
        "SEC-01": environments(),
        "planted": planted(workspace),
        "names": sorted(os.environ),
    }


sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
