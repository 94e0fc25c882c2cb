# tinker-local in a container.
#
#   docker build -t tinker-local:cpu .
#   docker build -t tinker-local:gpu --build-arg ENGINE=gpu .
#   docker run --init -p 127.0.0.1:8000:8000 -v tinker-data:/data -v "$PWD/models:/models:ro" -v "$PWD/keys:/keys:ro" \
#       tinker-local:cpu serve --model local/tiny-vl=/models/tiny-vl --host 0.0.0.0 --api-key-file /keys
#
# With a GPU: docker run --gpus all --shm-size 16g ... (the host needs a driver and the NVIDIA container toolkit). CUDA's
# libraries come with torch, so both images have the same base.

FROM python:3.11-slim-bookworm AS wheels
RUN pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /src
COPY LICENSE pyproject.toml uv.lock ./
COPY packages packages
RUN uv build --all-packages --wheel --out-dir /dist

FROM python:3.11-slim-bookworm
ARG ENGINE=cpu
# libnuma: vLLM on CPU. A C compiler: Triton and vLLM compile for the machine when they start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 gcc g++ \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=from=wheels,source=/dist,target=/dist \
    --mount=from=wheels,source=/src/packages/backend/src/tinker_local/backend/cli,target=/requirements \
    pip install --no-cache-dir --no-deps --find-links /dist -r "/requirements/requirements-${ENGINE}.txt"
RUN useradd --create-home --uid 1000 tinker && install -d -m 700 -o tinker /data /data/home
USER tinker
# In the volume, below HOME, are also kernels that were compiled (vLLM's, Triton's, FlashInfer's, CUDA's) and models from a
# hub: a new container finds them.
ENV HOME=/data/home \
    TORCHINDUCTOR_CACHE_DIR=/data/home/.cache/inductor \
    TINKER_LOCAL_SERVE_DATA_DIR=/data \
    TINKER_LOCAL_CHECK_DATA_DIR=/data \
    TINKER_LOCAL_EXPORT_DATA_DIR=/data \
    TINKER_LOCAL_BACKUP_DATA_DIR=/data \
    TINKER_LOCAL_RESTORE_DATA_DIR=/data \
    TINKER_LOCAL_TRAIN_DATA_DIR=/data
VOLUME /data
EXPOSE 8000
# SIGTERM saves; docker kills 10 s later, unless it is given --stop-timeout.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/api/v1/livez', timeout=4)"]
ENTRYPOINT ["tinker-local"]
CMD ["serve", "--help"]
