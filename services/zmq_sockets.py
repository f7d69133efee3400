"""ZMQ sockets of the cluster: bounded queues, no lingering, CURVE when there is a cluster key."""

import zmq
import zmq.asyncio

from services.security import ClusterKey

_QUEUED_MESSAGES = 100_000


def _prepare(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, key: ClusterKey | None, *, server: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
    # A dead peer is dropped, so that its queue does not grow for ever.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    # But a machine that is busy for seconds is not dead, and what is on its way when a connection ends is lost.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    secure(socket, key, server=server)


def secure(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, key: ClusterKey | None, *, server: bool) -> None:
    """Encrypts and authenticates a socket with the cluster key. `server`: the side that binds."""
    if key:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.curve.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.curve.secret)
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.curve.public)


def pull_socket(host: str, key: ClusterKey | None) -> tuple[zmq.asyncio.Socket, str]:
    """Receives from many pushers (asyncio). Bound to a free port of `host`; with its address `tcp://host:port`."""
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
    _prepare(socket, key, server=True)
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, f"tcp://{host}:{port}"


def push_socket(address: str, key: ClusterKey | None) -> zmq.Socket[bytes]:
    """Sends to one puller; to be used with zmq.DONTWAIT. Reconnects by itself."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    _prepare(socket, key, server=False)
    socket.connect(address)
    return socket


def pub_socket(host: str, key: ClusterKey | None) -> tuple[zmq.Socket[bytes], str]:
    """Publishes without ever blocking. Bound to a free port of `host`; with its address."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    _prepare(socket, key, server=True)
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, f"tcp://{host}:{port}"


def sub_socket(address: str, topic: bytes, key: ClusterKey | None) -> zmq.asyncio.Socket:
    """Receives what the publisher at `address` sends under `topic` (asyncio). Reconnects by itself."""
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    _prepare(socket, key, server=False)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(address)
    return socket
