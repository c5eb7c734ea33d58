# Every target sets up .venv by itself; the stamp makes the second time quick.
PYTHON ?= python3
VENV := .venv
PINS := --constraint constraints.txt
BIN := $(VENV)/bin
EMPTY := $(VENV)/.empty
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Of thousands of files most are never imported: Python compiles those that are, and keeps that for the next process,
# whatever the shell says, or torch would be compiled hundreds of times.
PIP := $(BIN)/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
CHROMIUM := $(shell command -v chromium 2>/dev/null)
IPROUTE := $(shell PATH="$$PATH:/usr/sbin:/sbin" command -v tc 2>/dev/null)
# As root without sudo, as somebody else with it.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: setup demo docs bench bench-tables style format types check test tests test-newest test-oldest test-all slow shards browser network clean

setup: $(STAMP)

# With the pip of today: that of Python 3.11 needs twice as long to choose among all there is. The pip of $(PYTHON) puts
# it there, or else ensurepip, which takes longer.
TOOLS := pip 'setuptools>=77'
$(EMPTY):
	@$(PYTHON) -c 'import sys; sys.exit("gapless needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile --upgrade $(TOOLS) 2>/dev/null || { \
		$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
			{ $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q python3-venv; }; \
		$(BIN)/python -m ensurepip && $(PIP) --upgrade $(TOOLS); }
	touch $@

# Enough to run it: torch and the package itself, and NumPy, since torch warns at every import without it.
$(RUNS): pyproject.toml constraints.txt | $(EMPTY)
	@echo "installing torch and gapless in $(VENV): the first time takes as long as the download of torch"
	$(PIP) $(PINS) --no-build-isolation --editable '.[train]' numpy
	touch $@

# And what the checks and tests need on top, all at once.
$(STAMP): pyproject.toml constraints.txt | $(EMPTY)
	$(PIP) $(PINS) --no-build-isolation --editable '.[dev]'
	touch $(RUNS) $@

demo: $(RUNS)
	@mkdir -p demo
	$(BIN)/python -m gapless show gpipe --devices 4 --microbatches 4
	$(BIN)/python -m gapless show zb-h1 --devices 4 --microbatches 4
	$(BIN)/python -m gapless compare --devices 8 --microbatches 32 --html demo/compare.html
	@rm -rf demo/run demo/weights.safetensors
	@echo "A small GPT, 30 steps on 4 devices, then 20 more on 2. Without GPUs devices are threads, so this shows what"
	@echo "happens and not how fast it would be; the measured bubble means something on a machine that is otherwise idle."
	$(BIN)/python -m gapless train examples/demo.toml --steps 30 --folder demo/run
	$(BIN)/python -m gapless train examples/demo.toml --steps 50 --folder demo/run --devices 2
	$(BIN)/python -m gapless checkpoint export demo/run demo/weights.safetensors
	@echo "The same 50 steps in a plain loop, on one device and without a break:"
	$(BIN)/python examples/prove.py examples/demo.toml demo/weights.safetensors --steps 50
	@echo
	@echo "Open in a browser: demo/compare.html (every schedule, drawn) and demo/run/report.html (the run)."
	@echo "Then: source .venv/bin/activate, gapless explore, and your own model as in docs/quickstart.md"

# The pages of docs/ as a site, in site/. Links and anchors that lead nowhere end it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

# All benchmarks, on one page; or one, with its options: make bench NAME='emulated --devices 4'.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(or $(NAME),all --html benchmarks.html)

# The tables of docs/results.md and docs/memory.md, from the results that are stored in docs/results.
bench-tables: $(STAMP)
	$(BIN)/python -m benchmarks.runner.docs_tables docs/results.md docs/results/bench
	$(BIN)/python -m benchmarks.runner.docs_tables docs/memory.md docs/results/memory

$(VENV)/.docs: pyproject.toml constraints.txt | $(EMPTY)
	$(PIP) $(PINS) 'mkdocs-material>=9.6'
	touch $@

style: format types

format: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples

