"""The self-test: a shell script that, inside a sandbox, tries what must not work and tells which properties hold."""

from __future__ import annotations

from kiwi_mcp.domain.isolation import Limits

_MEGABYTE = 1_048_576


def test_limits(*, is_grouped: bool) -> Limits:
    """Return limits that are small enough to be run into quickly."""
    memory = 48 * _MEGABYTE if is_grouped else 1_024 * _MEGABYTE
    return Limits(memory_bytes=memory, pids=24, open_files=64, cpu_seconds=30, tmp_bytes=4 * _MEGABYTE)


SCRIPT = r"""
secret=$1 quota=$2 pids=$3; shift 3
has() { grep -q "^$1:[[:space:]]*$2\$" "/proc/$3/status"; }
differs() { for host in "$@"; do [ "$host" != "${host%%=*}=$(readlink "/proc/self/ns/${host%%=*}")" ] || return 1; done; }
host() { for one in $hosts; do case $one in "$1="*) echo "$one" ;; esac; done; }
hosts="$*"

[ "$(env -u PWD -u OLDPWD -u SHLVL -u _ -u KIWI_RUN -u KIWI_RESULT | cut -d= -f1 | sort | tr '\n' ' ')" \
    = "HOME LD_BIND_NOW PATH PROBE TMPDIR " ] && ! tr '\0' '\n' </proc/1/environ | grep -q '^LD_' && echo env_clean

[ ! -e "$secret" ] && [ ! -e /etc/shadow ] && [ ! -e /sys/kernel ] && differs "$(host mnt)" &&
    ! touch /probe /usr/probe /etc/probe /dev/probe /proc/probe 2>/dev/null && echo fs_private && echo fs_write_limited

differs "$(host ipc)" && echo ipc_private
differs "$(host pid)" && [ "$(ls -d /proc/[0-9]* | wc -l)" -lt 10 ] && echo pid_private
differs "$(host net)" && [ "$(tail -n +3 /proc/net/dev | grep -vc '^ *lo:')" = 0 ] && [ "$(wc -l </proc/net/route)" -le 1 ] &&
    echo net_none && echo net_none_or_proxy
has NoNewPrivs 1 self && has NoNewPrivs 1 1 && echo no_new_privs
differs "$(host user)" && has CapEff 0000000000000000 self && has CapBnd 0000000000000000 self &&
    [ "$(id -u)" != 0 ] && echo unprivileged
has Seccomp 2 self && has Seccomp 2 1 && ! unshare --user true 2>/dev/null && ! chmod u+s "$HOME" 2>/dev/null &&
    echo syscall_filter
[ "$(ulimit -n)" = 64 ] && [ "$(ulimit -c)" = 0 ] && [ "$(ulimit -t)" = 30 ] && echo rlimits

! head -c "$((quota * 2))" /dev/zero 2>/dev/null >"$TMPDIR/probe" && rm -f "$TMPDIR/probe" &&
    ! head -c "$((quota * 2))" /dev/zero 2>/dev/null >/dev/shm/probe && rm -f /dev/shm/probe && echo tmp_quota

(i=0; while [ "$i" -lt "$((pids * 2))" ]; do sleep 20 & i=$((i + 1)); done) 2>/dev/null || echo pids_limit
:
"""
