# Needs only make and a Python of at least 3.11. Everything is installed into .venv, with the exact
# versions of constraints.txt. Use another interpreter with `make PYTHON=python3.12 ...`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

INSTALL := $(BIN)/python .ci/with_lines.py "installing into $(VENV)" $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check --no-compile -c constraints.txt

DEMO_ARGS ?= --check
REASONING_ARGS ?=
BENCH_ARGS ?=
LLAMACPP_ARGS ?=
# Three processes keep two cores busy: each takes up to 4 GB, and waits for threads now and then. A
# module stays in one process, which makes its engines once; tests/conftest.py orders the modules.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
# `make test-newest` tests with the newest of everything: which needs a newer Python than 3.11.
NEWEST_PYTHON ?= python3.12
NEWEST := .venv-newest
# `make test-maxtext` has an environment of its own, with the versions of constraints-maxtext.txt:
# MaxText needs a newer Python than 3.11, and other packages than Tunix.
MAXTEXT_PYTHON ?= python3.12
MAXTEXT := .venv-maxtext
MAXTEXT_STAMP := $(MAXTEXT)/.installed
MAXTEXT_ARGS ?=
# A checkout of Tunix for `make test-tunix`, and what runs with it.
TUNIX ?=
TUNIX_TESTS ?= tests/adapter tests/training tests/examples tests/experimental

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(STAMP) ## Train with GRPO on addition and draw what happened (outputs/grpo_addition).
	$(BIN)/python examples/grpo_addition.py $(DEMO_ARGS)

.PHONY: real-model
real-model: $(STAMP) ## Fetch a real model, SmolLM2-135M-Instruct, into the user's cache; 93 MB.
	$(BIN)/python examples/get_smollm2.py

.PHONY: reasoning
reasoning: $(STAMP) ## Train that model with GRPO to explain in plain words, on a CPU.
	$(BIN)/python examples/grpo_reasoning.py $(REASONING_ARGS)

.PHONY: test
test: $(STAMP) ## Run the fast tests: most features once; PYTEST_ARGS="-k name" for some.
	$(BIN)/python -m pytest -m "not slow and not soak" $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMP) ## Run what CI runs: the other roads too, several devices, short trainings.
	$(BIN)/python -m pytest -m "not soak" $(PYTEST_ARGS)

.PHONY: soak
soak: $(STAMP) ## Run the rest before a release: kills, machines, long trainings; tests/soak.txt.
	$(BIN)/python -m pytest -m soak -p tests.soak $(PYTEST_ARGS)

.PHONY: test-tunix
test-tunix: $(STAMP) ## Run the tests that use Tunix with another one: make test-tunix TUNIX=../tunix.
	@$(BIN)/python tests/with_tunix.py "$(TUNIX)" $(PYTEST_ARGS) $(TUNIX_TESTS)

.PHONY: test-newest
test-newest: ## Run the fast tests with the newest JAX and all else that pip gives, in .venv-newest.
	@$(NEWEST_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "error: the newest JAX needs Python 3.12 or newer, but NEWEST_PYTHON='$(NEWEST_PYTHON)' is" \
	    "not one. Try: make test-newest NEWEST_PYTHON=python3.13" >&2; exit 1; }
	@$(NEWEST)/bin/python -m pip --version >/dev/null 2>&1 || \
	  $(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e ".[dev]"
	$(NEWEST)/bin/python -m pytest -p tests.newest -m "not slow and not soak" $(PYTEST_ARGS)

.PHONY: test-maxtext
test-maxtext: $(MAXTEXT_STAMP) ## Run the tests with MaxText, in .venv-maxtext; MAXTEXT_ARGS="-k name", or "-m slow".
	$(MAXTEXT)/bin/python -m pytest tests/maxtext -m "not slow and not soak" $(MAXTEXT_ARGS)

.PHONY: bench
bench: $(STAMP) ## Measure against every peer, in two hours; pass options with BENCH_ARGS="--quick".
	$(BIN)/python benchmarks/throughput/compare.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/throughput/llamacpp.py $(filter --quick,$(BENCH_ARGS)) $(LLAMACPP_ARGS)

.PHONY: notebooks
notebooks: $(STAMP) ## Run the notebooks and write them with their outputs.
	$(BIN)/python notebooks/execute.py

.PHONY: recipes
recipes: $(STAMP) ## Run all of Tunix's recipes, small, and write docs/recipes.md; ten minutes.
	$(BIN)/python -m tests.recipes.page $(TUNIX)

.PHONY: install-matrix
install-matrix: $(STAMP) ## Try the wheel beside other versions; needs the package index, an hour.
	$(BIN)/python .ci/install_matrix.py

.PHONY: docs
docs: $(STAMP) ## Build the documentation into site/, with warnings as errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: lint
lint: $(STAMP) ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

.PHONY: format
format: $(STAMP) ## Format the code and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: install
install: $(STAMP) ## Make .venv, or bring it up to date.

.PHONY: clean
clean: ## Remove caches, build outputs and demo outputs; keep .venv.
	rm -rf build dist outputs site .cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## Remove .venv, .venv-newest and .venv-maxtext as well.
	rm -rf $(VENV) $(NEWEST) $(MAXTEXT)

# An environment that cannot run pip (made by an interrupted run, or moved) is made anew.
# The build tools are installed first and build isolation is off: otherwise pip would fetch
# unpinned ones. (setuptools and wheel build `promise`, which exists as a source package only.)
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' was not found; Python 3.11 or newer is needed." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, but '$(PYTHON)' is" \
	    "$$($(PYTHON) -c 'import platform; print(platform.python_version())')." \
	    "Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	$(INSTALL) editables hatchling setuptools wheel
	$(INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

# The line that users are told to type, with our versions; and what pytest needs.
$(MAXTEXT_STAMP): export PIP_CONSTRAINT := $(CURDIR)/constraints-maxtext.txt
$(MAXTEXT_STAMP): export PIP_DISABLE_PIP_VERSION_CHECK := 1
$(MAXTEXT_STAMP): export PIP_QUIET := 1
$(MAXTEXT_STAMP): pyproject.toml constraints-maxtext.txt tunix_sgljax/maxtext/requirements.py
	@$(MAXTEXT_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "error: MaxText needs Python 3.12 or newer, but MAXTEXT_PYTHON='$(MAXTEXT_PYTHON)' is" \
	    "not one. Try: make test-maxtext MAXTEXT_PYTHON=python3.13" >&2; exit 1; }
	@$(MAXTEXT)/bin/python -m pip --version >/dev/null 2>&1 || \
	  $(MAXTEXT_PYTHON) -m venv --clear $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install editables hatchling setuptools wheel
	$(MAXTEXT)/bin/python -m pip install --no-build-isolation -e . hypothesis psutil pytest
	line=$$($(MAXTEXT)/bin/python -m tunix_sgljax.maxtext.requirements) && \
	  PATH="$(CURDIR)/$(MAXTEXT)/bin:$$PATH" sh -c "$$line"
	@touch $@