types: $(STAMP)
	$(BIN)/mypy $(MYPY)

# What is quick to know. `make test` has these tests among all others.
check: style
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_public_surface.py

browser:
ifeq ($(CHROMIUM),)
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q chromium
endif

# Two hosts on one machine.
network:
ifeq ($(IPROUTE),)
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q iproute2
endif

# mypy takes one core, for half a minute: the tests begin beside it. A cache that is not there is not written, which
# would take half as long again.
test: format
	$(MAKE) --no-print-directory --jobs 2 types tests MYPY=$(if $(wildcard .mypy_cache),,--cache-dir=/dev/null)

tests: $(STAMP) browser network
	$(PYTEST) -m "not slow and not alone" $(BESIDE)
	$(PYTEST) -m "not slow and alone" $(ALONE)

# The same tests with the newest there is of everything, and with the oldest of everything that pyproject.toml allows.
# Each has an environment of its own; that of the newest is brought up to date every time.
test-newest:
	rm -f $(VENV)-newest/.installed
	$(MAKE) tests VENV=$(VENV)-newest PINS='--upgrade --upgrade-strategy eager'

test-oldest:
	$(MAKE) tests VENV=$(VENV)-oldest PINS='$(OLDEST)'

OLDEST = $(shell grep -oE '"[a-z-]+>=[0-9.]+"' pyproject.toml | sed -E 's/>=(.*)"/==\1.*"/')

# Tests run side by side but for those that measure time, two processes more than there are cores, since some wait.
PYTEST := $(BIN)/python -m pytest --durations 10
CORES := $(shell getconf _NPROCESSORS_ONLN)
ALONE := $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
BESIDE := --numprocesses $(shell expr $(CORES) + 2) --maxprocesses 4 --dist worksteal

# The slow tests in shards, each of less than 15 minutes on 2 cores: `make slow-exact` and so on, `make slow` for all.
# tests/test_shards.py sees to it that every test file is in one of them.
SLOW_theory := tests/benchmarks tests/cli tests/explore tests/pipeline tests/plan tests/schedule tests/train tests/view tests/test_units.py
SLOW_models := tests/hf tests/model tests/stage tests/zoo
SLOW_lives := tests/checkpoint $(shell find tests/run -name test_children.py -o -name test_failures.py -o -name test_life.py -o -name test_watch.py)
SLOW_ranks := $(filter-out $(SLOW_lives),$(shell find tests/run -name 'test_*.py'))
SLOW_random := tests/test_random_models.py
SLOW_exact := $(filter-out $(SLOW_random) tests/test_units.py,$(wildcard tests/test_*.py))
SHARDS := theory models lives ranks random exact

slow: $(SHARDS:%=slow-%)

# Either part may be empty, which pytest tells by ending with 5. What passed says its seeds.
slow-%: $(STAMP) network
	$(PYTEST) -rP -m "slow and not alone" $(BESIDE) $(or $(wildcard $(SLOW_$*)),$(error $@ has no tests; make shards)) || [ $$? = 5 ]
	$(PYTEST) -rP -m "slow and alone" $(wildcard $(SLOW_$*)) || [ $$? = 5 ]

# The whole product is too long for one shard: every fourth test, side by side.
slow-exact: slow-exact-1 slow-exact-2 slow-exact-3 slow-exact-4

slow-exact-%: $(STAMP) network
	$(PYTEST) -m slow --part $*/4 $(BESIDE) $(SLOW_exact)

# Only slow tests need these: the recipe for Lightning, and a long run that writes for TensorBoard.
slow-models: $(VENV)/.lightning
slow-theory: $(VENV)/.tensorboard

$(VENV)/.lightning $(VENV)/.tensorboard: $(VENV)/.%: | $(STAMP)
	$(PIP) $(PINS) $*
	touch $@

shards:
	@$(foreach shard,$(SHARDS),echo slow-$(shard): $(wildcard $(SLOW_$(shard)));)

test-all: test slow

clean:
	rm -rf $(VENV) $(VENV)-* demo site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
