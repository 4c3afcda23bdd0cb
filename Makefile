# Everything from a fresh clone: `make serve`, `make test`. Only Python 3.11+ is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_FLAGS := --quiet --disable-pip-version-check --retries 10 --timeout 60

.PHONY: serve test quick nightly faults coverage check lint types architecture files prose generated docs bench clean

# One file a subject: cache, scheduler, a real engine with adapters, the HTTP routes, the docs.
QUICK := tests/architecture tests/unit/cache/test_cache.py tests/unit/cache/test_namespaces.py \
	tests/unit/scheduler/test_scheduler.py tests/unit/scheduler/test_endings.py \
	tests/unit/engine/test_real_namespaces.py tests/unit/api/test_completions_route.py \
	tests/unit/test_package.py tests/unit/test_docs_facts.py

serve: $(VENV)/.installed
	$(BIN)/manyroots serve $(ARGS)

# Files go to the next free process in the order of their names: the long ones, of e2e to property,
# first. The slowest tests are named at the end.
# Hundreds of processes are started, which find the package compiled, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-test
	@$(BIN)/python -c '' || { echo "$(VENV) has no Python that runs; make clean, and again"; exit 1; }
	$(BIN)/python -m tests.helpers.machine
	$(MAKE) --jobs=2 check
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 30 \
		--ignore tests/architecture -m 'not nightly' $(ARGS)

# For the loop of editing and looking: lint, types and the tests that matter most.
quick: lint types
	$(BIN)/python -m pytest -q -n auto --dist loadfile --durations 5 $(QUICK) $(ARGS)

# The tests that `make test` leaves out: they take long, and say more of what others show.
nightly: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 30 \
		-m nightly $(ARGS)

# Plants each fault of tests/helpers/mutations.py, which tests the tests. `make test` plants a few.
# A part of `make nightly`.
faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q tests/property/test_mutations.py $(ARGS)

# Takes twice as long as `make test`. Servers that a test kills tell nothing of what they ran.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
		-m 'not nightly' $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o - | $(BIN)/python -m tools.coverage_by_room

check: lint types architecture files prose

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

architecture: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q tests/architecture

# What is not Python: each kind of file by its own linter.
SCHEMA := $(BIN)/python -m check_jsonschema --builtin-schema
files: $(VENV)/.installed-test
	$(BIN)/python -m yamllint --strict .
	$(BIN)/hadolint deploy/Dockerfile.*
	$(BIN)/python -m kubernetes_validate --strict --quiet deploy/kubernetes/*.yaml
	$(SCHEMA) vendor.compose-spec deploy/compose.yaml
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml

# Spelling, words to avoid and the width of Markdown.
prose: $(VENV)/.installed-test
	$(BIN)/python -m codespell_lib
	$(BIN)/python -m tools.docs.prose

# The pages of docs/ that are made from code and tests; a test compares them.
generated: $(VENV)/.installed-test
	$(BIN)/python -m tools.docs

# The site, in site/; a dead link or a page outside the navigation is an error. Not --quiet: strict
# counts only the warnings that are shown.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/manyroots bench offline --compare transformers $(ARGS)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[test]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
