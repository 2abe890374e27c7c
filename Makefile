# make serve   install what is missing, start Baton, print the URL      PORT (8000) HOST MODEL CONFIG
# make stop    stop the instance on PORT
# make test    install what is missing, run all tests
# make bench   five minutes of measurements: two pools against one, a table, a verdict, a report
# make check   ruff, mypy --strict, layer test
# make smoke   install LangChain and LiteLLM, and talk to a server through each
# make clean   remove .venv and caches of tools (models in ~/.cache/baton stay)

PORT   ?=
HOST   ?=
MODEL  ?=
CONFIG ?=
VENV   ?= .venv
PYTHON ?= python3

# Which torch is installed first, so that the requirement `torch` of Baton and of others is already met.
# A machine without an NVIDIA driver takes the version the project is tested with on CPU. Choose another build with
# e.g. TORCH="torch" or TORCH="torch==2.13.0 --index-url URL-OF-A-CPU-ONLY-INDEX" (PyPI's Linux wheel brings CUDA
# libraries of several GB).
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

PY    := $(VENV)/bin/python
# An older pip takes twice as long to choose versions, and compiles one file after the other, also those that are
# never imported: what no start of Baton needs (LATER) is compiled when a test first imports it.
PIP   := $(PY) -m pip install --progress-bar on --no-compile
LATER := /(transformers|sympy|networkx|plotly|pip|mypy|schemathesis|tests?|torch/testing)/
STAMP := $(VENV)/.baton-installed

.PHONY: serve stop test browser clients smoke check bench setup clean

serve: setup
	@exec $(PY) -m coordinator.launch $(if $(PORT),--port '$(PORT)') $(if $(HOST),--host '$(HOST)') $(if $(MODEL),--model '$(MODEL)') $(if $(CONFIG),--config '$(CONFIG)')

stop:
	@test -e $(STAMP) || { echo "nothing to stop: $(VENV) is not installed, or not to its end"; exit 0; }; \
	exec $(PY) -m coordinator.launch --stop $(if $(PORT),--port '$(PORT)') $(if $(CONFIG),--config '$(CONFIG)')

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"expected Python >= 3.11 but {sys.executable} is {v.major}.{v.minor}; set PYTHON=/path/to/python3.11")'
	@echo "[1/5] environment in $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@echo "[2/5] $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "[3/5] Baton and its libraries (a few minutes the first time)"
	@$(PIP) --editable '.[test]'
	@echo "[4/5] bytecode, so that the first start is as quick as the next (about a minute, without a word)"
	-@$(PY) -m compileall -q -j 0 -x '$(LATER)' "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@echo "[5/5] compiled kernels (without a C++ compiler Baton runs slower)"
	-@$(PY) -m engine.kernels.native.build
	@touch $@

# Three at a time; of those that start an instance or look at the clock, one (tests/lanes.py).
test: setup browser clients
	@$(PY) -m pytest -n 3 --dist loadfile

bench: setup
	@exec $(PY) -m benchmarks.quick $(if $(MODEL),--model '$(MODEL)') $(if $(CONFIG),--config '$(CONFIG)')

# The report's tests look at it in Chromium, which no Python package brings.
browser:
	@for name in "$$BROWSER_PATH" chromium chromium-browser google-chrome; do test -n "$$name" && command -v "$$name" >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing Chromium for the tests of the report"; apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	else echo "no Chromium found: the browser tests will fail; install it or set BROWSER_PATH"; fi

# What tests/clients run: the official npm package, pinned with its hash in package-lock.json, beside the tests.
CLIENTS := tests/clients/node_modules/.package-lock.json

clients: $(CLIENTS)

$(CLIENTS): tests/clients/package-lock.json
	@if ! command -v npm >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing node and npm for the tests of clients"; apt-get update -qq && apt-get install -qq -y --no-install-recommends nodejs npm >/dev/null; fi
	@if command -v npm >/dev/null; then npm ci --silent --ignore-scripts --no-audit --no-fund --prefix tests/clients && touch $@; \
	else echo "no npm found: the tests of the npm package will fail; install node 20 or newer"; fi

# LangChain and LiteLLM against a server of scripted answers; beside the tests, since their installation is long.
smoke: setup
	@$(PY) -m pip install --quiet --editable '.[clients]'
	@$(PY) -m tests.clients.smoke

check: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy --strict
	@$(PY) -m pytest --durations=0 tests/test_layers.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
