# Image for machines with NVIDIA GPUs: agentrl with Ray, and an engine in a virtual environment of its own.
#
#     docker build --tag agentrl .
#     docker build --tag agentrl --build-arg ENGINE=sglang==0.5.23 .
#     docker run --gpus all --shm-size 16g --volume "$PWD/runs:/work/runs" agentrl agentrl doctor
#
# torch and the engines bring their CUDA libraries; the machine needs a driver and NVIDIA's container toolkit. Compilers
# are for Triton's kernels, bubblewrap is for local sandboxes, and KubeRay's probes use wget.
FROM python:3.12-slim-bookworm

ARG TORCH=torch==2.13.0
ARG RAY=ray[default]==2.60.0
ARG ENGINE=vllm==0.32.0

RUN apt-get update && \
    apt-get install --yes --no-install-recommends build-essential bubblewrap git procps wget && \
    rm -rf /var/lib/apt/lists/*

ENV AGENTRL_ENGINES=/opt/engines PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN folder="$AGENTRL_ENGINES/${ENGINE%%=*}-gpu" && python -m venv "$folder" && \
    "$folder/bin/pip" install "$ENGINE" && touch "$folder/.installed"

RUN pip install "$TORCH" "$RAY"

WORKDIR /opt/agentrl
COPY pyproject.toml README.md LICENSE ./
COPY agentrl agentrl
COPY agent_loops agent_loops
COPY configs configs
COPY envs envs
COPY tools tools
RUN pip install ".[docker,gpu,lora,math,mcp,ray,trackers]"

WORKDIR /work
CMD ["agentrl", "doctor"]
