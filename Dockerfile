# CPU by default:  docker build -t ddprun .
# CUDA:            docker build -t ddprun:cuda --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 \
#                    --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# BASE is any Debian or Ubuntu image whose Python, its own or the one it can install, is 3.11 or later.
ARG BASE=python:3.11-slim

FROM ${BASE} AS python
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null || { \
      apt-get update \
      && apt-get install -y --no-install-recommends python3 \
      && rm -rf /var/lib/apt/lists/*; \
    }

FROM python AS dependencies
# Debian's Python comes without what makes virtual environments.
# hadolint ignore=DL3008
RUN python3 -c 'import ensurepip' 2>/dev/null || { \
      apt-get update \
      && apt-get install -y --no-install-recommends python3-venv \
      && rm -rf /var/lib/apt/lists/*; \
    }
RUN python3 -c 'import sys; assert sys.version_info >= (3, 11), sys.version' \
    && python3 -m venv /opt/ddprun
# Where pip finds torch: its CPU builds are a tenth of the CUDA ones. Empty leaves it to pip's own settings.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/ddprun/bin:$PATH
WORKDIR /src
# Dependencies change seldom, torch least of all: each has a layer of its own, before the source.
# Torch's wheel carries 120 MB of torch's own C++ tests.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch \
    && rm -rf /opt/ddprun/lib/python3*/site-packages/torch/test /opt/ddprun/lib/python3*/site-packages/torch/bin/test_*
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      >dependencies.txt \
    && pip install --constraint constraints.txt --requirement dependencies.txt

FROM dependencies AS build
COPY README.md LICENSE NOTICE ./
COPY runner runner
COPY hooks hooks
COPY pipelines pipelines
# Into a tree of its own, from / on: a layer that an edit of the source changes, without the dependencies.
RUN pip install --no-deps --root /package .

FROM python
# What torch.compile needs to build kernels: --build-arg PACKAGES="gcc g++ python3-dev". They are 250 MB.
ARG PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN [ -z "${PACKAGES}" ] || { \
      apt-get update \
      && apt-get install -y --no-install-recommends ${PACKAGES} \
      && rm -rf /var/lib/apt/lists/*; \
    }
# `docker run IMAGE pipelines/quickstart.yaml` finds the pipelines here; what a run leaves goes to /workspace/runs,
# which any user may write, so that `--user` needs no more.
RUN mkdir -p /workspace/runs && chown 1000:1000 /workspace/runs && chmod 1777 /workspace/runs
# A login shell sets PATH anew.
RUN echo "PATH=/opt/ddprun/bin:\$PATH" >/etc/profile.d/ddprun.sh
COPY --from=dependencies /opt/ddprun /opt/ddprun
COPY --from=build /package /
COPY pipelines /workspace/pipelines
COPY scripts/container-entrypoint /usr/local/bin/container-entrypoint
ENV PATH=/opt/ddprun/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# A number, for which no image needs an account.
USER 1000:1000
WORKDIR /workspace
# No STOPSIGNAL: Kubernetes, too, would send it. SIGTERM lets a host leave an elastic run, SIGINT stops the run.
ENTRYPOINT ["container-entrypoint"]
CMD ["--help"]
LABEL org.opencontainers.image.title=ddprun \
      org.opencontainers.image.description="A declarative pipeline runner for PyTorch DistributedDataParallel" \
      org.opencontainers.image.licenses=MIT
