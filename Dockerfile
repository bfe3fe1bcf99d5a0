# toolroll's commands, without an engine: SGLang runs in a container or on a machine of its own.
#   docker build --target run -t toolroll .             toolroll run, export, view ...
#   docker build --target serve -t toolroll-serve .     toolroll serve, with a health check
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS run
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[export,uvloop]" \
    && useradd --uid 1000 --create-home toolroll
USER 1000
WORKDIR /home/toolroll
ENTRYPOINT ["toolroll"]

FROM run AS serve
EXPOSE 8400
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8400/health', timeout=3)"]
