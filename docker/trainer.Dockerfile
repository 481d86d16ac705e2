# The trainer with its engine (vLLM) and proxy, for one machine.
#
#   docker build -f docker/trainer.Dockerfile -t agentic-trainer .                        (CPU)
#   docker build -f docker/trainer.Dockerfile --build-arg DEVICE=cuda -t agentic-trainer:cuda .
#   docker run --gpus all --shm-size 16g -v /runs:/runs -v $PWD:/work:ro agentic-trainer:cuda \
#     --config agentic_trainer.yaml trainer.run_dir=/runs/first
#
# The run writes only to /runs and /tmp; with a read-only root file system, add --tmpfs /tmp:exec
# (Triton loads what it has compiled from there, and Docker's default is noexec). The CUDA libraries
# come with torch's wheels, and the driver comes from the host. The image contains a C compiler because
# Triton and torch.compile call it at run time.
ARG DEBIAN=docker.io/library/debian:12.12-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c
FROM ${DEBIAN} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY docker/trainer-${DEVICE}.lock /build/trainer.lock
# The package index has torch for CUDA; only the build for CPUs comes from torch's own index.
RUN python3 -m venv --without-pip /opt/agentic \
    && if [ "${DEVICE}" = cpu ]; then set -- --extra-index-url "${TORCH_INDEX}"; fi \
    && pip --python /opt/agentic/bin/python install --no-cache-dir --no-compile --require-hashes \
        --no-deps "$@" -r /build/trainer.lock
COPY pyproject.toml setup.py README.md LICENSE /build/
COPY proxy /build/proxy
COPY agent_loop /build/agent_loop
COPY harbor_sdk /build/harbor_sdk
COPY trainer /build/trainer
COPY examples /build/examples
# Compiled with digests of the sources, not their times, so that each build writes the same files. What
# this Python cannot compile (torch has a file for 3.12), it cannot import either.
RUN pip --python /opt/agentic/bin/python install --no-cache-dir --no-compile --no-deps \
        --no-build-isolation /build \
    && { python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/agentic/lib || true; }

FROM ${DEBIAN}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev libgomp1 libnuma1 \
        python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --shell /usr/sbin/nologin agentic \
    && install -d -o agentic -g agentic /runs
COPY --from=build /opt/agentic /opt/agentic
ENV PATH=/opt/agentic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /work
VOLUME /runs
# No health check: a run is a job that ends with an exit status.
HEALTHCHECK NONE
ENTRYPOINT ["agentic-train"]
