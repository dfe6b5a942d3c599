# Each target creates and reuses the project's own virtual environment, .venv.
# PYTHON: the interpreter that it is made from (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# tests run in as many processes as there are cores, one thread each; a file's tests share its expensive fixtures, and
# the slowest files come first
test test-all: export OMP_NUM_THREADS := 1
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder

# tritonserver of the wheel nvidia-pytriton, which a few tests start. It was built against numpy 1 and has no wheels but
# for Linux on x86_64, so that it lives in an environment of its own; everything else comes from .venv
TRITON_VENV := .venv-triton
TRITON_INSTALLED := $(TRITON_VENV)/.installed

# ONNX Runtime's CUDA provider, which runs over stub libraries in tests/gpu_stubs, the bindings of TensorRT and its lean
# runtime; everything else, the CPU's ONNX Runtime excepted, comes from .venv
GPU_STUBS_VENV := .venv-gpu-stubs
GPU_STUBS_INSTALLED := $(GPU_STUBS_VENV)/.installed

# runtimes in which nothing here runs a model, but users do; everything else comes from .venv, and `oldest` in front of it is
# an ONNX Runtime of 2023
RUNTIMES_VENV := .venv-runtimes
RUNTIMES_INSTALLED := $(RUNTIMES_VENV)/.installed

# CaBRNet, whose PIP-Net and ProtoPNet the exported files are compared with; everything else comes from .venv
CABRNET_VENV := .venv-cabrnet
CABRNET_INSTALLED := $(CABRNET_VENV)/.installed

# libraries whose classifiers are exported and explained as they are; everything else comes from .venv
CLASSIFIERS_VENV := .venv-classifiers
CLASSIFIERS_INSTALLED := $(CLASSIFIERS_VENV)/.installed

RELEASE_INSTALLED := build/release/.installed

# ONNX Runtime Web, which `export --web` copies and tests run in Chromium, axe, which looks for what keeps people with
# disabilities from using a page, and pyright, which checks types as many editors do
ORT_WEB := .ort-web
ORT_WEB_INSTALLED := $(ORT_WEB)/.installed

.PHONY: help demo quick-model triton-venv gpu-stubs-venv ort-web test test-runtimes test-cabrnet test-classifiers test-all test-image test-image-gpu tutorial dist check docs format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train, export and explain a small model on generated images (three minutes of one core)"
	@echo "make quick-model  train the model of \`demo --quick\` again"
	@echo "make test      the tests (about 7 minutes on 2 cores)"
	@echo "make triton-venv  tritonserver for the tests that start one (Linux on x86_64; 60 MB)"
	@echo "make gpu-stubs-venv  onnxruntime-gpu for the tests over stub CUDA libraries (Linux on x86_64; 450 MB)"
	@echo "make ort-web   ONNX Runtime Web, axe and pyright by npm, for tests (200 MB)"
	@echo "make test-cabrnet   exported PIP-Net and ProtoPNet files, compared with CaBRNet itself (5 minutes)"
	@echo "make test-classifiers  classifiers of torchvision, timm, Ultralytics, Keras and Hugging Face (2 GB; 20 minutes)"
	@echo "make test-runtimes  exported files in ten runtimes, compared with the table in the documentation (8 minutes)"
	@echo "make test-all  the slow tests too"
	@echo "make check     ruff, mypy, import-linter, the length of the documentation, and the size of the code"
	@echo "make test-image  the image of Dockerfile, built and run (root, buildah and debootstrap; 3 minutes)"
	@echo "make test-image-gpu  the same with the image of Dockerfile.gpu, on the CPU (downloads 2 GB; 10 minutes)"
	@echo "make dist      the files of a release, checked, and tried in an environment of their own"
	@echo "make tutorial  run the demo, and write what it prints into docs/tutorial.md"
	@echo "make docs      the documentation as a site, links checked: build/site/index.html"

# compiled on all cores afterwards, which pip would do on one: where Python may not write bytecode (Docker images often
# say so), every process would compile PyTorch anew, for 10 s; not what is large and hardly imported. Packages ship
# templates that do not compile: no error
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch is large; a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[all-cpu,dev,docs]'
	@$(BIN)/python -m compileall -qq --workers 0 -x '[\\/](tests?|testing[\\/]_internal|pip|rllib)[\\/]' opal_deploy \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
	@touch $@

