# subquad for the CPU:  docker build --tag subquad .
#                       docker run --rm --volume "$PWD:/work" subquad train digits
# The registry's torch for Linux comes with CUDA; a smaller image takes the CPU build from the index that has it:
#                       docker build --build-arg PIP_EXTRA_INDEX_URL=... --tag subquad .
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=demo,text,vision
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/subquad && /opt/subquad/bin/pip install ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/subquad /opt/subquad
ENV PATH=/opt/subquad/bin:$PATH PYTHONUNBUFFERED=1
# Compiled kernels are kept in the user's home; its number is that of the first user of most systems, so that what is
# written into a mounted folder belongs to them.
RUN useradd --create-home --uid 1000 subquad && mkdir /work && chown subquad /work
USER 1000
WORKDIR /work
ENTRYPOINT ["subquad"]
CMD ["--help"]
