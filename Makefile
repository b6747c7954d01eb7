# make demo    install, warm up, train by GRPO, evaluate, export; results in runs/demo
# make game    warm up and train on a game of several turns: runs/game; make tools: a calculator
# make agent   warm up and train an agent that calls the policy itself: runs/agent
# make see     warm up and train a small model that sees: it counts what is drawn; runs/see
# make test    install, run the whole suite
# make lint    ruff (lint and format) and mypy over spmdrl/ and train.py, in seconds
# make gpu     what only GPUs can show, as one table: minutes; says so where there is none
# make grid    every mesh, method and family, of which `make test` takes a sample: nightly
# make models  the whole check of every family: nightly, hours
# make outside  twenty steps of GRPO in environments of other packages: nightly, minutes
# make kill    fifty runs that lose a rank at any moment: nightly, an hour; KILL_SEED=1 for others
# make docs    a site of docs/, README and results in site/, without the network but to install
# make venv    install only, into .venv; every file by its hash (requirements/)
# make lock    write the hashes of the pinned packages again, after a version was changed
# make clean   remove .venv and caches; runs/ stays
#
# Variables: PYTHON=python3.12 (3.11 or newer), SEED=1 (demo, see; results in runs/demo_seed1).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED   ?= 0
BIN    := .venv/bin
OTHER  := $(if $(filter-out 0,$(SEED)),_seed$(SEED))
RUN    := runs/demo$(OTHER)
SEEN   := runs/see$(OTHER)

# One thread per rank: more ranks than cores on small machines, and torchrun would set it anyway.
export OMP_NUM_THREADS ?= 1
# Else every rank that starts compiles the package anew: 2 s of 8.
unexport PYTHONDONTWRITEBYTECODE
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node 2

.PHONY: venv lock lint test docs grid models outside kill gpu demo game tools agent see clean

venv: .venv/installed

# Each file of a lock in requirements/ is fetched by its hash; what is built is built by the pinned
# setuptools, so that pip fetches nothing else. pyproject.toml goes in with --no-deps too: the lock
# already holds everything.
INSTALL := $(BIN)/pip install --quiet --no-deps
LOCKED  := $(INSTALL) --require-hashes --no-build-isolation

.venv/installed: requirements/build.txt requirements/torch_cpu.txt requirements/cpu.txt \
  requirements/torch_cuda.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
	  sys.exit("$(PYTHON) is Python " + v + "; the pinned packages need 3.11: PYTHON=python3.11")'
	@echo 'installing into .venv: about 3 GB, about 2 minutes'
	$(PYTHON) -m venv .venv
	$(LOCKED) -r requirements/build.txt
	@# By itself, since pip prefers what an index names with its hash to such a local file.
	@$(LOCKED) -r requirements/torch_cpu.txt 2>/dev/null || \
	  echo 'no build of torch for the CPU is found: taking the one of the index'
	$(LOCKED) -r requirements/cpu.txt
	@# The index offers torch only as its CUDA build, which cannot start without its CUDA libraries.
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo 'torch does not import: fetching the CUDA libraries of this build (several GB)'; \
	  $(LOCKED) -r requirements/torch_cuda.txt; }
	$(INSTALL) --no-build-isolation -e .
	$(BIN)/python -c 'import torch, transformers, vllm'
	touch $@

lock: venv
	$(BIN)/python requirements/lock.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

test: venv .venv/torchao .venv/liger .venv/triton .venv/torchvision .venv/trackers
	$(BIN)/python -m pytest -n 3 --dist loadfile --max-worker-restart 0

# What pages link to and is not there is an error. The notice is about MkDocs' next version.
docs: venv .venv/docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv/docs $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'site/index.html; with its search: python -m http.server -d site'

grid: venv .venv/torchao .venv/torchvision
	$(BIN)/python -m pytest -n 2 -m grid

models: venv
	$(BIN)/python -m pytest -n 2 -m models

outside: venv .venv/outside .venv/openenv
	$(BIN)/python -m pytest -m outside -s

kill: venv
	$(BIN)/python -m pytest -m kill

# On a GPU machine vLLM's CUDA build is installed as docs/gpu.md says, seldom by `make venv`.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(PARTS),--parts $(PARTS))

# For the tests of model.memory.optimizer_dtype int8. Beside the environment, not in it, since
# transformers imports torchao wherever it is found, with warnings, in each rank of each run.
.venv/torchao: .venv/installed requirements/torchao.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/torchao.txt
	touch $@

# For the tests of liger's kernels on meta tensors: beside the environment, since it needs triton,
# which the tests replace by a stub.
.venv/liger: .venv/installed requirements/liger.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/liger.txt
	touch $@

# For the tests of our own Triton kernels, in its interpreter: beside the environment, since torch
# and vLLM take other ways where they find it.
.venv/triton: .venv/installed requirements/triton.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/triton.txt
	touch $@

# For the tests of report.trackers: beside the environment, since other libraries take other ways
# where they find these.
.venv/trackers: .venv/installed requirements/trackers.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/trackers.txt
	touch $@

# For `make outside`: verifiers and gymnasium, beside the environment, since it does not need them.
.venv/outside: .venv/installed requirements/outside.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/outside.txt
	touch $@

