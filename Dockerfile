# CPU by default:  docker build -t ddprun .
# CUDA:            docker build -t ddprun:cuda --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 \
#                    --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# BASE is any Debian or Ubuntu image; Python 3.11 or later is installed from its own packages if it has none.
ARG BASE=python:3.11-slim

FROM ${BASE} AS python
SHELL ["/bin/sh", "-euc"]
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null || { \
      apt-get update; \
      apt-get install -y --no-install-recommends python3 python3-venv; \
      rm -rf /var/lib/apt/lists/*; \
    }

FROM python AS build
# Where pip finds torch: its CPU builds are a tenth of the CUDA ones. Empty leaves it to pip's own settings.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/ddprun
ENV PATH=/opt/ddprun/bin:$PATH
WORKDIR /src
# Dependencies change seldom, torch least of all: each has a layer of its own, before the source.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > dependencies.txt; \
    pip install --constraint constraints.txt --requirement dependencies.txt
COPY README.md LICENSE NOTICE ./
COPY runner runner
COPY hooks hooks
COPY pipelines pipelines
RUN pip install --no-deps .

FROM python
COPY --from=build /opt/ddprun /opt/ddprun
# `docker run IMAGE pipelines/quickstart.yaml` finds the pipelines here; what a run leaves goes to /work/runs.
COPY pipelines /work/pipelines
RUN mkdir /work/runs; chown 1000:1000 /work/runs
ENV PATH=/opt/ddprun/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["ddprun"]
CMD ["--help"]
