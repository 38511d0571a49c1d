"""Escapes: attempts of a sandboxed process against files, processes and sockets."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

import pytest
from tests.sandbox.conftest import Cell, Warden

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object

ATTACKER = (Path(__file__).parent / "attacker.py").read_text(encoding="utf-8")
CANARY = f"canary-{token_hex(8)}"
CLOSED = {"ENOENT", "EACCES", "ENOTDIR"}
UNCHANGEABLE = {"EROFS", "EXDEV"}


@dataclass
class Listeners:
    """The listeners of the machine, and their numbers of connections."""

    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    named: socket.socket

    def visits(self) -> int:
        """Count who came."""
        count = 0
        for listener in (self.tcp, self.abstract, self.named):
            listener.setblocking(False)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            count += 1
        self.udp.setblocking(False)
        try:
            self.udp.recv(100)
        except BlockingIOError:
            return count
        return count + 1


@dataclass
class Attack:
    """An attacker's report, and the places it was let loose on."""

    warden: Warden
    found: JsonObject
    granted: Path
    workspace: Path
    bare: Path
    before: str
    after: str
    visits: int

    def of(self, case: str) -> JsonObject:
        """Return what came of one attack, as an object."""
        return as_object(self.found[case])


@pytest.fixture(scope="module")
def attack(warden: Warden) -> Iterator[Attack]:
    project = warden.folder("project")
    granted, sibling = project / "granted", project / "sibling"
    workspace = warden.folder("workspace", notes__txt="mine")
    bare = warden.folder("bare")
    secret = warden.folder("ssh", id_ed25519="a key", store__db="secrets")

    def furnish() -> None:
        granted.mkdir()
        (granted / "kept.txt").write_text("as it was")
        sibling.mkdir()
        (sibling / "secret.txt").write_text("not yours")
        (workspace / ".git").mkdir()

    warden.do(furnish)
    warden.own(project, workspace)
    listeners = _listen(workspace)
    before = _state(granted)
    place = {
        "granted": str(granted),
        "workspace": str(workspace),
        "bare": str(bare),
        "secret": str(secret / "id_ed25519"),
        "sibling_name": sibling.name,
        "secrets": json.dumps(
            ["/etc/shadow", f"{secret}/id_ed25519", f"{secret}/store.db", f"{warden.state}/isolation.json"]
        ),
        "closed": json.dumps(["/", "/usr", "/etc", "/proc", "/dev", str(warden.home), str(project), str(sibling)]),
        "devices": json.dumps(["/dev/sda", "/dev/vda", "/dev/mem", "/dev/kvm", "/dev/fuse", "/dev/net/tun"]),
        "pid": str(os.getpid()),
        "port": str(listeners.tcp.getsockname()[1]),
        "abstract": listeners.abstract.getsockname().decode().replace("\0", "@"),
    }
    os.environ["KIWI_CANARY"] = CANARY
    # Held open by Kiwi while the process runs, and inheritable, as a careless library would leave them.
    held = [os.open(secret / "store.db", os.O_RDONLY), listeners.tcp.fileno()]
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    try:
        cell = Cell(readable=(granted,), writable=(workspace, bare), env={"GIVEN": "1"})
        found = as_object(warden.python_says(ATTACKER, json.dumps(place), cell=cell))
    finally:
        os.close(held[0])
        del os.environ["KIWI_CANARY"]
    yield Attack(warden, found, granted, workspace, bare, before, _state(granted), listeners.visits())
    for listener in (listeners.tcp, listeners.udp, listeners.abstract, listeners.named):
        listener.close()


def _listen(workspace: Path) -> Listeners:
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", tcp.getsockname()[1]))
    abstract, named = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    abstract.bind(f"\0kiwi-{token_hex(8)}")
    named.bind(str(workspace / "agent.sock"))
    (workspace / "agent.sock").chmod(0o777)
    abstract.listen()
    named.listen()
    return Listeners(tcp, udp, abstract, named)


def _state(folder: Path) -> str:
    """Return a hash of everything about what lies in a folder but when it was read."""
    response = []
    for path in sorted((folder, *folder.rglob("*"))):
        state = path.lstat()
        response.append((str(path), state.st_mode, state.st_mtime_ns, state.st_size, state.st_uid, state.st_nlink))
    return sha256(repr(response).encode()).hexdigest()


def answers(value: Json) -> set[Json]:
    """Return the different answers that a group of attempts got."""
    return {*value.values()} if isinstance(value, Mapping) else {*as_list(value)}


@pytest.mark.case("FS-01")
def test_secrets_of_the_host_are_not_visible(attack: Attack) -> None:
    assert answers(attack.found["FS-01"]) <= CLOSED


@pytest.mark.case("FS-02")
def test_nothing_is_written_outside_the_grants(attack: Attack) -> None:
    refused = attack.of("FS-02")
    assert answers(refused) <= {*CLOSED, "EROFS"}
    assert not any((Path(path) / "marker").exists() for path in refused)


@pytest.mark.case("FS-03")
def test_a_granted_folder_has_no_way_to_its_parent(attack: Attack) -> None:
    assert answers(attack.found["FS-03"]) <= CLOSED


@pytest.mark.case("FS-04")
def test_a_link_does_not_lead_outside(attack: Attack) -> None:
    assert answers(attack.found["FS-04"]) == {"ENOENT"}


@pytest.mark.case("FS-05")
def test_a_read_only_grant_stays_unchanged(attack: Attack) -> None:
    assert answers(attack.found["FS-05"]) <= UNCHANGEABLE
    assert attack.before == attack.after


@pytest.mark.case("FS-06")
def test_the_neighbours_of_a_granted_folder_are_not_visible(attack: Attack) -> None:
    assert attack.found["FS-06"] == ["granted"]


