# syntax=docker/dockerfile:1
# CPU by default:  docker build -t ddprun .
# CUDA:            docker build -t ddprun:cuda --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 \
#                    --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# BASE is a Debian or Ubuntu image; what it lacks of Python 3.11 or later is installed from its own packages.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# Where pip finds torch; the CPU builds are a tenth of the CUDA ones. Empty: pip's own settings decide.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/sh", "-euc"]
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null && python3 -m venv --help >/dev/null 2>&1 || { \
      apt-get update; \
      apt-get install -y --no-install-recommends python3 python3-venv; \
      rm -rf /var/lib/apt/lists/*; \
    }
RUN python3 -m venv /opt/ddprun
ENV PATH=/opt/ddprun/bin:$PATH
WORKDIR /src
# The dependencies change seldom: a layer of their own, and torch before them all.
COPY constraints.txt ./
# A secret named pip.conf, if one is given, is pip's configuration for this build and stays out of the image.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY runner runner
COPY hooks hooks
COPY pipelines pipelines
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --constraint constraints.txt .

FROM ${BASE}
SHELL ["/bin/sh", "-euc"]
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null || { \
      apt-get update; \
      apt-get install -y --no-install-recommends python3; \
      rm -rf /var/lib/apt/lists/*; \
    }
COPY --from=build /opt/ddprun /opt/ddprun
# `docker run IMAGE pipelines/quickstart.yaml` finds the pipelines here; runs go to /work/runs.
COPY --chown=1000:1000 pipelines /work/pipelines
RUN chown 1000:1000 /work
ENV PATH=/opt/ddprun/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["ddprun"]
CMD ["--help"]
