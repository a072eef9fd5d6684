# Two commands do everything: `make up` runs a fleet, `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup up test lint results lock clean

setup: .venv/.ready

.venv/.ready: deploy/requirements.txt pyproject.toml
	@echo "setting up .venv (once; a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit("Pointsman needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r deploy/requirements.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

up: setup
	@$(BIN)/pointsman up $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest $(ARGS)

# Every study of docs/results.md, run anew (under half an hour on two cores). TRACES has the two trace files. A part
# of it, which writes nothing: make results ARGS="--only lag"; a taste of all: ARGS="--quick --out /tmp/taste".
TRACES ?= ../shared/traces
results: setup
	$(BIN)/pointsman results --traces $(TRACES) $(ARGS)

COMPILE = $(BIN)/pip-compile -q --strip-extras --generate-hashes --allow-unsafe --no-emit-index-url \
  --no-emit-trusted-host --no-emit-find-links --no-header

# What `make setup` installs, and the part of it that a container needs: with hashes, without index lines.
lock:
	$(COMPILE) --extra dev --output-file deploy/requirements.txt pyproject.toml deploy/build.in
	$(COMPILE) --build-deps-for wheel -c deploy/requirements.txt --output-file deploy/requirements-runtime.txt pyproject.toml

clean:
	rm -rf .venv .pointsman .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
