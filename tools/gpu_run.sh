#!/usr/bin/env bash
# Everything that is measured on a machine with one NVIDIA GPU, in order of importance; ends after nine minutes whatever happens.
#
#   LIMIT=7200 tools/gpu_run.sh                  # a machine of your own, with opal-deploy's packages installed: all steps
#   tools/gpu_run.sh WHEELS OUT                  # a machine that is lent: nine minutes, the most important steps first
#   STEPS="nine rest" tools/gpu_run.sh - OUT     # these groups only, in this order: one run per nine minutes lent
#   DRY=1 LIMIT=1200 tools/gpu_run.sh - OUT      # the same commands on the CPU, tiny, in 20 minutes: finds typing errors
#   PRINT=1 tools/gpu_run.sh - OUT               # the commands, without running them
#
# WHEELS: a folder with the wheels that this machine's Python lacks, each whole, or as `split` parts *.whl.part-aa, -ab, ...;
#         "-" (the default) if nothing has to be installed. The step `requirements` lists in OUT/log what pyproject.toml asks
#         for and is missing. Besides PyTorch, torchvision, onnx, onnxscript, SciPy, scikit-learn, lightning-fabric, pyarrow, psutil,
#         nvidia-ml-py, cuda-bindings, cuda-pathfinder, pytest, pytest-timeout and hypothesis these are: orjson,
#         cykooz_resizer, tomli_w, ptflops; onnxruntime-gpu (without it all steps in ONNX Runtime fail, each in seconds); and
#         for engines tensorrt_cu13 or tensorrt_rtx_cu13, each with its bindings and libs (the latter not for an H100).
# OUT:    a folder (default gpu-results) for small files: log (every step with its time, its output and what to look at),
#         bench.jsonl (measurements, see tools/results/README.md), gpu.csv
#         (the GPU's use five times a second; its times are those of the log), doctor.json, demo.json, reproduce.json.
# STEPS:  tests pipeline head nine rest demo, and reproduce where CUB100 (the folder of the hundred bird
#         classes) and RESNET50 (a file of its ImageNet weights) are set: the paper's protocol, OPAL against the linear head.
#
# Lines that begin with LOOK say what to read after a group, what it should be near, and which claim of README.md or of the
# documentation it settles. Their figures are calculated for an H100 SXM and 16 cores unless they say measured. A figure above
# a bound, or below half of what is expected, is a fault to look for before anything is published.
#
# On an H100 with 16 cores everything up to the pipeline has run (tools/results/h100, without engines); the caps of what
# follows are estimates. With DRY=1 on two CPU cores everything but reproduce, which had no data, comes to its end in five
# minutes, with eager PyTorch for torch.compile. Tried nowhere: whatever needs an engine, CUDA graphs in a benchmark, freezing
# on a GPU.
#
# Everything runs from the repository's root without installing the project.
set -u -o pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit
wheels=${1:--}
out=${2:-gpu-results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
deadline=$((SECONDS + ${LIMIT:-530}))
site=$(mktemp -d)
work=$(mktemp -d)
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1
opal=(python3 -c 'from opal_deploy.cli import main; main()')
log=$out/log results=$out/bench.jsonl

# 20,480 images: 320 batches of 64, so that the start of the decode processes is small beside them
device=cuda batch=64 distinct=1024 copies=20 repeats=2 precision=fp16 runtime=compile slower=1
two=(resnet50 convnext_tiny)
nine=(resnet50 resnet101 resnet152 efficientnet_v2_s efficientnet_v2_m efficientnet_v2_l convnext_tiny convnext_small convnext_base)
quick=(--seconds 0.5 --repeats 3 --warmup 0.3)
pairs=(--repeats 20 --seconds 0.2 --warmup 0.3)
graphs=(--cuda-graphs)
if [ -n "${DRY:-}" ]; then
  device=cpu batch=4 distinct=8 copies=3 repeats=1 precision=fp32 runtime=eager slower=4
  two=(shufflenet_v2_x0_5) nine=(shufflenet_v2_x0_5)
  quick=(--seconds 0 --iterations 1 --repeats 1 --warmup 0)
  pairs=(--repeats 2 --seconds 0 --warmup 0)
  graphs=()
fi

left() { echo $((deadline - SECONDS)); }
step() { # name, most seconds, command...: a step that is not worth starting any more is skipped
  local name=$1 seconds=$(($2 * slower)) code
  shift 2
  if [ -n "${PRINT:-}" ]; then
    printf '%q ' "$name" "$@"
    echo
    return 0
  fi
  if [ "$(left)" -lt $((seconds / 3 + 3)) ]; then
    echo "$(date +%T) SKIPPED $name: $(left) s left" | tee -a "$log"
    return 1
  fi
  [ "$seconds" -le "$(left)" ] || seconds=$(left)
  echo "$(date +%T) == $name, at most $seconds s" | tee -a "$log"
  timeout -k 5 "$seconds" "$@" >"$work/output" 2>&1
  code=$?
  tail -c 20000 "$work/output" >>"$log"
  echo "$(date +%T)    exit $code, $(left) s left" | tee -a "$log"
  return "$code"
}
keep() { # output of a step, name in OUT
  [ -n "${PRINT:-}" ] || cp "$1" "$out/$2"
}
engines() { # folder: the engines in it
  local path
  [ -z "${PRINT:-}" ] || echo "$1/printed.engine"
  for path in "$1"/*.engine; do
    [ ! -f "$path" ] || echo "$path"
  done
}
look() { # lines: what to look at, what it should be near, what it settles
  [ -n "${PRINT:-}" ] || printf 'LOOK %s\n' "$@" | tee -a "$log"
}

if [ "$wheels" != - ]; then
  for first in "$wheels"/*.part-aa; do
    [ -e "$first" ] && cat "${first%-aa}"-* >"$site/$(basename "${first%.part-aa}")"
  done
  shopt -s nullglob
  step install 60 python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl "$site"/*.whl
  shopt -u nullglob
fi
if [ -z "${PRINT:-}" ] && command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=timestamp,utilization.gpu,utilization.memory,memory.used,clocks.sm,power.draw \
    --format=csv,nounits -lms 200 >"$out/gpu.csv" 2>>"$log" &
  sampler=$!
fi
trap '[ -z "${sampler:-}" ] || kill "$sampler"; rm -rf "$work" "$site"' EXIT

step requirements 10 python3 - <<'PY'
import re, tomllib
from importlib.metadata import PackageNotFoundError, version

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras["gpu"] + extras["train"] + extras["export"] + extras["bench"] + extras["tables"]
for requirement in [*wanted, "pytest", "pytest-timeout", "hypothesis"]:
    name = re.match(r"[\w-]+", requirement).group()
    try:
        version(name)
    except PackageNotFoundError:
        print("missing:", requirement)
PY
step doctor 20 "${opal[@]}" doctor --json && keep "$work/output" doctor.json
look "doctor.json: GPU and driver; onnxruntime-gpu usable, torch listed. Otherwise nothing below is about a GPU."
# without these nothing below runs, and a lent machine's time is short
step imports 60 python3 -c "import onnxruntime, opal_deploy.bench.networks, opal_deploy.train.loop" || exit

tests() {
  local selected=gpu package
  # the modules alone, without their GPU tests
  [ -z "${DRY:-}" ] || selected="gpu and not gpu"
  # one step per package, so that a step which runs out of time keeps the failures of the others
  for package in $(grep -rlE 'mark\.gpu' tests --include='*.py' | cut -d/ -f1,2 | sort -u); do
    step "gpu_tests_${package#tests/}" 150 python3 -m pytest -v --tb=short -m "$selected" -p no:cacheprovider \
      --continue-on-collection-errors "$package"
  done
  look "gpu_tests_*: no failure, no error. On an H100 the sessions' tests passed. Training in bf16-mixed and 16-mixed is" \
    "  Lightning Fabric's and has not run here." \
    "  Skipped without TensorRT or a second GPU: engines, SyncBatchNorm and NCCL."
}

# files with random weights, whose speed is that of trained ones, and images of photographs' size
make_models() {
  [ ! -f "$work/${two[0]}.onnx" ] || return
  step models 110 python3 - "$work" "$precision" "${two[@]}" <<'PY'
import sys
from dataclasses import replace
from pathlib import Path

import onnx

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import TOP_OUTPUTS
from opal_deploy.bench.networks import build_random_network, update_batch_norms, write_model
from opal_deploy.errors import OpalError
from opal_deploy.export.graph_edit import add_top_outputs
from opal_deploy.model.checkpoint import save
from opal_deploy.synthetic import example_images

folder, precision, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
for name in names:
    network = build_random_network(name)
    # with random weights alone all cells tie, and half precision overflows in deep networks
    update_batch_norms(network.checkpoint.network, example_images(16, 224, 224))
    save(folder / f"{name}.pt", network.checkpoint)
    (folder / name).mkdir()
    write_model(network, precision, folder / name).rename(folder / f"{name}.onnx")
    written = onnx_file.read_metadata(folder / f"{name}.onnx")
    # the same as `export --outputs topk` makes it: a graph that lists its five best classes
    top = add_top_outputs(onnx.load(folder / f"{name}.onnx"), written.class_map, 5)
    kept = [value for value in top.graph.output if value.name in TOP_OUTPUTS]
    del top.graph.output[:]
    top.graph.output.extend(kept)
    metadata = replace(written, outputs=TOP_OUTPUTS, top_k=5, file_sha256=onnx_file.BLANK_DIGEST)
    onnx_file.write_model(top, metadata, folder / f"{name}.topk.onnx")
    onnx_file.embed_digest(folder / f"{name}.topk.onnx")
    try:
        print(write_model(network, precision, folder / name, engine=True))
    except OpalError as error:
        print(f"{name}: no engine: {error}")
PY
}

make_images() {
  [ ! -f "$work/jpegs.txt" ] || return
  step jpegs 40 python3 - "$work/jpegs" "$distinct" "$copies" <<'PY'
import os, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.synthetic import example_images

folder, distinct, copies = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
creatures = example_images(min(distinct, 64), 375, 500)


def write(number: int) -> str:
    # the noise of a camera, without which a JPEG is quicker to decode than a photograph
    noise = np.random.default_rng(number).normal(0, 14, creatures[0].shape)
    pixels = np.clip(creatures[number % len(creatures)] + noise, 0, 255).astype(np.uint8)
    path = folder / f"{number:05}.jpg"
    Image.fromarray(pixels).save(path, quality=90)
    return str(path)


folder.mkdir()
with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    paths = list(pool.map(write, range(distinct), chunksize=8))
folder.with_suffix(".txt").write_text("\n".join(paths * copies) + "\n")
print(sum(os.path.getsize(path) for path in paths) / len(paths) / 1e3, "kB an image")
PY
}

# JPEG to record, beside the bare session: ONNX Runtime, an engine where one could be built, the best classes alone
pipeline() {
  make_models
  make_images
  local name path
  for name in "${two[@]}"; do
    measure_infer "onnxruntime_$name" "$work/$name.onnx" $((distinct * copies))
  done
  for name in "${two[@]}"; do
    for path in $(engines "$work/$name"); do
      measure_infer "engine_$name" "$path" $((distinct * copies))
    done
  done
  for name in "${two[@]}"; do
    measure_infer "topk_$name" "$work/$name.topk.onnx" $((distinct * copies))
  done
  look "infer_*: 'infer' is near the smaller of the bare session and the decoding: 2,900 images/s measured on 16 cores." \
    "  bare, ONNX Runtime, fp16: resnet50 8,630 and convnext_tiny 4,830 images/s measured; an engine at most 49,000." \
    "  Where decoding is slower, 'infer' is near it and the GPU idle in gpu.csv; otherwise 'infer' reaches 90 % of bare." \
    "  Settles 'Engines ... none has run' (README.md)."
}

measure_infer() { # name, model, images
  step "infer_$1" 50 "${opal[@]}" bench pipeline "@$work/jpegs.txt" --model "$2" --device "$device" --batch "$batch" --limit "$3" \
    --repeats "$repeats" --no-explain --out "$results"
}

head_ratio() {
  local name
  # ONNX Runtime compiles nothing: the answer comes early. Making the two files takes half a minute or more
  for name in "${two[@]}"; do
    step "head_onnxruntime_$name" 120 "${opal[@]}" bench compare --head linear --head opal --backbone "$name" --device "$device" \
      --batch "$batch" --runtime onnxruntime --precision "$precision" "${pairs[@]}" --out "$results"
  done
  for name in "${two[@]}"; do
    step "head_${runtime}_$name" 75 "${opal[@]}" bench compare --head linear --head opal --backbone "$name" --device "$device" --batch "$batch" \
      --runtime "$runtime" --precision "$precision" "${graphs[@]}" "${pairs[@]}" --out "$results"
  done
  look "head_*: ratio of OPAL's throughput to the linear head's; in_flight [3, 3] in ONNX Runtime. The paper counts 0.1005 GFLOPs" \
    "  for 200 classes beside resnet50's 4.13, 2.4 %: a ratio of 0.97 to 1. Softmax, maximum and cells read or write" \
    "  64 x 1000 x 49 float32, 12.5 MB or 4 us a pass: 1 % of a batch of 5 ms. Below 0.95: a slow kernel." \
    "  Settles what explaining costs on a GPU, which README.md leaves open."
}

nine_backbones() {
  local name kind seconds
  # PyTorch needs no export, which takes longest: all nine first, then in ONNX Runtime as far as the time goes
  for kind in eager onnxruntime; do
    [ "$kind" = eager ] && seconds=25 || seconds=45
    for name in "${nine[@]}"; do
      step "nine_${kind}_$name" "$seconds" "${opal[@]}" bench throughput --backbone "$name" --runtime "$kind" --precision "$precision" \
        --device "$device" --batch "$batch" "${quick[@]}" --out "$results"
    done
  done
  look "nine_*: fp16 resnet50 below 75,000 images/s on an H100 and 107,000 on an H200, where each layer reads and writes memory" \
    "  once; ONNX Runtime at most 13,000. Within a family slower in the order of the paper's GFLOPs: 4.13, 7.86 and 11.60" \
    "  of the ResNets. Gives tools/results its first speeds of a GPU."
}

rest() {
  local name
  for name in "${two[@]}"; do
    step "latency_$name" 40 "${opal[@]}" bench latency --backbone "$name" --runtime onnxruntime --runtime eager \
      --precision "$precision" --device "$device" --batch 1 "${quick[@]}" --out "$results"
    step "compile_$name" 75 "${opal[@]}" bench latency --backbone "$name" --runtime "$runtime" \
      --precision "$precision" --device "$device" "${graphs[@]}" --batch "1,$batch" "${quick[@]}" --out "$results"
  done
  make_models
  make_images
  # the checkpoint in PyTorch: float32, so fewer images
  for name in "${two[@]}"; do
    measure_infer "checkpoint_$name" "$work/$name.pt" $((distinct * copies / 4))
  done
  look "latency_*, compile_*: in_flight 1; p50 at batch 1 is some milliseconds, the launches of 100 to 200 kernels of 5 to 10 us, which" \
    "  CUDA graphs save. checkpoint_*: float32 in PyTorch, several times slower than fp16."
}

demo() {
  step demo 240 "${opal[@]}" demo --out "$work/demo" || return
  keep "$work/demo/demo.json" demo.json
  local model=$work/demo/run/best.onnx
  step verify_gpu 20 "${opal[@]}" verify "$model" --device "$device" --json
  step export_fp16 40 "${opal[@]}" export "$model" --precision fp16 --json
  step verify_gpu_fp16 20 "${opal[@]}" verify "${model%.onnx}.fp16.onnx" --device "$device" --json
  # TensorRT where it is, else TensorRT for RTX
  step export_engine 60 "${opal[@]}" export "$model" --trt --json
  for engine in $(engines "$work/demo/run"); do
    step verify_engine 20 "${opal[@]}" verify "$engine" --json
  done
  look "demo.json: validation accuracy near the tutorial's 99 %. In its log little waiting for data; otherwise raise --workers." \
    "verify_*: exit 0 for fp32 (cosine within 1e-6, all cells equal but ties), fp16 and the engine. Settles 'Engines are marked" \
    "  unverified until a machine has checked them' (limits.md) on this GPU, and that training runs on one."
}

reproduce() {
  [ -n "${PRINT:-}" ] || { [ -d "${CUB100:-}" ] && [ -f "${RESNET50:-}" ]; } || return
  # the paper's recipe with this file of weights; the rows name the backbone
  sed "s|^weights = .*|weights = \"${RESNET50:-RESNET50}\"|" opal_deploy/train/recipes/paper.toml > "$work/reproduce.toml"
  # the subset's tables as a labels.csv; its flag is 1 for a test image
  [ -n "${PRINT:-}" ] || {
    mkdir -p "$work/birds" && ln -sfn "$(realpath "$CUB100")/images" "$work/birds/images"
    paste -d , "$CUB100/images.txt" "$CUB100/train_test_split.txt" | tr -d '\r' | awk -F ' *, *' '
      BEGIN { print "image,label,split" }
      { split($2, part, "/"); print "images/" $2 "," part[1] "," ($4 == 1 ? "test" : "train") }' > "$work/birds/labels.csv"
  }
  local run=("${opal[@]}" reproduce backbones --row ResNet-50 --row "ResNet-50, OPAL" --data "csv=$work/birds"
    --recipe "$work/reproduce.toml" --out "$work/reproduce")
  # seed by seed: what is finished when the time is over is a table already
  step reproduce "$(($(left) - 15))" "${run[@]}"
  step reproduce_table 10 "${run[@]}" --show --format json && keep "$work/output" reproduce.json
  look "reproduce.json: OPAL's accuracy beside the linear head's over three seeds. Settles, for this network and these classes only," \
    "  'No table of the paper was reproduced with its protocol' (README.md, limits.md)."
}

for group in ${STEPS:-tests pipeline head nine rest demo reproduce}; do
  case $group in
    head) head_ratio ;;
    nine) nine_backbones ;;
    tests | pipeline | rest | demo | reproduce) "$group" ;;
    *) echo "STEPS: no group $group; expected tests, pipeline, head, nine, rest, demo, reproduce" | tee -a "$log" ;;
  esac
done
[ -n "${PRINT:-}" ] || echo "$(date +%T) done, $(left) s left" | tee -a "$log"
