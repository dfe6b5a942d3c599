# syntax=docker/dockerfile:1
# opal-deploy for servers without a GPU, x86-64 or ARM: ONNX Runtime and the HTTP server; no PyTorch.
#
#   docker build --tag opal-deploy:cpu .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/data" opal-deploy:cpu infer images/ --model best.onnx
#   docker run --publish 127.0.0.1:8000:8000 --volume "$PWD:/models:ro" opal-deploy:cpu serve /models/best.onnx --host 0.0.0.0
#
# compose.yaml runs the last one with fewer privileges. Dockerfile.gpu is for machines with an NVIDIA GPU.
#
# A tag can be moved; a digest cannot. To pin the base image, look up its digest and pass it:
#   docker buildx imagetools inspect python:3.12-slim-trixie --format '{{.Manifest.Digest}}'
#   docker build --build-arg PYTHON_IMAGE=python:3.12-slim-trixie@sha256:... .
ARG PYTHON_IMAGE=python:3.12-slim-trixie

# --- build: a virtual environment with the locked packages and our wheel -------------------------------------------
FROM ${PYTHON_IMAGE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/opal
ENV PATH=/opt/opal/bin:$PATH
WORKDIR /src

# Nothing is resolved or compiled: every file is a named wheel with its hash
COPY requirements/ requirements/
RUN pip install --no-deps --require-hashes --only-binary=:all: --requirement requirements/build.txt \
 && pip install --no-deps --require-hashes --only-binary=:all: --requirement requirements/cpu.txt

COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
 && pip install --no-deps --no-index /tmp/wheel/*.whl \
 && pip check \
 && pip uninstall --yes setuptools pip

# --- final: Python, the environment, an unprivileged user ----------------------------------------------------------
FROM ${PYTHON_IMAGE} AS final

RUN groupadd --gid 10001 opal \
 && useradd --uid 10001 --gid opal --create-home --shell /usr/sbin/nologin opal

COPY --from=build /opt/opal /opt/opal

ENV PATH=/opt/opal/bin:$PATH \
    PYTHONUNBUFFERED=1

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="opal-deploy" \
      org.opencontainers.image.description="Explained image classification with OPAL models on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

USER 10001:10001
WORKDIR /data
# the port of `serve`
EXPOSE 8000

ENTRYPOINT ["opal-deploy"]
CMD ["--help"]
