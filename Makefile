# Every command of the project; `make` lists them. Targets that need .venv make it first.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DOCS := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# -p no:benchmark: benchmarks are not tests, and their plugin warns beside xdist.
# One worker runs all tests of a file, which share their traces; long files start first.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -p no:benchmark
# Lint, types and tests run at the same time, and each reports its failures.
TOGETHER := $(MAKE) --no-print-directory --keep-going --jobs lint types

# No target downloads a model; $(JOBS) workers share the cores.
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1
# Without bytecode every process of a run compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo check test heavy lint types golden fuzz clean docs notebooks page bench \
	floors large checkpoints zoo zoo-diff flops inductor exact falls manychips accuracy serving published \
	earlier versions measure collectives tests quick

##@ Every day

help: ## list the commands
	@awk -F ':.*## ' '/^##@ / { printf "%s%s\n", sep, substr($$0, 5); sep = "\n" } \
		/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## make .venv with everything in it (PYTHON=python3.12 names another Python)

# The stamp is removed first and written last. Without it (an interrupted install) the environment is
# made from scratch; with it, only updated.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "make: no '$(PYTHON)' here; name a Python 3.10 or later: make venv PYTHON=python3.12"; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: rooftrace needs Python 3.10 or later, '$(PYTHON)' is $$($(PYTHON) -V 2>&1);" \
			"name another: make venv PYTHON=python3.12"; \
		exit 1; }
	@if [ -f $@ ] && $(BIN)/python -c '' 2>/dev/null; then \
		echo "Updating $(VENV)"; rm -f $@; \
	else \
		echo "Creating $(VENV) with $$($(PYTHON) -V 2>&1); torch makes this take a while, once"; \
		rm -f $@; $(PYTHON) -m venv --clear $(VENV); \
	fi
	@$(PIP) install --constraint constraints.txt pip setuptools wheel
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[hf,compare,fleet,test,dev]'
	@touch $@

demo: $(INSTALLED) ## a report on DeepSeek-V3 (671 B parameters) on an H200, in out/deepseek-v3
	@$(BIN)/rooftrace report deepseek-v3 \
		--batch 8 --seq 255 --kv 255 --dtype fp8 --chip h200-sxm --out out/deepseek-v3

check: $(INSTALLED) ## lint, types and the quick tests, in about a minute; before every commit
	@$(TOGETHER) quick

quick: $(INSTALLED)
	@$(PYTEST) -m quick

test: $(INSTALLED) ## lint, types and all tests but `heavy`: what CI runs
	@$(TOGETHER) tests

tests: $(INSTALLED)
	@$(PYTEST) -m 'not heavy'

heavy: $(INSTALLED) ## the remaining cases of long sweeps: every model, phase, command and option
	@$(PYTEST) -m heavy

lint: $(INSTALLED) ## ruff: checks and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: $(INSTALLED) ## mypy, strict
	@$(BIN)/mypy

golden: $(INSTALLED) ## rewrite the golden files; read their diff before you commit
	@$(PYTEST) --update-golden
	@$(BIN)/python tests/update_readme.py
	@git --no-pager diff --stat -- tests/golden README.md docs

fuzz: $(INSTALLED) ## attack files, commands, names and threads with random input (FUZZ=600 seconds for each)
	@$(PYTEST) tests/fuzz --fuzz-seconds=$(or $(FUZZ),600) --hypothesis-profile=explore

clean: ## remove caches, builds and out/; .venv stays
	@rm -rf out build dist *.egg-info .benchmarks .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find rooftrace tests examples benchmarks site -name __pycache__ -type d -prune -exec rm -rf {} +

##@ The site and the page of HTML reports

# Only the site needs these packages, so only this target installs them.
$(INSTALLED_DOCS): $(INSTALLED)
	@echo "Installing what the site is built with"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