# For `make outside`: a server of OpenEnv. It is on the path of that server's process only.
.venv/openenv: .venv/installed requirements/openenv.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/openenv.txt
	touch $@

# For `make docs`: mkdocs-material, beside the environment, since only the site needs it.
.venv/docs: .venv/installed requirements/docs.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/docs.txt
	touch $@

# For benchmarks/duel.py. Its other packages are in the environment.
.venv/trl: .venv/installed requirements/trl.txt
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/trl.txt
	touch $@

# For vLLM's models that see, which import it: beside the environment, where only their tests and
# demos look. The file that follows says why its own does not do.
.venv/torchvision: .venv/installed requirements/torchvision.txt requirements/torchvision_ops.py
	rm -rf $@
	$(LOCKED) --target $@ -r requirements/torchvision.txt
	cat requirements/torchvision_ops.py >> $@/torchvision/extension.py
	touch $@

# Starts afresh: an earlier run of the same seed is removed.
demo: venv
	rm -rf $(RUN)
	@echo '== 1/6 a small random model and its tokenizer'
	$(BIN)/python -m spmdrl create_model $(RUN)/init --initializer-std 0.088 --seed $(SEED)
	@echo '== 2/6 supervised warm start: both ranks train'
	$(TORCHRUN) train.py --config configs/demo_sft.yaml --seed $(SEED) \
	  --model.path $(RUN)/init --output-dir $(RUN)/sft
	$(BIN)/python -m spmdrl export $(RUN)/sft --out $(RUN)/warm
	@echo '== 3/6 GRPO: rank 0 trains, rank 1 generates'
	$(TORCHRUN) train.py --config configs/demo_grpo.yaml --seed $(SEED) \
	  --model.path $(RUN)/warm --output-dir $(RUN)/grpo
	@echo '== 4/6 export a Hugging Face folder'
	$(BIN)/python -m spmdrl export $(RUN)/grpo --out $(RUN)/model
	@echo '== 5/6 ask the exported model, by plain transformers'
	$(BIN)/python -m spmdrl ask $(RUN)/model --task task:addition -n 5 --task-option digits=2
	@echo '== 6/6 draw the reward'
	$(BIN)/python -m spmdrl curves $(RUN)/grpo --out $(RUN)/reward.png
	@echo
	@echo 'Results:'
	@echo '  $(RUN)/reward.png           reward over the steps'
	@echo '  $(RUN)/model                the trained model, a Hugging Face folder'
	@echo '  $(RUN)/grpo/metrics.jsonl   every metric of every step'
	@echo '  $(BIN)/mlflow ui --backend-store-uri sqlite:///$(RUN)/grpo/mlflow.db'

# An environment or an agent: careless conversations, a warm start on them, GRPO on its reward.
game: LAYERS := 2
tools agent: LAYERS := 4
game tools agent: venv
	rm -rf runs/$@
	$(BIN)/python -m spmdrl create_model runs/$@/init --chat-template --layers $(LAYERS) \
	  --initializer-std 0.088
	$(BIN)/python benchmarks/demonstrations.py configs/demo_$@.yaml runs/$@/demonstrations.jsonl
	$(TORCHRUN) train.py --config configs/demo_$@_sft.yaml
	$(BIN)/python -m spmdrl export runs/$@/sft --out runs/$@/warm
	$(TORCHRUN) train.py --config configs/demo_$@.yaml

# vLLM's class of the model imports torchvision, which only it is shown.
see: venv .venv/torchvision
	rm -rf $(SEEN)
	@echo '== 1/5 a small random model that sees, its tokenizer and its processor of images'
	$(BIN)/python -m spmdrl create_model $(SEEN)/init --architecture qwen2_5_vl --layers 2 \
	  --intermediate 512 --initializer-std 0.088 --tower.width 96 --tower.fan-in --seed $(SEED)
	@echo '== 2/5 supervised warm start on images: both ranks train'
	$(TORCHRUN) train.py --config configs/demo_see_sft.yaml --seed $(SEED) \
	  --model.path $(SEEN)/init --output-dir $(SEEN)/sft
	$(BIN)/python -m spmdrl export $(SEEN)/sft --out $(SEEN)/warm
	@echo '== 3/5 GRPO: rank 0 trains, rank 1 looks and answers'
	PYTHONPATH=$(CURDIR)/.venv/torchvision$(if $(PYTHONPATH),:$(PYTHONPATH)) $(TORCHRUN) train.py --config configs/demo_see.yaml --seed $(SEED) \
	  --model.path $(SEEN)/warm --output-dir $(SEEN)/grpo
	@echo '== 4/5 export a Hugging Face folder'
	$(BIN)/python -m spmdrl export $(SEEN)/grpo --out $(SEEN)/model
	@echo '== 5/5 ask the exported model about held-out scenes, by plain transformers'
	$(BIN)/python -m spmdrl ask $(SEEN)/model --task task:shapes -n 5 --task-option kind=count \
	  --task-option most=9 --task-option cells=3 --task-option colours=6 --task-option dark=true \
	  --task-option least=9

clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
