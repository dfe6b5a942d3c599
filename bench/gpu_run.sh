#!/usr/bin/env bash
# One run on a machine with an NVIDIA GPU, in order of importance; stops itself after 9 minutes.
#
#   bench/gpu_run.sh WHEELS OUT
#
# WHEELS: a folder with the wheels that this machine's Python lacks: onnxruntime-gpu; tensorrt_rtx_cu13 with its bindings and libs,
#         cuda_bindings and cuda_pathfinder; ml_dtypes; pytest and pytest_timeout; safetensors, tomli_w, scikit_learn
#         (joblib, threadpoolctl), scipy; matplotlib of the trainer (contourpy, cycler, fonttools, kiwisolver, pyparsing,
#         python_dateutil, six); psutil, nvidia_ml_py, ptflops; simplejpeg, cykooz_resizer; pyarrow, hypothesis
#         (sortedcontainers); orjson. Each whole, or as `split` parts
#         *.whl.part-aa, -ab, ...; "-" if nothing has to be installed.
# OUT:    a folder for small result files: log, junit.xml, *.json, *.jsonl (benchmarks; see bench/results/README.md).
#
# BENCH=only leaves the demo out and goes to the benchmarks after the tests; BENCH=skip leaves the benchmarks out.
#
# CUB100 and RESNET50, where they are set to the folder of the hundred bird classes and a file of ResNet-50's ImageNet
# weights: the paper's protocol on them, OPAL against the linear head, three seeds, in the time that is left.
#
# Everything runs from the repository's root without installing the project.
set -u -o pipefail
cd "$(dirname "$0")/.."
wheels=${1:?a folder of wheels, or -}
out=${2:?a folder for results}
mkdir -p "$out"
deadline=$((SECONDS + 540))
site=$(mktemp -d)
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1
opal=(python3 -c 'from opal_deploy.cli import main; main()')

left() { echo $((deadline - SECONDS)); }
step() { # name, least seconds worth starting with, command...
  local name=$1 least=$2
  shift 2
  if [ "$(left)" -lt "$least" ]; then
    echo "SKIPPED $name: $(left) s left" | tee -a "$out/log"
    return 0
  fi
  echo "== $name" | tee -a "$out/log"
  timeout "$(left)" "$@" >"$out/$name.out" 2>&1
  echo "   exit $?, $(left) s left" | tee -a "$out/log"
}

if [ "$wheels" != - ]; then
  for first in "$wheels"/*.part-aa; do
    [ -e "$first" ] && cat "${first%-aa}"-* >"$site/$(basename "${first%.part-aa}")"
  done
  step install 10 python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" \
    $(ls "$wheels"/*.whl "$site"/*.whl 2>/dev/null)
fi

step doctor 5 "${opal[@]}" doctor --json
step gpu_tests 60 python3 -m pytest -m gpu -p no:cacheprovider --junitxml "$out/junit.xml" tests

work=$(mktemp -d)
bench_all() {
  local results=$out/bench.jsonl ceiling=$out/ceiling.jsonl three="--backbone resnet50 --backbone efficientnet_v2_s --backbone convnext_tiny"
  local nine="$three --backbone resnet101 --backbone resnet152 --backbone efficientnet_v2_m --backbone efficientnet_v2_l"
  nine="$nine --backbone convnext_small --backbone convnext_base"
  local short="--seconds 1 --repeats 3 --warmup 0.5 --device cuda"
  step ceiling 20 "${opal[@]}" bench roofline --measure-ceiling --device cuda --backbone resnet50 --out "$ceiling"
  # the paper's claim first, then the throughput that a server is sized by
  step head 60 "${opal[@]}" bench compare --question head $three --device cuda --batch 64 --runtime compile \
    --channels-last --precision fp16 --out "$results"
  step runtimes 60 "${opal[@]}" bench compare --question runtime --backbone resnet50 --backbone convnext_tiny --device cuda \
    --batch 64 --precision fp16 --channels-last --out "$results"
  step throughput_fp16 90 "${opal[@]}" bench throughput $nine --runtime eager --runtime compile --runtime onnxruntime --precision fp16 \
    --channels-last --batch 64,256 $short --ceiling "$ceiling" --out "$results"
  step latency 30 "${opal[@]}" bench latency $three --runtime eager --runtime compile --runtime onnxruntime --precision fp16 --batch 1 $short \
    --out "$results"
  step throughput_bf16 60 "${opal[@]}" bench throughput $nine --runtime eager --runtime compile --precision bf16 --channels-last \
    --batch 64,256 $short --ceiling "$ceiling" --out "$results"
  step server 30 "${opal[@]}" bench latency --scenario server --limit-ms 15 --backbone resnet50 --runtime onnxruntime \
    --precision fp16 --device cuda --out "$results"
}
[ "${BENCH:-}" = only ] && bench_all

# the demo generates its images and its model on this machine
[ "${BENCH:-}" = only ] || step demo 200 "${opal[@]}" demo --out "$work/demo"
model=$work/demo/run/best.onnx
if [ -f "$model" ]; then
  cp "$work/demo/demo.json" "$out/demo.json"
  step export_fp16 30 "${opal[@]}" export "$model" --precision fp16 --json
  step verify_cuda 20 "${opal[@]}" verify "$model" --device cuda --json
  step verify_cuda_fp16 20 "${opal[@]}" verify "${model%.onnx}.fp16.onnx" --device cuda --json
  # TensorRT where it is, else TensorRT for RTX asked for whatever GPU this is: on an sm90 that is an experiment
  step export_engine 40 "${opal[@]}" export "$model" --trt --target current --json
  for engine in "$work"/demo/run/*.engine; do
    [ -f "$engine" ] || continue
    step verify_engine 20 "${opal[@]}" verify "$engine" --json
    step inspect_engine 5 "${opal[@]}" inspect "$engine" --json
    step pipeline_engine 60 "${opal[@]}" bench pipeline "$work/demo/data/train" --model "$engine" --batch 64 --limit 900 --json
    cp "$engine".checks.json "$out/" 2>/dev/null
  done
  step pipeline_cuda 60 "${opal[@]}" bench pipeline "$work/demo/data/train" --model "$model" --device cuda \
    --batch 64 --limit 900 --json
  # generated images at the size of photographs, as JPEG, in the whole pipeline
  step jpegs 15 python3 -c "
import pathlib, sys
from PIL import Image
from opal_deploy.synthetic import example_images
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
for number, pixels in enumerate(example_images(256, 375, 500)):
    Image.fromarray(pixels).save(folder / f'{number:04}.jpg', quality=90)
" "$work/jpegs"
  step pipeline_jpegs 40 "${opal[@]}" bench pipeline "$work/jpegs" --model "${model%.onnx}.fp16.onnx" --device cuda \
    --batch 64 --repeats 3 --json
fi

if [ -d "${CUB100:-}" ] && [ -f "${RESNET50:-}" ]; then
  # seed by seed: what is finished when the time is over is a table already
  step reproduce 60 "${opal[@]}" reproduce methods --data "cub100=$CUB100" --backbone resnet50 --weights "$RESNET50" \
    --workers 8 --out "$work/reproduce"
  step reproduce_table 10 "${opal[@]}" reproduce methods --data "cub100=$CUB100" --backbone resnet50 \
    --weights "$RESNET50" --out "$work/reproduce" --show --format json
  cp "$out/reproduce_table.out" "$out/reproduce.json" 2>/dev/null
  for metrics in "$work"/reproduce/cub100/*/metrics.csv; do
    [ -f "$metrics" ] && cp "$metrics" "$out/$(basename "$(dirname "$metrics")").csv"
  done
fi
[ "${BENCH:-}" = only ] || [ "${BENCH:-}" = skip ] || bench_all
echo "done, $(left) s left" | tee -a "$out/log"
