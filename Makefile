# The two commands a newcomer needs are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= python3
# The release of PyTorch that is installed: plain `pip install -e .` takes the newest, which may be a GPU build of 5 GB.
# Another one gets an environment of its own: make test TORCH=2.15.0
PINNED := 2.13.0
TORCH  ?= $(PINNED)
VENV   := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN    := $(VENV)/bin

# Else each of the hundreds of processes that the tests start would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test-isa help install demo compare gpu gpu-kit test test-all test-engines test-slurm test-fast test-site site mutants attack check docs man test-editors screenshots clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# Each stamp is remade when what it installs changed.
$(VENV)/.core: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing meshwright into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e .
	@# only the script in it is used, so without what its Python needs
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'uplot-python>=1.1,<2'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests and checks need ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[test,check]'
	@touch $@

install: $(VENV)/.core ## make .venv and install meshwright into it

demo: $(VENV)/.core ## train a small model on the standard library's text over 2 processes
	@$(BIN)/meshwright demo

$(VENV)/.compare: $(VENV)/.core
	@echo "installing the engines to compare with ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[compare]'
	@touch $@

compare: $(VENV)/.compare ## train a small model in other engines beside ours, in turns: runs/compare/compare.md and .html
	@$(BIN)/meshwright compare src/meshwright/recipes/compare.yaml training.global_batch=4 --engines meshwright,bare,hf_trainer,accelerate,fabric --quick

