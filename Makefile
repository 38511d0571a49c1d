# `make setup` prepares this folder, `make check` answers in about two minutes, `make test` runs everything else too,
# and `make soak` the long runs: hundreds of kills, thousands of cycles.

# The interpreters and packages of this folder come first, for the tools that the tests and the demo start.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Node brings certificates of its own and does not look for the machine's unless it is told to.
export NODE_EXTRA_CA_CERTS ?= $(wildcard /etc/ssl/certs/ca-certificates.crt)
# Some machines set this; without bytecode every worker would compile all tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup dist demo check test docs soak bench reference recording encoder lock clean
.NOTPARALLEL:

setup:
	@scripts/setup.sh

dist: setup
	@uv build --quiet --wheel --no-build-isolation --python .venv/bin/python --out-dir dist
	@ls dist/*.whl

demo: setup
	@python scripts/demo.py

check: setup
	@ruff check .
	@ruff format --check --quiet .
	@mypy
	@lint-imports --no-logo
	@pytest -q -n 2 -m "not full"

test: check
	@scripts/setup.sh --test
	@pytest -q -n 4 --dist worksteal -m "full and not soak"
	@$(MAKE) --no-print-directory docs

# The site is .cache/site/index.html. A page or a link that is missing ends the build.
docs: setup
	@scripts/setup.sh --docs
	@mkdir -p .cache && python scripts/pictures.py
	@NO_MKDOCS_2_WARNING=1 .venv/docs/mkdocs/bin/mkdocs build --strict 2>.cache/site.log || { cat .cache/site.log >&2; exit 1; }

soak: setup
	@scripts/setup.sh --test
	@pytest -q -m soak

bench: setup
	@scripts/setup.sh --bench
	@python benchmarks/run.py --write

reference: setup
	@python scripts/reference.py
	@python -m kiwi_mcp.surfaces.generate

# Runs `kiwi setup` with real servers and draws docs/pictures/setup.svg; it needs the npm and PyPI registries.
recording: setup
	@python scripts/recording.py

encoder: setup
	@PYTHONPATH=benchmarks python scripts/teach_encoder.py .cache/taught.npz
	@python scripts/make_encoder.py --taught .cache/taught.npz

lock: setup
	@scripts/lock.sh

clean:
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .cache dist build
	@find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