docs: $(INSTALLED_DOCS) ## build the site in out/site and check its links (KEEP=1 draws only missing pictures)
	@$(BIN)/python site/build.py $(if $(KEEP),--keep-pictures)

notebooks: $(INSTALLED) ## make notebooks of the examples in out/notebooks
	@$(BIN)/python site/build.py --notebooks out/notebooks

page: ## build the script of HTML reports from site/app/ (needs Node)
	@command -v npm >/dev/null 2>&1 || { echo "make: npm is not here; it comes with Node.js"; exit 1; }
	@cd site/app && npm ci --silent --no-audit --no-fund && npm run --silent types && npm run --silent build

##@ Speed and memory of rooftrace

bench: $(INSTALLED) ## time rooftrace itself; results are ratios within one run
	@$(BIN)/python -m pytest benchmarks --benchmark-only

floors: $(INSTALLED) ## time commands beside bare processes, and traces beside other counters (N=5)
	@mkdir -p out && $(BIN)/python benchmarks/peers/floors.py --rounds $(or $(N),5) > out/floors.md
	@$(BIN)/python benchmarks/peers/peers.py --rounds $(or $(N),5) > out/peers.md
	@echo "written to out/floors.md and out/peers.md"

large: $(INSTALLED) ## time, memory and Ctrl-C at 500,000 ops, 100 x 512 experts, a 1.5 GB trace (STOPS=20)
	@mkdir -p out && $(BIN)/python benchmarks/large/large.py --stops $(or $(STOPS),20) > out/large.md
	@echo "written to out/large.md"

checkpoints: $(INSTALLED) ## memory that a diff of two checkpoints takes (GB=5 FORM=torch LARGEST=0.25 FOLDER=)
	@$(BIN)/python benchmarks/checkpoints/memory.py $(or $(FOLDER),out) --gb $(or $(GB),5) \
		$(if $(FORM),--form $(FORM)) $(if $(LARGEST),--largest $(LARGEST))

##@ Results checked over many models

zoo: $(INSTALLED) ## trace every model of the installed packages (ZOO=folder GROUP=hf,timm or heads N=50)
	@$(BIN)/python benchmarks/zoo/run.py --workers $(JOBS) \
		$(if $(ZOO),--zoo $(ZOO)) $(if $(GROUP),--group $(GROUP)) $(if $(N),--n $(N))

zoo-diff: $(INSTALLED) ## diff every model of the zoo against itself: no row may differ (ZOO= GROUP= N=)
	@$(BIN)/python benchmarks/zoo/diffs.py --workers $(JOBS) --out out/zoo-diff.jsonl \
		$(if $(ZOO),--zoo $(ZOO)) $(if $(GROUP),--group $(GROUP)) $(if $(N),--n $(N))

flops: $(INSTALLED) ## our FLOPs and torch's over the zoo (ZOO= GROUP= N=), or TORCHVISION=installed
	@$(BIN)/python $(if $(TORCHVISION),benchmarks/flops/torchvision_ops.py $(TORCHVISION), \
		benchmarks/flops/zoo_flops.py --workers $(JOBS) --out out/flops.jsonl \
		$(if $(ZOO),--zoo $(ZOO)) $(if $(GROUP),--group $(GROUP)) $(if $(N),--n $(N)))

inductor: $(INSTALLED) ## our kernels and those of Inductor's scheduler (MODEL="gpt2 resnet-50"; needs triton)
	@$(BIN)/python -c 'import triton' 2>/dev/null || { \
		echo "make: Inductor needs the triton wheel, and no GPU: $(BIN)/pip install triton"; exit 1; }
	@$(BIN)/python benchmarks/inductor/compare.py $(MODEL)

exact: $(INSTALLED) ## forms and traces at held-out sizes, about an hour (COUNT=5 ONLY=gpt2 PHASE=decode)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact/exact.py --count $(or $(COUNT),40) \
		$(if $(ONLY),--only $(ONLY)) $(if $(PHASE),--phase $(PHASE))

