#!/usr/bin/env bash
# Writes requirements/*.txt anew: exact versions with hashes, for every platform, without the address of an index.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  timeout 300 .venv/bin/uv --no-config pip compile --quiet --upgrade --universal --python-version 3.11 \
    --generate-hashes --no-annotate --no-emit-index-url \
    --custom-compile-command "make lock" "$@"
}

[ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=1
compile pyproject.toml requirements/build.in --group dev --output-file requirements/dev.txt
compile requirements/node.in --output-file requirements/node.txt
# Servers that others wrote, which the full tests talk to; each has an environment of its own.
for server in requirements/mcp/*.in; do
  compile "$server" --output-file "${server%.in}.txt"
done
compile requirements/uv.in --constraint requirements/dev.txt --output-file requirements/uv.txt
