# make demo   sets up and trains the arithmetic example on the CPU
# make test   sets up, checks the style and runs every test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WITHOUT_ACTORS := $(VENV)/tests_without_actors.log

TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test check browser setup clean

demo: $(READY)
	$(BIN)/areal-ray train examples/arithmetic.yaml

# Tests without actors keep one core busy; those with actors mostly wait for processes.
test: $(READY) check browser
	@$(BIN)/pytest -m "not actors and not vllm" >$(WITHOUT_ACTORS) 2>&1 & beside=$$!; \
	trap 'kill $$beside; exit 130' INT; \
	$(BIN)/pytest -m "actors or vllm"; with=$$?; \
	wait $$beside; without=$$?; \
	cat $(WITHOUT_ACTORS); \
	test $$with = 0 && test $$without = 0

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What pages are tested with. No package index has it.
browser:
	@if ! { command -v chromium && command -v chromedriver; } >/dev/null; then \
		as_root=$$(test "$$(id -u)" = 0 || echo sudo); \
		$$as_root apt-get update -qq && $$as_root apt-get install -qq -y chromium chromium-driver \
		|| { echo "make test needs chromium and chromedriver, and apt-get could not install them:" \
			"install the packages chromium and chromium-driver, or what your system calls them" >&2; \
			exit 1; }; \
	fi

setup: $(READY)

# The CPU build of torch comes first: asked for by another package, torch brings gigabytes of
# CUDA along. vLLM's CPU build pulls in four packages made for CUDA torch, with which
# transformers does not import, and runs without them.
$(READY): pyproject.toml setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch; assert torch.version.cuda is None" 2>/dev/null \
		|| $(BIN)/pip install --quiet "$(TORCH)+cpu" \
		|| $(BIN)/pip install --quiet "$(TORCH)" --index-url $(TORCH_CPU_INDEX)
	$(BIN)/pip install --quiet --editable ".[cpu,dev]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(BIN)/python -m compileall -q areal_ray actors placement
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