falls: $(INSTALLED) ## steps that get faster at a larger size, about an hour (CHAINS=2 ONLY=gpt2 PHASE=decode)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact/falls.py --chains $(or $(CHAINS),20) \
		$(if $(ONLY),--only $(ONLY)) $(if $(PHASE),--phase $(PHASE))

manychips: $(INSTALLED) ## published steps on many chips and ours (DATA=folder: torchtitan.csv, simumax_b200.csv, korthikanti.csv)
	@test -n "$(DATA)" || { echo "make: name the folder of the tables: make manychips DATA=folder"; exit 1; }
	@cd benchmarks/manychips && ../../$(BIN)/python torchtitan.py $(abspath $(DATA))
	@cd benchmarks/manychips && ../../$(BIN)/python simumax.py $(abspath $(DATA))
	@cd benchmarks/manychips && ../../$(BIN)/python korthikanti.py $(abspath $(DATA))
	@$(BIN)/python benchmarks/manychips/real_memory.py

##@ Pages of docs/ that a run writes

accuracy: $(INSTALLED) ## docs/accuracy.md: predicted and measured times (DATA=folder; N=8; REFIT=1: intervals)
	@mkdir -p out && $(BIN)/python benchmarks/accuracy/page.py $(DATA) $(if $(N),--every $(N)) $(if $(REFIT),--refit) > out/accuracy.md
	@mv out/accuracy.md docs/accuracy.md && echo "written to docs/accuracy.md"

serving: $(INSTALLED) ## docs/serving-published.md: the preset `serving` and published figures
	@mkdir -p out && $(BIN)/python benchmarks/serving/run.py > out/serving.md
	@mv out/serving.md docs/serving-published.md && echo "written to docs/serving-published.md"

published: $(INSTALLED) ## docs/published-sizes.md: weights and caches of published checkpoints
	@mkdir -p out && $(BIN)/python tests/tracer/published_models.py > out/published.md
	@mv out/published.md docs/published-sizes.md && echo "written to docs/published-sizes.md"

earlier: $(INSTALLED) ## docs/earlier-report.md: an earlier report's tables (GRID=1 adds its 432 points)
	@mkdir -p out $(if $(GRID),&& $(BIN)/python benchmarks/seed/grid.py > out/grid.csv && mv out/grid.csv benchmarks/seed/grid.csv)
	@$(BIN)/python benchmarks/seed/page.py > out/earlier.md
	@mv out/earlier.md docs/earlier-report.md && echo "written to docs/earlier-report.md"

versions: $(INSTALLED) ## docs/versions.md: quick tests with other releases (VENVS=folder, 7 GB a row; ONLY=torch2.8)
	@test -n "$(VENVS)" || { echo "make: name a folder for the environments: make versions VENVS=/tmp/venvs"; exit 1; }
	@$(BIN)/python benchmarks/releases/matrix.py --venvs $(VENVS) --jobs $(JOBS) \
		$(if $(ONLY),--only $(ONLY)) $(if $(REPORTS),--reports)

##@ Devices: measure and fit

# With the Python and the torch that are there: a GPU's machine often has both, and no network.  The
# suite needs msgspec beside them, one wheel without dependencies.
measure: ## measure this device with PYTHON's own torch; installs nothing (BUDGET=480 OUT=file.json.gz)
	@unset OMP_NUM_THREADS; $(PYTHON) -m rooftrace.measured \
		$(if $(BUDGET),--budget $(BUDGET)) $(if $(OUT),--out $(OUT)) $(if $(QUICK),--quick)

collectives: $(INSTALLED) ## fit the constants of collectives to measurements and score them (DATA=folder TOML=1)
	@test -n "$(DATA)" || { echo "make: name the folder with the measurements: make collectives DATA=folder"; exit 1; }
	@$(BIN)/python benchmarks/collectives/refit.py $(DATA) $(if $(TOML),--toml)
