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
# Servers and clients that others wrote, which the full tests talk to; each has an environment of its own.
# So have the gateways that the benchmarks compare Kiwi with, the SDKs and servers of models, and the
# program that builds the site.
for other in requirements/mcp/*.in requirements/models/*.in requirements/bench/*.in requirements/docs/*.in; do
  compile "$other" --output-file "${other%.in}.txt"
done
# The Inspector's web page is not used: package.json leaves out what builds it, which has parts for some machines only.
for folder in requirements/mcp requirements/models requirements/bench; do
  timeout 300 npm install --prefix "$folder" --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts \
    --no-audit --no-fund --silent
done
compile requirements/uv.in --constraint requirements/dev.txt --output-file requirements/uv.txt
