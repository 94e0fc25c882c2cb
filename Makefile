# Everything starts from a fresh clone: each target first makes .venv agree with uv.lock (scripts/bootstrap.sh).
#   EXTRA=cpu|gpu   which vLLM; by default gpu where an NVIDIA GPU is present, else cpu

export EXTRA

# Some environments forbid bytecode to be kept: each of the many interpreters here would then take 1.6 s more to import
# torch, and 5 s more to import vLLM.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
BOOTSTRAP := sh scripts/bootstrap.sh </dev/null
SOURCES := packages/types/src packages/client/src packages/backend/src

.DEFAULT_GOAL := help
.PHONY: help setup demo wheels test test-more test-ray test-vllm judges mutations mutants check format proto serve bench bench-tiny advisories clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## the environment alone: .venv
	@$(BOOTSTRAP)

demo: setup ## fine-tune a vision-language model through the SDK; KIND=FAMILY, or MODEL=NAME on a GPU
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(KIND),--kind "$(KIND)")

wheels: setup ## dist/: wheels, and the requirements that install them with an engine
	PATH="$$PATH:$$PWD/.uv/bin" uv build --all-packages --wheel --quiet --out-dir dist
	cp packages/backend/src/tinker_local/backend/cli/requirements-*.txt dist/

# Tiny models: more threads than one only get in each other's way.
test: export OMP_NUM_THREADS ?= 1
test: setup ## all that is quick; ARGS="-k name" for a part, EXAMPLES=100 for many examples of Hypothesis
	$(BIN)/python -m pytest -n auto -m "not more and not ray" $(ARGS)

test-more: export OMP_NUM_THREADS ?= 1
test-more: setup ## what starts processes or takes long: servers, kills, ranks, examples, the cookbook, browsers, pages
	$(BIN)/python -m pytest -n auto -m "more and not ray" $(ARGS)

test-ray: export OMP_NUM_THREADS ?= 1
test-ray: setup ## ranks and replicas on two Ray nodes of this machine, about six minutes
	$(BIN)/python -m pytest -m ray $(ARGS)

# Without `setup`, so that a vLLM that you installed into .venv stays.
test-vllm: export OMP_NUM_THREADS ?= 1
test-vllm: ## the core of sampling against whatever vLLM is installed, on both model runners: try a newer one
	$(BIN)/python -m pytest -m vllm_core tests/sampling $(ARGS)
	VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=$$($(BIN)/python -c "import torch; print(1 - torch.cuda.is_available())") \
		$(BIN)/python -m pytest -m vllm_core tests/sampling $(ARGS)

# mypy by paths: `mypy -p` skips portions of a namespace package without a word.
check: setup ## format, lint, types, circles of imports, mutations that no longer apply
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES) tests
	$(BIN)/python tests/mutations.py --check
	$(BIN)/python scripts/import_circles.py

judges: setup ## lm-eval and inspect for tests/judge, in an environment of their own: .test-files/judges
	PATH="$$PATH:$$PWD/.uv/bin" UV_PROJECT_ENVIRONMENT="$$PWD/.test-files/judges" \
		uv sync --quiet --frozen --project examples/judge

mutations: export OMP_NUM_THREADS ?= 1
mutations: setup ## break a line for each mutation and see its test fail: ARGS="--only NAME" for one
	$(BIN)/python tests/mutations.py $(ARGS)

mutants: setup ## break code by rule and list what no test notices, in hours: ARGS=losses, ARGS="scheduling --file fairness.py"
	$(if $(ARGS),,$(error which folder? make mutants ARGS=losses))
	$(BIN)/python -m tests.mutants $(ARGS)

format: setup ## rewrite the code as `check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## generate the protobuf code again
	$(BIN)/python packages/types/generate_proto.py

serve: setup ## a server: make serve MODEL=NAME[=PATH] [ARGS="--port 8000"]
	$(if $(MODEL),,$(error which model? make serve MODEL=NAME[=PATH]))
	$(BIN)/tinker-local serve --model "$(MODEL)" $(ARGS)

docs: setup ## the documentation as a site in site/; broken links are errors
	$(BIN)/zensical build --clean --strict

bench: setup ## training and sampling against hand-written loops and vLLM alone, on a GPU; ARGS="--only text"
	$(BIN)/python benchmarks/engine.py --out benchmarks/results $(ARGS)

bench-tiny: export OMP_NUM_THREADS ?= 1
bench-tiny: setup ## the same code on tiny models and a CPU, in a minute or two: does it still run?
	$(BIN)/python benchmarks/engine.py --tiny $(ARGS)
	$(BIN)/python benchmarks/scaling.py --tiny --only text
	$(BIN)/python benchmarks/replicas.py --tiny
	$(BIN)/python benchmarks/families.py --tiny --shapes qwen3.5-9b,qwen3-30b-a3b
	$(BIN)/python benchmarks/attention_kernels.py --tiny --only kernels,gemma-3-12b
	$(BIN)/python benchmarks/general_road.py --tiny --autograd --shapes internvl3.5-8b

advisories: ## published advisories about the lowest versions that the wheels admit, and those of uv.lock; needs a network
	sh scripts/advisories.sh

clean: ## caches and build results; the environment stays (it is .venv and .uv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . \( -path ./.venv -o -path ./.uv -o -path ./.git \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