@pytest.mark.case("FS-07")
def test_a_repository_can_neither_be_moved_nor_created(attack: Attack) -> None:
    tried = attack.of("FS-07")
    assert tried["elsewhere"] == "worked"
    assert answers({name: tried[name] for name in tried if name not in {"elsewhere", "items", "filled"}}) <= {
        "EBUSY",
        "EROFS",
    }
    assert (tried["items"], tried["filled"]) == ("ENOTDIR", "EACCES")  # the placeholders are sockets
    assert [path.name for path in attack.bare.iterdir()] == ["src"]
    assert not any((attack.workspace / ".git").iterdir())


@pytest.mark.case("FS-08")
def test_processes_and_the_kernel_of_the_host_are_not_visible(attack: Attack) -> None:
    seen = attack.of("FS-08")
    assert isinstance(seen["pids"], int)
    assert seen["pids"] < 6
    assert seen["host"] == "ENOENT"
    assert seen["kcore"] in CLOSED
    assert seen["addresses"] in {*CLOSED, "none"}


@pytest.mark.case("FS-09")
def test_devices_can_be_neither_created_nor_opened(attack: Attack) -> None:
    tried = attack.of("FS-09")
    assert tried["mknod"] == "EPERM"
    assert answers({path: response for path, response in tried.items() if path.startswith("/")}) == {"ENOENT"}


@pytest.mark.case("FS-10")
def test_nothing_can_be_mounted(attack: Attack) -> None:
    calls = attack.of("calls")
    mounting = ("mount", "umount2", "pivot_root", "chroot", "open_tree", "fsopen", "move_mount", "mount_setattr")
    assert {calls[name] for name in mounting} == {"EPERM"}


@pytest.mark.case("FS-11")
def test_no_namespace_can_be_entered_or_created(attack: Attack) -> None:
    calls = attack.of("calls")
    assert {calls[name] for name in ("unshare", "clone", "setns")} == {"EPERM"}
    assert calls["clone3"] == "ENOSYS"


@pytest.mark.case("FS-12")
def test_no_file_is_opened_by_handle(attack: Attack) -> None:
    calls = attack.of("calls")
    assert {calls["name_to_handle_at"], calls["open_by_handle_at"]} == {"EPERM"}


def test_system_calls_around_the_filter_are_refused(attack: Attack) -> None:
    calls = attack.of("calls")
    assert {calls[name] for name in ("io_uring_setup", "keyctl", "ptrace", "bpf")} == {"EPERM"}
    assert calls["openat2"] == "ENOSYS"
    # A watchdog sees only the memory of processes.
    is_refused = attack.warden.level == "restricted" or attack.warden.limited_by() == "watchdog"
    assert calls["memfd_create"] == ("EPERM" if is_refused else "worked")


@pytest.mark.case("FS-13")
def test_only_the_three_streams_and_the_channel_are_open(attack: Attack) -> None:
    held = as_list(attack.found["FS-13"])
    assert [*held[:3]] == [0, 1, 2]
    assert len(held) == 4


@pytest.mark.case("FS-14")
def test_no_setuid_program_gives_privileges(attack: Attack) -> None:
    response = attack.of("FS-14")
    nothing = "0" * 16
    assert response["status"] == {"NoNewPrivs": "1", "CapEff": nothing, "CapBnd": nothing, "Seccomp": "2"}
    assert "worked" not in answers(response["helpers"])
    assert response["uid"] != 0


def test_no_setuid_file_is_left_behind(attack: Attack) -> None:
    assert answers(attack.found["planted"]) == {"EPERM"}
    assert not any(path.stat().st_mode & 0o6000 for path in attack.workspace.iterdir() if not path.is_symlink())


@pytest.mark.case("NET-01", "NET-02", "NET-03")
def test_no_listener_of_the_host_is_reached(attack: Attack) -> None:
    tried = {attack.found["NET-01"], attack.found["NET-02"], *as_list(attack.found["NET-03"])}
    assert tried == {"EAFNOSUPPORT"}
    assert attack.visits == 0


@pytest.mark.case("NET-04")
def test_only_socket_pairs_can_be_created(attack: Attack) -> None:
    tried = dict(attack.of("NET-04"))
    assert tried.pop("pair") == "worked"
    assert answers(tried) == {"EAFNOSUPPORT"}


@pytest.mark.case("SEC-01")
def test_no_process_sees_variables_of_kiwi(attack: Attack) -> None:
    seen = attack.found["SEC-01"]
    assert isinstance(seen, str)
    assert "GIVEN=1" in seen
    assert CANARY not in seen
    assert attack.found["names"] == ["GIVEN", "HOME", "KIWI_RESULT", "KIWI_RUN", "LC_CTYPE", "PATH", "PWD", "TMPDIR"]


@pytest.mark.case("FS-15")
def test_a_run_sees_nothing_of_an_earlier_one(warden: Warden) -> None:
    code = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None)
flags = (os.O_CREAT | os.O_RDWR) if sys.argv[1] == "leave" else os.O_RDWR
left = ["/tmp/left", os.path.expanduser("~/left"), "/dev/shm/left"]
if sys.argv[1] == "leave":
    for path in left:
        open(path, "w").close()
print(json.dumps({
    "files": [os.path.exists(path) for path in left],
    "memory": libc.shmget(4242, 4096, 0o1600 if sys.argv[1] == "leave" else 0o600) >= 0,
    "queue": libc.mq_open(b"/left", flags, 0o600, None) >= 0,
}))
"""
    has_memory = warden.limited_by() != "watchdog"  # which refuses memory that belongs to no process
    assert warden.python_says(code, "leave") == {"files": [True] * 3, "memory": has_memory, "queue": True}
    assert warden.python_says(code, "look") == {"files": [False] * 3, "memory": False, "queue": False}
