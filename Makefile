# Everything from a fresh clone: `make serve`, `make test`. Only Python 3.11+ is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test check bench clean

serve: $(VENV)/.installed
	$(BIN)/manyroots serve $(ARGS)

test: check  # which has run tests/architecture
	$(BIN)/python -m pytest -n auto --dist loadfile --ignore tests/architecture $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

bench: $(VENV)/.installed
	$(BIN)/manyroots bench offline --compare transformers $(ARGS)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