# What a machine with a GPU but without network needs beside its PyTorch: .gpu/, under 50 MiB, which can be carried there.
KIT := .gpu
gpu-kit: $(VENV)/.core ## pack .gpu/ for `make gpu` on a machine without network; NANOGPT=DIR adds nanoGPT to compare speed with
	@rm -rf $(KIT); mkdir -p $(KIT)
	@for version in 3.11 3.12 3.13; do $(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version $$version --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --no-deps --dest $(KIT)/wheels pyyaml safetensors tokenizers annotated-types typing-inspection $$($(BIN)/python -m pip freeze | grep -E '^pydantic(-core|_core)?=='); done
	@$(BIN)/meshwright accept --device cpu --out $(KIT)/here --write-references $(KIT)/references.json; rm -rf $(KIT)/here
	@if test -n "$(NANOGPT)"; then mkdir $(KIT)/nanogpt; cp $(NANOGPT)/*.py $(KIT)/nanogpt/; fi
	@du -sh $(KIT)

gpu: ## try the product on this machine's GPU with the PyTorch of PYTHON, offline: OUT/report.txt, .json and .html
	@if test -d $(KIT)/wheels; then $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --find-links $(KIT)/wheels --no-deps --upgrade --target $(KIT)/site pyyaml safetensors tokenizers pydantic pydantic-core annotated-types typing-inspection; fi
	@PYTHONPATH=$(CURDIR)/src:$(CURDIR)/$(KIT)/site $(PYTHON) -P -m meshwright accept --out $(or $(OUT),runs/gpu) $(if $(wildcard $(KIT)/references.json),--references $(KIT)/references.json) $(if $(wildcard $(KIT)/nanogpt),--nanogpt $(KIT)/nanogpt) $(ACCEPT)

test: $(VENV)/.dev ## run the tests (CPU only, several processes); TORCH=2.15.0 on that release of PyTorch
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.dev ## run the tests with every combination of layouts, families and precisions, before a release
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --all

$(VENV)/.engines: $(VENV)/.dev
	@echo "installing the engines to test with ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[compare,deepspeed,lightning,megatron,peft,trl]'
	@touch $@

test-engines: $(VENV)/.engines ## run the tests of other engines, DeepSpeed's too, which compiles at first use; NANOGPT=DIR for nanoGPT, CLONES=DIR for those of schemas
	@$(BIN)/python -m pytest --engines --all $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(CLONES),--checkouts $(CLONES)) tests/test_engines.py tests/test_compare.py tests/test_engines_parity.py tests/test_engines_train.py tests/test_engines_tuning.py tests/test_engines_gpu_only.py tests/test_engines_schemas.py tests/test_imports_checkpoints.py

test-slurm: $(VENV)/.dev ## run the documented Slurm script on a Slurm of two machines (root; apt install slurm-wlm munge)
	@$(BIN)/python -m pytest tests/test_slurm.py --slurm -rs

test-fast: $(VENV)/.dev ## run what finds most mistakes, in minutes: of tests over several ranks one case each
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --fast

# Each setting stands for a kind of processor on one that has more: oneDNN's instructions, PyTorch's own, MKL's.
NUMERICS := tests/test_models_cpu_kernels.py tests/test_kernel_choice.py tests/test_models_loss.py tests/test_models_decoder.py \
	tests/test_models_documents.py tests/test_models_moe.py tests/test_attention_kernels.py tests/test_blockwise.py tests/test_low_precision.py \
	tests/test_poison.py tests/test_optim.py tests/test_optim_8bit.py tests/test_optim_bf16.py tests/test_precision.py tests/test_golden.py \
	tests/test_generate.py tests/test_solo.py
AVX2        := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
AVX512      := ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512
AVX512_BF16 := ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 ATEN_CPU_CAPABILITY=avx512
ALL         := ONEDNN_MAX_CPU_ISA=DEFAULT
test-isa: $(VENV)/.dev ## run the numerics' tests under each instruction set that this processor has (nightly); ISA=AVX2 for one
	@for isa in $(or $(ISA),AVX2 AVX512 AVX512_BF16 ALL); do \
		case $$isa in AVX2) set -- $(AVX2);; AVX512) set -- $(AVX512);; AVX512_BF16) set -- $(AVX512_BF16);; *) set -- $(ALL);; esac; \
		echo "$$isa: $$*"; env "$$@" $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(NUMERICS) || exit 1; done

attack: $(VENV)/.dev ## damage every kind of file, kill and starve runs, attack servers; fails where anything is silent, hangs or shows a trace
	@PYTHONPATH=src:tests $(BIN)/python -P -m attack $(ATTACK)

mutants: $(VENV)/.dev ## try verify on planted faults and random layouts (an hour; goes on where it was stopped), and write docs/mutants.md
	@cd tests && OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH=. ../$(BIN)/python -m mutants.run $(MUTANTS)
	@$(BIN)/python docs/make_mutants_md.py

check: $(VENV)/.dev ## formatting, lint, types, the floors' import rules, and pages that scripts write
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python docs/check_pages.py

# What runs the planner in a browser tab is fetched, not kept in the repository.
PYODIDE := .pyodide
SITE    := build/planner
$(PYODIDE)/.filled: src/meshwright/planner/site.py $(VENV)/.core
	@echo "fetching Pyodide into $(PYODIDE) ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh -ec "$$($(BIN)/python -c 'from pathlib import Path; from meshwright.planner.site import fetching; print(" && ".join(fetching(Path("$(PYODIDE)"))))')"
	@touch $@

site: $(PYODIDE)/.filled ## write the planner that runs in a browser tab: build/planner (npm fetches Pyodide)
	@$(BIN)/meshwright plan --site $(SITE) --pyodide $(PYODIDE)

test-site: site $(VENV)/.dev ## run the tests of the planner in a browser tab, in node and Chromium, and compare 500 queries with the command line
	@$(BIN)/python -m pytest --pyodide $(PYODIDE) tests/test_planner_site.py
	@$(BIN)/python benchmarks/planner_tab.py $(SITE) --queries $(or $(QUERIES),500)

man: $(VENV)/.core ## write the man pages in man/ and the recipe's schema, from the parsers and the settings
	@$(BIN)/python docs/make_man.py
	@$(BIN)/python docs/make_schema.py

# The YAML language server that editors use, for tests/test_schema_in_editors.py
.yamlls/.filled:
	@npm install --silent --prefix .yamlls yaml-language-server@1.19.2
	@touch $@

test-editors: .yamlls/.filled $(VENV)/.dev ## test completion and errors in an editor (npm fetches the YAML language server)
	@$(BIN)/python -m pytest tests/test_schema_in_editors.py -rs

screenshots: $(VENV)/.dev ## draw the pictures of all pages in docs/pictures, in Chromium; PAGES="chat audit" for some of them
	@$(BIN)/python docs/make_screenshots.py $(PAGES)

$(VENV)/.docs: $(VENV)/.core
	@echo "installing what the site needs ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation's site into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:           ## remove the environment and caches (runs/ stays)
	rm -rf .venv .venv-torch-* .pytest_cache .ruff_cache build dist site src/*.egg-info
