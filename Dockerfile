# syntax=docker/dockerfile:1
# One image for router, workers, supervisor and Ray: k8s/ starts all of them from it.
#
#   docker build --target cpu -t registry.example.com/disagg:0.1.0 .
#   docker build --target cuda -t registry.example.com/disagg:0.1.0-cuda .
#
# It runs as user 1000, from a root file system that may be read-only. KubeRay's probes ask the agents
# of Ray's dashboard, a RayService needs Ray Serve (both extra kuberay); older probes ask by `wget`.
# tests/image runs these steps;
# k8s/README.md says what starts from them.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
       ca-certificates ibverbs-providers libibverbs1 librdmacm1 python3 wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 disagg \
    && useradd --uid 1000 --gid 1000 --create-home disagg
ENV PATH=/opt/disagg/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1

FROM base AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/disagg
WORKDIR /source

# Torch first: its layer stays when the code changes.
FROM build AS build-cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY disagg disagg
COPY router router
COPY workers workers
RUN pip install --no-cache-dir '.[tracing,object,kuberay]'

FROM build AS build-cuda
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY disagg disagg
COPY router router
COPY workers workers
RUN pip install --no-cache-dir '.[tracing,object,kuberay,vllm]'

# Triton compiles its launchers on the machine where they run. NVIDIA's container runtime brings the
# driver; CUDA's libraries come with torch.
FROM base AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/disagg /opt/disagg
WORKDIR /home/disagg
USER 1000:1000

# The last one is what a build without --target makes.
FROM base AS cpu
COPY --from=build-cpu /opt/disagg /opt/disagg
WORKDIR /home/disagg
USER 1000:1000
