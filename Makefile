# `make` without a target lists the targets. PYTHON is the interpreter that creates .venv.
PYTHON ?= python3
DETECTOR ?= retinanet
ARGS ?=

RUN := .venv/bin/python
OUT := output/demo_$(DETECTOR)
# Two processes. An idle process takes over tests from the other one, because some test files take much longer.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal
# The public API is checked for all type errors. Other modules are checked with the `basic` preset of pyrefly.
TYPED = $(addprefix backbones/,__init__.py build.py checkpoint_files.py convert.py errors.py files.py) \
	$(addprefix projects_vil/,__init__.py api.py checkpoint/__init__.py config.py data/api.py data/catalog.py run.py) \
	$(addprefix projects_vil/inference/,__init__.py detector.py) tests/public_types.py $(wildcard vil/*.py)

# Tests of the code that depends most on the versions of torch, NumPy, Pillow and OpenCV.
LOWEST_TESTS := vil/test_cli.py $(addprefix backbones/,attention layers test_golden.py) research/test_timm_models.py \
	$(addprefix projects_vil/,$(addprefix data/test_,augmentation.py dataset_mapper.py image_files.py build.py records.py) \
	inference/test_detector.py engine/test_train_step.py engine/test_trainer.py modeling visualization)

ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifneq ($(DETECTOR),retinanet)
ifneq ($(DETECTOR),mask_rcnn)
$(error DETECTOR=$(DETECTOR) is unknown. Use retinanet or mask_rcnn)
endif
endif
endif

.PHONY: help demo test test-slow test-all test-compiled test-lowest gpu test-gpu lint types docs release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: export DETECTRON2_DATASETS := $(CURDIR)/datasets
demo: .venv/.stamp ## train, evaluate and export a small detector; DETECTOR=mask_rcnn for masks, ARGS=--resume to continue
	@$(RUN) examples/make_shapes_dataset.py datasets/shapes
	@$(RUN) tools/train_net.py --config-file configs/demo/$(DETECTOR)_vil_shapes.yaml OUTPUT_DIR $(OUT) \
		OVERWRITE_OUTPUT_DIR True $(ARGS)
	@$(RUN) tools/export_model.py --config-file $(OUT)/config.yaml --weights $(OUT)/model_final.pth \
		--format torchscript --output $(OUT)/export
	@$(RUN) tools/visualize.py results $(OUT)

test: .venv/.stamp ## run the fast tests; pytest gets ARGS, for example ARGS="tests/tools -k arguments"
	@$(PYTEST) $(ARGS)

test-slow: .venv/.stamp ## run the slow tests
	@$(PYTEST) -m slow $(ARGS)

test-all: .venv/.stamp ## run the fast and the slow tests
	@$(PYTEST) -m 'not compiled' $(ARGS)

test-compiled: .venv/.stamp ## run the AOTInductor tests, which compile for tens of minutes
	@$(PYTEST) -m compiled $(ARGS)

test-lowest: private RUN := .venv-lowest/bin/python
test-lowest: .venv-lowest/.stamp ## run a sample of the fast tests with the lowest supported versions
	@$(PYTEST) $(addprefix tests/,$(LOWEST_TESTS)) $(ARGS)

gpu: ## check and measure the backbones on a GPU with plain torch, Triton and timm; results in output/gpu
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo 'error: $(PYTHON) has no torch with a CUDA device. Use make gpu PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -m research.benchmarks.gpu --output output/gpu

test-gpu: .venv/.stamp ## run the GPU tests and measure a training step of Mask R-CNN
	@$(RUN) -m pytest -m gpu $(ARGS)
	@mkdir -p output/gpu
	@.venv/bin/vil benchmark --device cuda --what train-step --detector mask_rcnn --dtype bfloat16 --batch 2 \
		--image-size 800 1333 --models vil_small_rpb+ATTENTION_BACKEND=sdpa \
		vil_small_rpb+ATTENTION_BACKEND=triton ls_small lit_s --against r50 swin_t --json output/gpu/mask_rcnn.json

lint: .venv/.stamp ## check style, formatting, spelling and import layers
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --check --quiet .
	@.venv/bin/codespell
	@.venv/bin/lint-imports --no-cache > /dev/null

types: .venv/.stamp ## check types
	@.venv/bin/pyrefly check
	@.venv/bin/pyrefly check --preset default $(TYPED)

docs: .venv/.stamp ## build the documentation in site/; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

release-check: .venv/.stamp ## check the version, build dist/ and test the wheel
	@$(RUN) .ci/release_check.py

clean: ## delete the output of the demo, tests and builds, but not the environments
	rm -rf output/demo_retinanet* output/demo_mask_rcnn* output/demo_cascade* output/demo_semantic_fpn*
	rm -rf datasets/shapes datasets/shapes_sem_seg datasets/shapes_panoptic
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# .venv is created once and updated when one of the files below changes. While a step changes .venv, the file
# .venv/.sound does not exist. If a step is killed or interrupted, the next run therefore creates .venv again. If a step
# fails, for example without a network, the next run continues with the installed packages.
PYTHON_FITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PIP := $(RUN) -m pip --quiet --quiet --disable-pip-version-check
# This is a variable because a comma would end an argument of `call`.
EXTRAS := dev,docs
step = trap 'exit 130' INT TERM HUP; rm -f .venv/.sound; $(1); status=$$?; touch .venv/.sound; exit $$status

.venv/.stamp: setup.py pyproject.toml vil/install_detectron2.py
	@$(PYTHON) -c '$(PYTHON_FITS)' 2>/dev/null || { \
		echo 'error: $(PYTHON) is not Python 3.10 to 3.13. Run make PYTHON=/path/to/python3.11 ...' >&2; \
		exit 1; }
	@if [ ! -e .venv/.sound ] || ! $(RUN) -c '' 2>/dev/null; then \
		echo 'Creating .venv with $(PYTHON)'; \
		rm -rf .venv && $(PYTHON) -m venv .venv && touch .venv/.sound; fi
	@$(call step,$(PIP) install --upgrade pip 'setuptools<81' wheel)
	@echo 'Downloading and installing the requirements: about 2.7 GB, mostly torch. The first time takes 2 to 5 minutes.'
	@$(call step,$(PIP) install --no-compile --editable '.[$(EXTRAS)]')
	@$(call step,$(RUN) tools/install_detectron2.py)
	@touch $@

# The lowest versions that have wheels for the interpreter, which is Python 3.10 if uv finds it.
WHEELS := matplotlib numpy opencv-python-headless orjson pillow pyarrow pycocotools pyyaml safetensors

.venv-lowest/.stamp: .venv/.stamp
	@echo 'Creating .venv-lowest and installing the lowest versions of the requirements: about 2.7 GB'
	@rm -rf .venv-lowest
	@.venv/bin/uv venv --quiet --seed .venv-lowest \
		--python "$$(.venv/bin/uv python find 3.10 2>/dev/null || command -v $(PYTHON))"
	@.venv/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct \
		$(addprefix --only-binary ,$(WHEELS)) --editable '.[hub,scale,starter,test]'
	@.venv-lowest/bin/python tools/install_detectron2.py --source index
	@touch $@
