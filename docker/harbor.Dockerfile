# harbor-server: Harbor trials for trainers on other machines. Harbor needs Python 3.12.
#
#   docker build -f docker/harbor.Dockerfile -t agentic-harbor .
#   docker run -p 8090:8090 -v harbor:/data --read-only --tmpfs /tmp \
#     -e HARBOR_SERVER_TOKEN=… -e HARBOR_SERVER_ENVIRONMENT=modal agentic-harbor
#
# HARBOR_SERVER_ENVIRONMENT says where trials run. Harbor's remote environments (modal, daytona, e2b,
# gke, …) need only their keys. Harbor's `docker` needs a Docker socket, and this package's local
# environment needs CAP_SYS_ADMIN; the command above gives the container neither of them.
ARG PYTHON=docker.io/library/python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
FROM ${PYTHON} AS build
COPY docker/harbor.lock /build/
RUN python -m venv --without-pip /opt/agentic \
    && pip --python /opt/agentic/bin/python install --no-cache-dir --no-compile --require-hashes \
        --no-deps -r /build/harbor.lock
COPY pyproject.toml /build/
# The package metadata that `--version` reads.
RUN version=$(sed -n 's/^version = "\(.*\)"/\1/p' /build/pyproject.toml) \
    && info=/opt/agentic/lib/python3.12/site-packages/agentic_rl-$version.dist-info \
    && mkdir "$info" \
    && printf 'Metadata-Version: 2.4\nName: agentic-rl\nVersion: %s\n' "$version" > "$info/METADATA"
COPY harbor_sdk /opt/agentic/lib/python3.12/site-packages/harbor_sdk
# Compiled with digests of the sources, not their times, so that each build writes the same files.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/agentic/lib

FROM ${PYTHON}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin agentic \
    && install -d -o agentic -g agentic /data
COPY --from=build /opt/agentic /opt/agentic
ENV PATH=/opt/agentic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HARBOR_SERVER_HOST=0.0.0.0 \
    HARBOR_SERVER_PORT=8090 \
    HARBOR_SERVER_STATE_DIR=/data
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8090
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD \
    ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8090/health')"]
ENTRYPOINT ["python3", "-m", "harbor_sdk.server"]
