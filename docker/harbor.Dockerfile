# harbor-server: Harbor trials for trainers on other machines. Python 3.12, as Harbor wants.
#
#   docker build -f docker/harbor.Dockerfile -t agentic-harbor .
#   docker run -p 8090:8090 -v harbor:/data --read-only --tmpfs /tmp \
#     -e HARBOR_SERVER_TOKEN=… -e HARBOR_SERVER_ENVIRONMENT=modal agentic-harbor
#
# Trials run where Harbor's environment says: in a container, Harbor's remote ones (modal, daytona,
# e2b, gke, …) need nothing more than their keys; its `docker` and this package's local environment
# need a Docker socket or CAP_SYS_ADMIN, which this image does not ask for.
FROM docker.io/library/python:3.12.12-slim-bookworm AS build
COPY docker/harbor.lock /build/
RUN python -m venv --without-pip /opt/agentic \
    && pip --python /opt/agentic/bin/python install --no-cache-dir --no-compile --require-hashes \
        --no-deps -r /build/harbor.lock
COPY harbor_sdk /opt/agentic/lib/python3.12/site-packages/harbor_sdk
RUN python -m compileall -q -j 0 /opt/agentic

FROM docker.io/library/python:3.12.12-slim-bookworm
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
