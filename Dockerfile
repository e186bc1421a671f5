# The service without root and without build tools; docker-compose.yml shows it among its servers.
FROM python:3.11-slim AS build
WORKDIR /build
RUN python -m venv /venv
COPY requirements.txt .
RUN /venv/bin/pip install --no-cache-dir --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY workers workers
COPY migrations migrations
RUN /venv/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim
RUN useradd --system --create-home --home-dir /home/quotagate quotagate
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH QUOTAGATE_HOME=/home/quotagate/state
USER quotagate
WORKDIR /home/quotagate
EXPOSE 8080
HEALTHCHECK --interval=5s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health/live')"]
CMD ["quotagate", "serve"]
