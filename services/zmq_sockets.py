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
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if key:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.curve.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.curve.secret)
        if server:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.curve.public)


def bind_socket(kind: int, host: str, key: ClusterKey | None) -> tuple[zmq.asyncio.Socket, str]:
    """A socket of `kind` (zmq.PULL, zmq.PUB) on a free port of `host`, and its address `tcp://host:port`."""
    socket = zmq.asyncio.Context.instance().socket(kind)
    _prepare(socket, key, server=True)
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, f"tcp://{host}:{port}"


def connect_socket(kind: int, address: str, key: ClusterKey | None) -> zmq.asyncio.Socket:
    """A socket of `kind` (zmq.PUSH, zmq.SUB) connected to `address`; it reconnects by itself."""
    socket = zmq.asyncio.Context.instance().socket(kind)
    _prepare(socket, key, server=False)
    socket.connect(address)
    return socket
