"""System calls by number, for each machine that Kiwi has a filter for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LAST_KNOWN = 462
"""The newest call that was looked at; what the kernel has learned since is absent inside a sandbox."""

# Name, number on x86_64, number on aarch64.
_NUMBERS = """
acct 163 89
add_key 248 217
adjtimex 159 171
bpf 321 280
chmod 90 -
chroot 161 51
clock_adjtime 305 266
clock_settime 227 112
clone 56 220
clone3 435 435
creat 85 -
delete_module 176 106
fanotify_init 300 262
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
finit_module 313 273
fsconfig 431 431
fsmount 432 432
fsopen 430 430
fspick 433 433
init_module 175 105
io_uring_enter 426 426
io_uring_register 427 427
io_uring_setup 425 425
ioctl 16 29
ioperm 173 -
iopl 172 -
kcmp 312 272
kexec_file_load 320 294
kexec_load 246 104
keyctl 250 219
listmount 458 458
lookup_dcookie 212 18
memfd_create 319 279
memfd_secret 447 447
migrate_pages 256 238
mknod 133 -
mknodat 259 33
modify_ldt 154 -
mount 165 40
mount_setattr 442 442
move_mount 429 429
move_pages 279 239
name_to_handle_at 303 264
nfsservctl 180 42
open 2 -
open_by_handle_at 304 265
open_tree 428 428
openat 257 56
openat2 437 437
perf_event_open 298 241
pidfd_getfd 438 438
pivot_root 155 41
process_madvise 440 440
process_vm_readv 310 270
process_vm_writev 311 271
ptrace 101 117
quotactl 179 60
quotactl_fd 443 443
reboot 169 142
request_key 249 218
setdomainname 171 162
sethostname 170 161
setns 308 268
settimeofday 164 170
socket 41 198
socketpair 53 199
statmount 457 457
swapoff 168 225
swapon 167 224
sysctl 156 -
sysfs 139 -
syslog 103 116
umount2 166 39
unshare 272 97
uselib 134 -
userfaultfd 323 282
ustat 136 -
vhangup 153 58
"""

DENIED = (
    *("acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module"),
    *("fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter"),
    *("io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl"),
    *("listmount", "lookup_dcookie", "memfd_secret", "migrate_pages", "modify_ldt", "mount", "mount_setattr"),
    *("move_mount", "move_pages", "name_to_handle_at", "nfsservctl", "open_by_handle_at", "open_tree"),
    *("perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "process_vm_readv", "process_vm_writev"),
    *("ptrace", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname", "setns"),
    *("settimeofday", "statmount", "swapoff", "swapon", "sysctl", "sysfs", "syslog", "umount2", "unshare", "uselib"),
    *("userfaultfd", "ustat", "vhangup"),
)
"""Calls that no tool needs: they reach other processes, the mount table, the clock, keys or the kernel itself."""

ABSENT = ("clone3", "openat2")
"""Calls whose arguments a filter cannot see; programs do without them where a kernel does not have them."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How a kind of machine calls its kernel."""

    audit: int
    """The number by which a filter recognises it."""
    numbers: Mapping[str, int]
    foreign_bit: int = 0
    """A bit in the number of calls that follow another convention, which is refused altogether."""


def machine(name: str) -> Machine | None:
    """Return how a kind of machine, as `uname` names it, calls its kernel; None for one without a table."""
    match name:
        case "x86_64":
            return Machine(0xC000003E, _column(1), foreign_bit=0x40000000)
        case "aarch64":
            return Machine(0xC00000B7, _column(2))
        case _:
            return None


def _column(index: int) -> Mapping[str, int]:
    rows = (line.split() for line in _NUMBERS.split("\n") if line)
    return {row[0]: int(row[index]) for row in rows if row[index] != "-"}
