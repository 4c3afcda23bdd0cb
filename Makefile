# Everything from a fresh clone: `make serve`, `make test`. Only Python 3.11+ is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_FLAGS := --quiet --disable-pip-version-check --retries 10 --timeout 60

.PHONY: serve test check lint types architecture bench clean

serve: $(VENV)/.installed
	$(BIN)/manyroots serve $(ARGS)

# Files go to whoever is free in the order of their names: the long ones, of e2e to property, first.
# Hundreds of processes are started, which find the package compiled, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-test
	@$(BIN)/python -c '' || { echo "$(VENV) has no Python that runs; make clean, and again"; exit 1; }
	$(BIN)/python -m tests.machine
	$(MAKE) --jobs=2 check
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --ignore tests/architecture $(ARGS)

check: lint types architecture

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

architecture: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q tests/architecture

bench: $(VENV)/.installed
	$(BIN)/manyroots bench offline --compare transformers $(ARGS)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
