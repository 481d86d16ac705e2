# The recording proxy, and the relay worker (`python -m proxy.relay`): no torch, no GPU.
#
#   docker build -f docker/proxy.Dockerfile -t agentic-proxy .
#   docker run -p 8000:8000 -v proxy:/data -v /models/qwen3:/model:ro --read-only --tmpfs /tmp \
#     -e AGENTIC_PROXY_ADMIN_KEY=… -e AGENTIC_PROXY_ENGINES='[{"url": "http://gpu-0:8001"}]' agentic-proxy
#
# The proxy keeps sessions in /data and writes nowhere else. Stop it with SIGTERM: calls in flight then
# have `limits.shutdown_s` to end.
ARG DEBIAN=docker.io/library/debian:12.12-slim@sha256:d5d3f9c23164ea16f31852f95bd5959aad1c5e854332fe00f7b3a20fcc9f635c
FROM ${DEBIAN} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils ca-certificates python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY docker/proxy.lock /build/
# Of the services of Amazon, only storage and its credentials are used: 25 MB less.
RUN python3 -m venv --without-pip /opt/agentic \
    && pip --python /opt/agentic/bin/python install --no-cache-dir --no-compile --require-hashes \
        --no-deps -r /build/proxy.lock \
    && find /opt/agentic -type d -name tests -prune -exec rm -rf {} + \
    && find /opt/agentic/lib/python3.11/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
        ! -name s3 ! -name sts ! -name 'sso*' ! -name signin -exec rm -rf {} + \
    && find /opt/agentic -name '*.so' ! -path '*.libs/*' ! -path '*/numpy/*' -exec strip --strip-unneeded {} +
COPY pyproject.toml /build/
# The package metadata that `--version` reads.
RUN version=$(sed -n 's/^version = "\(.*\)"/\1/p' /build/pyproject.toml) \
    && info=/opt/agentic/lib/python3.11/site-packages/agentic_rl-$version.dist-info \
    && mkdir "$info" \
    && printf 'Metadata-Version: 2.4\nName: agentic-rl\nVersion: %s\n' "$version" > "$info/METADATA"
COPY proxy /opt/agentic/lib/python3.11/site-packages/proxy
COPY docker/compile_imported.py /build/
RUN /opt/agentic/bin/python3 /build/compile_imported.py proxy

FROM ${DEBIAN}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin agentic \
    && install -d -o agentic -g agentic /data
COPY --from=build /opt/agentic /opt/agentic
ENV PATH=/opt/agentic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    AGENTIC_PROXY_HOST=0.0.0.0 \
    AGENTIC_PROXY_PORT=8000 \
    AGENTIC_PROXY_MODEL=/model \
    AGENTIC_PROXY_STORE=sqlite:////data/proxy.db
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD \
    ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python3", "-m", "proxy"]
CMD ["serve"]
