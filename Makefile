# Everything runs in .venv, which is set up on first use. pip's own settings (index, proxy, wheels) apply.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
TOOLS := .venv/.tools
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test check bench build clean

help:  ## show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' Makefile
	@echo "PYTHON=python3.12 chooses the Python of a new .venv; ARGS='...' adds arguments to run and test."

run: $(READY)  ## serve the default model, after a short comparison with speculation off and on
	@$(BIN)/agentspec serve --demo $(ARGS)

test: $(TOOLS)  ## run the tests that need no model, on up to four cores
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist worksteal $(ARGS)

check: $(TOOLS)  ## formatting, lint, types, direction of imports, generated pages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests bench docs/reference.py
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python docs/reference.py --check

bench: $(READY)  ## cost of a step by its tokens; recorded runs with speculation off and on
	@$(BIN)/agentspec bench cost
	@$(BIN)/agentspec replay --baseline

build: $(TOOLS)  ## build the wheel into dist/ and import it from a clean environment
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python -m venv build/clean
	@build/clean/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
	@cd build && clean/bin/python -c "import agentspec.cli, agentspec.server.run, agentspec.traces.replay"
	@cd build && clean/bin/agentspec --version
	@echo "top-level names in the wheel:"
	@$(BIN)/python -m zipfile -l dist/*.whl | awk 'NR > 1 {split($$1, part, "/"); print "  " part[1]}' | sort -u

clean:  ## remove .venv, builds and caches; pulled models stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage

$(READY): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
			|| { echo "Python 3.11 to 3.13 is needed; $(PYTHON) is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' \
			|| { echo "$(PYTHON) cannot make environments; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
		echo "Setting up .venv with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear .venv; \
	fi
	@echo "Installing AgentSpec into .venv: a minute or two"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[worker]'
	@touch $@

$(TOOLS): $(READY)
	@echo "Installing what tests and checks need into .venv: half a minute"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
