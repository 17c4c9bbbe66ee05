# The command line on a slim image, with the lab: docker run --rm layerswap quickstart
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/layerswap
# Without a GPU: the CPU build of PyTorch is a tenth of the size of the default one.
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY src src
RUN pip install -c constraints.txt ".[lab]"
RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["layerswap"]
CMD ["--help"]
