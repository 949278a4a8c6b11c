# Every target sets up .venv by itself; that needs Python 3.11 or newer and a package registry. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOWEST := .venv-lowest
CORE := tests/test_recipes.py tests/test_recipe_schema.py tests/data/test_tokenizers.py \
  tests/evaluate/test_metrics.py tests/kernels/test_conv.py tests/mixers/test_equations.py tests/train/test_checkpoint.py \
  tests/train/test_recipe.py tests/train/test_trainer.py
PEERS := .peers

# One torch thread per test process: processes that each start a thread per core slow one another down. With worksteal
# each of the two has half of the files in one piece, which share their fixtures, and helps the other when it is done.
# What Python compiles is kept, whatever the environment says: tests start programs a hundred times.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-lowest test-gpu nightly lint format docs bench bench-decode bench-instructions bench-loader bench-peers bench-tables torture clean

help: ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Compares three mechanisms in a language model of bytes: a table, and a page that opens offline.
	$(BIN)/subquad demo

test: $(INSTALLED) ## Runs the test suite without what is marked nightly.
	$(PYTEST) -m "not nightly"

nightly: $(INSTALLED) ## Runs the slow tests.
	$(PYTEST) -m nightly

# The schema's own text depends on the version of pydantic that wrote it.
test-lowest: ## Runs a core part of the suite with the lowest versions that are allowed, in .venv-lowest.
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install . pytest hypothesis --constraint $(LOWEST)/constraints.txt
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -m "not nightly" $(CORE) \
	  --deselect tests/test_recipe_schema.py::test_the_schema_is_current

test-gpu: $(INSTALLED) ## Proves everything on this machine's GPU: kernels, mechanisms, commands, training, bench.
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(INSTALLED) ## Checks style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Repairs style and formatting where ruff can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## Writes the generated parts of README.md, docs/ and the package, and the figures, and builds the site in site/, offline.
	$(BIN)/python -m tools.docs
	$(BIN)/python -m tools.recipe_index
	$(BIN)/python -m tools.recipe_schema
	$(BIN)/python -m tools.swap_table docs/interop.md
	$(BIN)/python -m tools.house_counts docs/architecture.md
	$(BIN)/python docs/figures/draw.py
	$(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED) ## Measures docs/performance.md, in half an hour on an idle machine. One part: ONLY="--only conv".
	$(BIN)/python -m benchmarks.mechanisms $(ONLY) --json docs/performance.json --plot docs/performance.svg \
	  --write-docs docs/performance.md

bench-decode: $(INSTALLED) ## Measures docs/decoding.md on an idle machine. A trained run too: ONLY="--run RUN ...".
	$(BIN)/python -m benchmarks.decode $(ONLY) --json docs/decoding.json --write-docs docs/decoding.md

bench-tables: $(INSTALLED) ## Measures docs/efficiency.md on an idle machine. One part: ONLY="--only linformer".
	$(BIN)/python -m benchmarks.tables $(ONLY) --json docs/efficiency.json --write-docs docs/efficiency.md

bench-loader: $(INSTALLED) ## Measures how fast batches are loaded, for docs/training.md, on an idle machine.
	$(BIN)/python -m benchmarks.loader $(ONLY) --json docs/loader.json --write-docs docs/training.md

bench-peers: $(PEERS)/.installed ## Measures other libraries beside ours, for docs/peers.md, on an idle machine.
	$(PEERS)/bin/python -m benchmarks.peer $(ONLY) --json docs/peers.json --write-docs docs/peers.md

bench-instructions: $(INSTALLED) ## Counts instructions for docs/performance.md; needs valgrind, but no idle machine.
	$(BIN)/python -m benchmarks.instructions $(ONLY) --json docs/instructions.json --write-docs docs/performance.md

# An environment of their own that sees the packages of the project's.
$(PEERS)/.installed: $(INSTALLED)
	$(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > $$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth
	$(PEERS)/bin/python -m pip install x-transformers local-attention performer-pytorch
	touch $@

torture: $(INSTALLED) ## Tries docs/reliability.md and docs/scale.md, which takes long. One part: ONLY="--only damage".
	$(BIN)/python -m torture $(ONLY) --json docs/reliability.json --write-docs docs/reliability.md \
	  --write-docs docs/scale.md

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]' --constraint constraints.txt
	touch $@

clean: ## Removes .venv and everything that was built.
	rm -rf $(VENV) $(LOWEST) $(PEERS) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
