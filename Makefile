# make demo    find photographs by altered views of them: a table, and a picture in demo/
# make test    everything that CI runs
# make lint    the quick part of it
# make docs    write docs/cli.md, docs/api.md and the picture in CONTRIBUTING.md again, from the code
#
# Each makes .venv first, with the versions in constraints.txt. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
# Where Python is told to write no bytecode, each of the hundreds of commands that the tests start would compile cooc.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types types-elsewhere browser docs clean

demo: .venv/demo.installed
	$(BIN)/python examples/demo.py

test: lint browser
	$(BIN)/pytest -q -n 2 --dist loadfile

lint: .venv/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 types types-elsewhere
	$(BIN)/lint-imports

types: .venv/dev.installed
	$(BIN)/mypy

types-elsewhere: .venv/dev.installed
	$(BIN)/mypy --platform darwin --python-version 3.13 --cache-dir .mypy_cache/darwin

# The page is tested in Chromium, which comes from the system's packages.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
	  || { echo "The tests of the page need Chromium: apt-get install chromium"; exit 1; }

docs: .venv/dev.installed
	$(BIN)/python docs/write_cli.py
	$(BIN)/python docs/write_api.py
	$(BIN)/python docs/write_rooms.py

clean:
	rm -rf .venv demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints are given by the environment, so that the builds which pip starts keep to them as well. pip compiles
# one file after another: that is done on all cores instead, but for the packages' own tests.
.venv/%.installed: pyproject.toml constraints.txt | .venv/bin/pip
	PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e '.[$*]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true # files for other Pythons do not compile
	@touch $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cooc needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