$(TRITON_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m venv --clear --without-pip $(TRITON_VENV)
	@$(BIN)/python -c 'import platform as p, sys; sys.exit((p.system(), p.machine()) != ("Linux", "x86_64") or \
	  sys.version_info > (3, 13))' || { echo "no tritonserver for this machine; tests that need it are skipped"; exit 0; }; \
	$(BIN)/python -m pip --python $(TRITON_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  'numpy<2' nvidia-pytriton==0.7.0
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(TRITON_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@touch $@

triton-venv: $(TRITON_INSTALLED)

# its own packages come first on the import path, so that `onnxruntime` is the GPU's
$(GPU_STUBS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m venv --clear --without-pip $(GPU_STUBS_VENV)
	@$(BIN)/python -c 'import platform as p, sys; sys.exit((p.system(), p.machine()) != ("Linux", "x86_64"))' || \
	  { echo "no onnxruntime-gpu for this machine; tests that need it are skipped"; exit 0; }; \
	$(BIN)/python -m pip --python $(GPU_STUBS_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  'onnxruntime-gpu>=1.27,<1.32' 'cuda-bindings>=13,<14' 'cuda-pathfinder>=1.3,<2' 'tensorrt-cu13-bindings>=11,<12' \
	  'tensorrt-lean-cu13>=11,<12' 'tensorrt-lean-cu13-bindings>=11,<12' 'tensorrt-lean-cu13-libs>=11,<12'
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(GPU_STUBS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@touch $@

gpu-stubs-venv: $(GPU_STUBS_INSTALLED)

$(RUNTIMES_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m venv --clear --without-pip $(RUNTIMES_VENV)
	@echo "Installing other runtimes into $(RUNTIMES_VENV) (1 GB)"
	@$(BIN)/python -m pip --python $(RUNTIMES_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  MNN iree-base-compiler iree-base-runtime opencv-python-headless tract onnx2torch \
	  apache-tvm apache-tvm-ffi cloudpickle decorator psutil
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --target $(RUNTIMES_VENV)/oldest \
	  'onnxruntime==1.15.0' 'numpy<2'
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(RUNTIMES_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@touch $@

# ARGUMENTS=--write writes the table in docs/reference/runtimes.md
test-runtimes: $(RUNTIMES_INSTALLED) $(ORT_WEB_INSTALLED)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/runtimes/compare.py $(ARGUMENTS)

$(CABRNET_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m venv --clear --without-pip $(CABRNET_VENV)
	@$(BIN)/python -m pip --python $(CABRNET_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  'cabrnet==1.2' loguru thop captum graphviz tqdm gradio onnx_graphsurgeon opencv-python-headless py-cpuinfo optuna \
	  pacmap zenodo-get
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(CABRNET_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@touch $@

test-cabrnet: $(CABRNET_INSTALLED)
	PYTHONPATH=. OMP_NUM_THREADS=2 $(CABRNET_VENV)/bin/python tests/cabrnet/compare.py

# optimum needs an older transformers, and both an older huggingface_hub
$(CLASSIFIERS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m venv --clear --without-pip $(CLASSIFIERS_VENV)
	@echo "Installing Ultralytics, TensorFlow and Hugging Face's libraries into $(CLASSIFIERS_VENV) (2 GB)"
	@$(BIN)/python -m pip --python $(CLASSIFIERS_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps \
	  ultralytics ultralytics-thop onnxslim opencv-python-headless polars polars-runtime-32 \
	  tensorflow-cpu keras tf2onnx absl-py astunparse gast google-pasta grpcio h5py libclang namex optree opt_einsum \
	  termcolor wrapt optimum-onnx==0.1.0 'optimum~=2.1.0' 'transformers<4.58' 'tokenizers<0.23' 'huggingface-hub<1' regex
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(CLASSIFIERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@touch $@

# ARGUMENTS: names of networks instead of all
test-classifiers: $(CLASSIFIERS_INSTALLED)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(CLASSIFIERS_VENV)/bin/python tools/classifier_table.py --check $(ARGUMENTS)

$(ORT_WEB_INSTALLED): opal_deploy/web/site.py Makefile | $(INSTALLED)
	@npm install --silent --no-audit --no-fund --no-save --prefix $(ORT_WEB) \
	  "$$($(BIN)/python -c 'from opal_deploy.web.site import ORT_WEB; print(ORT_WEB)')" axe-core@4.11.0 \
	  pyright@1.1.414
	@touch $@

ort-web: $(ORT_WEB_INSTALLED)

demo: $(INSTALLED)
	$(BIN)/opal-deploy demo --out runs/demo

# the model that `opal-deploy demo --quick` runs
quick-model: $(INSTALLED)
	$(BIN)/opal-deploy demo --out runs/quick-model
	cp runs/quick-model/run/best.onnx opal_deploy/cli/demo/creatures.onnx
	$(BIN)/opal-deploy evaluate runs/quick-model/data --model opal_deploy/cli/demo/creatures.onnx --faithfulness --record

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" --ignore tests/gpu_stubs

test-all: $(INSTALLED) $(TRITON_INSTALLED) $(ORT_WEB_INSTALLED) $(GPU_STUBS_INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --ignore tests/gpu_stubs
	$(GPU_STUBS_VENV)/bin/python -m pytest tests/gpu_stubs
	@$(MAKE) --no-print-directory test-runtimes test-cabrnet test-classifiers
	@if command -v buildah debootstrap >/dev/null; then $(MAKE) --no-print-directory test-image test-image-gpu; \
	else echo "Left out: test-image and test-image-gpu, which need buildah and debootstrap"; fi

# the environment of `dist`, whose packages CI gets while it waits for those of .venv
$(RELEASE_INSTALLED): pyproject.toml
	@rm -rf build/release && mkdir -p build/release
	@$(PYTHON) -m venv build/release/venv
	@$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["dependencies"], *project["optional-dependencies"]["cpu"], sep="\n")' > build/release/requirements.txt
	@build/release/venv/bin/pip install --quiet --disable-pip-version-check --requirement build/release/requirements.txt
	@touch $@

# the files of a release, checked, and installed into an environment of their own, where the quick demo must succeed
dist: $(INSTALLED) $(RELEASE_INSTALLED)
	@rm -rf dist build/release/opal-demo-quick
	@$(BIN)/python -m build --outdir dist . >build/release/build.log || { cat build/release/build.log; exit 1; }
	$(BIN)/twine check --strict dist/*
	@build/release/venv/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
	@build/release/venv/bin/pip check
	cd build/release && venv/bin/opal-deploy demo --quick

# as root, with buildah and debootstrap; no Docker daemon
test-image:
	tools/test_image.sh

test-image-gpu:
	tools/test_image.sh gpu

tutorial: $(INSTALLED)
	$(BIN)/python tools/tutorial.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/size.py

docs: $(INSTALLED)
	@echo "Getting ONNX Runtime Web, for the page that runs a model"
	@$(MAKE) --no-print-directory ort-web || echo "no ONNX Runtime Web: the documentation lacks the page that runs a model"
	@echo "Building the documentation (a minute or more): build/site/index.html"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
