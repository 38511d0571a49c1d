# Run by a shell inside a sandbox: tries what must not work, and prints the name of each property that holds.
# Parameters: a file that must not be visible, the quota of the temporary folders, the limit of processes, whether the
# limits of a group should hold, and the namespaces of the machine outside as `pid=pid:[…]`.
# Whatever is expected to fail is first shown to work where it should, so that nothing is proved by a missing program.
secret=$1 quota=$2 pids=$3 grouped=$4; shift 4
outside="$* " held=10000000 alone=

has() { grep -q "^$1:[[:space:]]*$2\$" "/proc/$3/status"; }
own() { here=$(readlink "/proc/self/ns/$1") && case $outside in *"$1=$here "*) return 1 ;; esac; }
writable() { for folder in "$@"; do (: >"$folder/probe") 2>/dev/null && return 0; done; return 1; }
fill() { head -c "$2" /dev/zero 2>/dev/null >"$1/probe"; }
children() { i=0; while [ "$i" -lt "$1" ]; do sleep 20 & i=$((i + 1)); done; }
hold() { [ "$(head -c "$held" /dev/zero | tail -c "$held" | { sleep "$1"; wc -c; })" = "$held" ] && echo held; }
busy() { timeout 0.3 sh -c "while :; do :; done"; }
limited_to() { writable "$TMPDIR" && ! writable "$@"; }
bounded() { fill "$1" "$((quota / 2))" && ! fill "$1" "$((quota * 2))" && rm "$1/probe"; }

[ "$(env -u PWD -u OLDPWD -u SHLVL -u _ -u KIWI_RUN -u KIWI_RESULT | cut -d= -f1 | sort | tr '\n' ' ')" \
    = "HOME LD_BIND_NOW PATH PROBE TMPDIR " ] && ! tr '\0' '\n' </proc/1/environ | grep -q '^LD_' && echo env_clean
[ ! -e "$secret" ] && [ ! -e /etc/shadow ] && [ ! -e /sys/kernel ] && own mnt && limited_to / /usr /etc /dev /proc &&
    echo fs_private
own ipc && echo ipc_private
own pid && [ "$(ls -d /proc/[0-9]* | wc -l)" -lt 10 ] && echo pid_private
own net && [ "$(tail -n +3 /proc/net/dev | grep -vc '^ *lo:')" = 0 ] && [ "$(wc -l </proc/net/route)" -le 1 ] &&
    echo net_none && echo net_none_or_proxy
has NoNewPrivs 1 self && has NoNewPrivs 1 1 && echo no_new_privs
own user && has CapEff 0000000000000000 self && has CapBnd 0000000000000000 self && [ "$(id -u)" != 0 ] &&
    echo unprivileged
has Seccomp 2 self && has Seccomp 2 1 && ! unshare --user true 2>/dev/null &&
    chmod u-s "$HOME" && ! chmod u+s "$HOME" 2>/dev/null && echo syscall_filter
[ "$(ulimit -n)" = 64 ] && [ "$(ulimit -c)" = 0 ] && [ "$(ulimit -t)" = 30 ] && echo rlimits
bounded "$TMPDIR" && bounded /dev/shm && echo tmp_quota

if [ "$grouped" = yes ]; then
    # Four loops that together want more than their share, also of a busy machine: whether they were held back is seen
    # outside. Four processes that are each within what one may have, and together not.
    [ "$(hold 0)" = held ] && alone=held
    for i in 1 2 3 4; do busy & done
    wait
    together=$(for i in 1 2 3 4; do hold 0.3 & done 2>/dev/null; wait)
    [ "$alone" = held ] && [ "$together" != "$(printf 'held\n%.0s' 1 2 3 4)" ] && echo mem_limit
else
    mask=$(taskset -p $$ | sed "s/.*: *//") && [ -n "$mask" ] && [ "$(nproc)" = 1 ] &&
        ! taskset -p "$mask" $$ >/dev/null 2>&1 && echo cpu_limit
fi
(children 4) 2>/dev/null && ! (children "$((pids * 2))") 2>/dev/null && echo pids_limit

if [ "$grouped" = no ]; then
    # What uses more memory than all together may is stopped from outside.
    held=50000000
    kill -9 -1
    while set -- /proc/[0-9]* && [ "$#" -gt 8 ]; do :; done
    for i in 1 2 3 4; do hold 2 & done
    wait
fi
:
