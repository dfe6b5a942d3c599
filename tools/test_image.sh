#!/usr/bin/env bash
# Builds the image of `Dockerfile` or `Dockerfile.gpu` and runs it on the CPU: the quick demo, `infer`, and `serve`, on a
# read-only root, as the image's user, without privileges. Needs root, buildah and debootstrap, and no Docker daemon.
#
#   make test-image        the image of Dockerfile: three minutes
#   make test-image-gpu    the image of Dockerfile.gpu: ten minutes, a download of 2 GB, 12 GB of disk
#
# The base is a Debian with Python instead of Docker Hub's `python`, kept in build/image for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
MIRROR=${MIRROR:-http://deb.debian.org/debian} PORT=${PORT:-8765}
WORK=$PWD/build/image BASE=localhost/opal-base IMAGE=localhost/opal-deploy-test
mkdir -p "$WORK"
export STORAGE_DRIVER=vfs
buildah() { command buildah --root "$WORK/storage" --runroot "$WORK/run" "$@"; }

if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
  echo "Making the base: Debian trixie with Python"
  [ -d "$WORK/debian/usr" ] || debootstrap --variant=minbase \
    --include=ca-certificates,python3,python3-venv,python-is-python3 trixie "$WORK/debian" "$MIRROR" >"$WORK/debootstrap.log"
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$WORK/debian" / >/dev/null
  buildah commit --quiet "$container" "$BASE" >/dev/null
  buildah rm "$container" >/dev/null
fi

build() {
  echo "Building $1"
  # packages come over this machine's network, which may have a certificate of its own
  buildah bud --quiet --isolation chroot --network host --file "$1" "${@:2}" \
    --volume /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro . >"$WORK/build.log" 2>&1
}
if [ "${1:-}" = gpu ]; then
  build Dockerfile.gpu --build-arg CUDA_IMAGE="$BASE" --build-arg PYTHON=3.13 --tag "$IMAGE"
else
  build Dockerfile --build-arg PYTHON_IMAGE="$BASE" --tag "$IMAGE"
fi || { tail -20 "$WORK/build.log"; exit 1; }

container=$(buildah from "$IMAGE")
# shellcheck disable=SC2155
readonly ROOT=$(buildah mount "$container") INSIDE=$WORK/root
clean() {
  if [ -n "${server:-}" ]; then kill -9 "$server" 2>/dev/null || true; fi
  umount --recursive "$INSIDE" 2>/dev/null || true
  buildah rm "$container" >/dev/null
  buildah rmi "$IMAGE" >/dev/null
}
trap clean EXIT
mkdir -p "$INSIDE" "$ROOT/models"
touch "$ROOT/models/model.onnx"
mount --bind "$ROOT" "$INSIDE"
mount -o remount,bind,ro "$INSIDE"
mount -t proc proc "$INSIDE/proc"
mount -t tmpfs tmpfs "$INSIDE/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$INSIDE/data"
mount -t tmpfs tmpfs "$INSIDE/dev"
for device in null zero random urandom; do
  touch "$INSIDE/dev/$device" && mount --bind "/dev/$device" "$INSIDE/dev/$device"
done
mkdir -m 1777 "$INSIDE/dev/shm"
ln -s /proc/self/fd "$INSIDE/dev/fd"
# as compose.yaml has it: no capabilities, no new privileges; chroot comes first, which takes one
inside() {
  chroot "$INSIDE" /usr/bin/env -i -C /data PATH=/opt/opal/bin:/usr/bin:/bin HOME=/home/opal PYTHONUNBUFFERED=1 \
    setpriv --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
}
step() { echo; echo "== $*"; }

step "a read-only root, an unprivileged user"
inside sh -c '! touch /opt/x 2>/dev/null && [ "$(id -u)" = 10001 ] && ! python -c "import torch" 2>/dev/null'
step "doctor"
inside opal-deploy doctor | tee "$WORK/doctor.log"
if [ "${1:-}" = gpu ]; then
  # all of each is installed, and only the driver is missing
  for runtime in onnxruntime-gpu tensorrt-lean tensorrt-rtx; do
    grep --quiet --extended-regexp "^  $runtime +[0-9].*no NVIDIA driver" "$WORK/doctor.log"
  done
fi
step "demo --quick"
inside opal-deploy demo --quick | tail -3
step "infer"
inside opal-deploy infer opal-demo-quick/data/test --model opal-demo-quick/creatures.onnx --explain --out answers
inside test -s answers/report.html
step "serve as in compose.yaml: a mounted model, a token, ready, an answer over HTTP, SIGTERM"
mount --bind "$INSIDE/data/opal-demo-quick/creatures.onnx" "$INSIDE/models/model.onnx"
mount -o remount,bind,ro "$INSIDE/models/model.onnx"
inside env OPAL_DEPLOY_TOKEN=secret opal-deploy serve model=/models/model.onnx --host=0.0.0.0 --log-format=json \
  --port "$PORT" &
server=$!
for _ in $(seq 60); do
  if curl --silent --fail "http://127.0.0.1:$PORT/v2/health/ready" >/dev/null; then break; fi
  sleep 1
done
image=$(find "$INSIDE/data/opal-demo-quick/data/test" -name '*.png' | sort | head -1)
if curl --silent --fail --output /dev/null --data-binary "@$image" "http://127.0.0.1:$PORT/explain"; then
  echo "an answer without the token" && exit 1
fi
curl --silent --fail --header "Authorization: Bearer secret" --data-binary "@$image" "http://127.0.0.1:$PORT/explain" |
  grep --quiet '"status":"ok"'
pkill -TERM --full "opal-deploy serve model=.*--port $PORT"
wait "$server"
server=
echo "The image answers, and stopped with 0"
