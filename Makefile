# `make demo` and `make test` set everything up by themselves; they need Python 3.11 or newer and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One torch thread per test process: processes that each start a thread per core slow one another down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test nightly lint format docs bench bench-decode bench-tables clean torture

demo: $(INSTALLED)
	$(BIN)/subquad demo

test: $(INSTALLED)
	$(PYTEST) -m "not nightly"

nightly: $(INSTALLED)
	$(PYTEST) -m nightly

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated parts of README.md and docs/ and the figures, then the site in site/, offline; tests fail while they are out of date.
docs: $(INSTALLED)
	$(BIN)/subquad docs
	$(BIN)/python docs/figures/draw.py
	$(BIN)/mkdocs build --strict

# The figures of docs/performance.md: half an hour on an idle machine. One part: make bench ONLY="--only conv"
bench: $(INSTALLED)
	$(BIN)/python benchmarks/mechanisms.py $(ONLY) --json docs/performance.json --plot docs/performance.svg \
	  --write-docs docs/performance.md

# The figures of docs/decoding.md: some minutes on an idle machine. A trained run too: make bench-decode ONLY="--run RUN ..."
bench-decode: $(INSTALLED)
	$(BIN)/python benchmarks/decode.py $(ONLY) --json docs/decoding.json --write-docs docs/decoding.md

# The figures of docs/efficiency.md, on an idle machine. One part: make bench-tables ONLY="--only linformer"
bench-tables: $(INSTALLED)
	$(BIN)/python benchmarks/tables.py $(ONLY) --json docs/efficiency.json --write-docs docs/efficiency.md

# The figures of docs/reliability.md and docs/scale.md: takes long. One part: make torture ONLY="--only damage"
torture: $(INSTALLED)
	$(BIN)/python -m torture $(ONLY) --json docs/reliability.json --write-docs docs/reliability.md \
	  --write-docs docs/scale.md

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]' --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
