#!/usr/bin/env bash
# Makes .venv with Kiwi and its locked packages in it; with `--test` also what the full tests need,
# with `--bench` the programs that the benchmarks compare it with, and with `--docs` the one that builds the site.
# Asks nothing, can be repeated, and does nothing where nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$(pwd -P)
stamp=.venv/.kiwi-setup
empty_home=$(mktemp -d)
trap 'rm -rf "$empty_home"' EXIT
# Package tools live in the sbin folders, which the PATH of a cron job or a container often lacks.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
# What an earlier set-up put into .venv does not count as the machine's own.
PATH=${PATH//"$root/.venv/bin:"/}
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export UV_HTTP_TIMEOUT=60 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DEBIAN_FRONTEND=noninteractive
# The machine's own certificates where it has them: a network may stand behind an authority of its own.
[ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=1
[ -n "${HOME:-}" ] && [ -w "$HOME" ] || export UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
  printf 'setup: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

# Version managers put shims on PATH that work only with their owner's HOME; tools run with another one.
works() { env -i HOME="$empty_home" PATH="$PATH" timeout 20 "$1" --version >/dev/null 2>&1; }

is_python() {
  timeout 20 "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

first_that() { # first_that TEST NAME...: the first program of these names on PATH that passes the test
  local test=$1 found
  shift
  while read -r found; do
    if "$test" "$found"; then
      printf '%s\n' "$found"
      return
    fi
  done < <(type -aP "$@" || true)
  return 1
}

apt_install() { # apt_install REASON PACKAGE...
  local reason=$1
  shift
  local -a command=(apt-get install -y --no-install-recommends "$@")
  local -a limits=(-qq -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=120)
  if ! command -v apt-get >/dev/null; then
    fail "$reason." "Install what Debian calls $*, then run the same make target again."
  fi
  [ "$(id -u)" = 0 ] || fail "$reason." "Run \`sudo ${command[*]}\`, then the same make target again."
  say "installing $* (Debian packages)"
  # The lists may be fresh enough even where they cannot be fetched now.
  timeout 300 apt-get "${limits[@]}" update </dev/null >/dev/null || say "the package lists could not be renewed"
  timeout 900 "${command[@]}" "${limits[@]}" </dev/null >/dev/null ||
    fail "$reason, and \`${command[*]}\` did not succeed." "Look at its message above, then run it by hand."
}

make_venv() {
  local python
  # The programs in .venv/bin hold its path: a folder that was moved needs a new one.
  is_python .venv/bin/python && grep -qsF "$root/.venv/bin/" .venv/bin/pip && return
  python=$(first_that is_python python3 python3.11 python3.12 python3.13 python3.14 python) ||
    apt_install "There is no Python 3.11 or newer on PATH" python3 python3-venv
  python=${python:-/usr/bin/python3}
  is_python "$python" || fail "$python is older than 3.11." "Install Python 3.11 or newer and put it on PATH."
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    apt_install "$python cannot make virtual environments" "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  say "making .venv with $("$python" --version)"
  timeout 120 "$python" -m venv --clear .venv
}

install_packages() {
  local -a wanted=(requirements/dev.txt)
  if ! has_node; then
    say "node or npm is missing here: taking the packaged one"
    wanted+=(requirements/node.txt)
  fi
  say "installing uv"
  timeout 600 .venv/bin/python -m pip install --quiet --timeout 60 --retries 3 --require-hashes --no-deps \
    --requirement requirements/uv.txt ||
    fail "uv could not be installed." "Is the package index reachable? Try again, or set PIP_INDEX_URL and UV_INDEX_URL to a mirror."
  say "installing the locked packages"
  timeout 1200 .venv/bin/uv pip sync --quiet --python .venv/bin/python --require-hashes --compile-bytecode "${wanted[@]}" ||
    fail "The packages could not be installed." "Is the package index reachable? Try again, or set UV_INDEX_URL to a mirror."
  say "installing kiwi"
  timeout 120 .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
}

has_node() { first_that works node >/dev/null && first_that works npm >/dev/null; }

# Puts a working program into .venv/bin, which the make targets put first, when PATH would find a broken shim of it.
prefer_working() {
  local name=$1 found
  found=$(first_that works "$name") || return 1
  [ "$found" = "$(type -P "$name")" ] || ln -sf "$found" ".venv/bin/$name"
}

install_interpreters() {
  local name missing=()
  for name in ruby rustc; do
    prefer_working "$name" || missing+=("$name")
  done
  [ ${#missing[@]} = 0 ] && return
  apt_install "The full tests need ${missing[*]}" "${missing[@]}"
  for name in "${missing[@]}"; do
    prefer_working "$name" || fail "$name is installed and does not run." "Run \`$name --version\` to see why."
  done
}

install_others() { # install_others NAME FOLDER: what others wrote, as requirements/NAME has it, each in a place of its own
  local locked=requirements/$1 folder=$2 wanted name npm
  wanted=$(cat "$locked"/* | sha256sum)
  [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$wanted" ] || return 0
  say "installing what $locked lists"
  if [ -e "$locked/package.json" ]; then
    npm=$(first_that works npm) || npm=$root/.venv/bin/npm
    mkdir -p "$folder/npm"
    cp "$locked/package.json" "$locked/package-lock.json" "$folder/npm/"
    PATH=$root/.venv/bin:$PATH timeout 600 "$npm" ci --prefix "$folder/npm" --ignore-scripts --no-audit --no-fund --silent ||
      fail "The npm packages could not be installed." "Is the npm registry reachable? Try again."
  fi
  for name in "$locked"/*.txt; do
    name=$(basename "$name" .txt)
    [ -x "$folder/$name/bin/python" ] || timeout 120 .venv/bin/uv venv --quiet --python .venv/bin/python "$folder/$name"
    timeout 600 .venv/bin/uv pip sync --quiet --python "$folder/$name/bin/python" --require-hashes --compile-bytecode "$locked/$name.txt" ||
      fail "$name could not be installed." "Is the package index reachable? Try again."
  done
  printf '%s' "$wanted" >"$folder/.stamp"
}

# Without bubblewrap Kiwi works and refuses to run whatever has to be held in a sandbox: no reason to end here.
offer_sandbox() {
  command -v bwrap >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    (apt_install "Sandboxes need bubblewrap" bubblewrap) && return
  fi
  say "bubblewrap is missing, so tools that must run in a sandbox will be refused"
  say "install it (\`sudo apt-get install bubblewrap\`, \`sudo dnf install bubblewrap\`); \`kiwi doctor\` tells what works"
}

# Tests of containers are skipped where podman cannot run one. runc, because crun refuses some kernels' control groups.
offer_containers() {
  command -v podman >/dev/null && [ -e /bin/busybox ] && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  (apt_install "Tests of containers need podman and busybox" runc podman busybox-static) || say "tests of containers will be skipped"
}

state() {
  { printf '%s\n' "$root"; has_node && echo node; cat pyproject.toml requirements/*.txt scripts/setup.sh; } | sha256sum
}

exec 9<scripts/setup.sh
if ! flock --nonblock 9; then
  say "waiting for another set-up to end"
  flock --timeout 1800 9 || fail "Another set-up is still running." "Look at what it is doing, then try again."
fi

if [ "$(cat "$stamp" 2>/dev/null)" != "$(state)" ] || ! .venv/bin/python -c '' 2>/dev/null; then
  make_venv
  install_packages
  state >"$stamp"
  say "done: .venv/bin/kiwi"
fi
# Some machines set PYTHONDONTWRITEBYTECODE, which would compile Kiwi again at every start; compileall writes regardless.
.venv/bin/python -m compileall -q -x 'kiwi_mcp/data/.*/' src/kiwi_mcp
case "${1:-}" in
  --test)
    install_interpreters
    command -v bwrap >/dev/null || apt_install "Sandboxes need bubblewrap" bubblewrap
    compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || apt_install "The full tests move the clock" libfaketime
    offer_containers
    install_others mcp .venv/mcp-servers
    install_others models .venv/models
    ;;
  --bench)
    offer_sandbox
    install_others mcp .venv/mcp-servers
    install_others bench .venv/bench
    ;;
  --docs) install_others docs .venv/docs ;;
  *) offer_sandbox ;;
esac
