"""The cluster key: one secret that all processes of a cluster share and that proves a peer on every internal socket.

gRPC calls carry an HMAC of (method, nonce). A nonce is accepted once, so a recorded call cannot be played again while
it is remembered. ZMQ sockets use CURVE (encrypted and authenticated) with a key pair derived from the secret: whoever
lacks the secret knows neither half. TCP streams of KV prove another derived secret; their payloads are not encrypted
(`kv_transfer/connectors/tcp_wire.py`). Without a key, sockets bind loopback only (`services.config` refuses the rest).
With certificates gRPC is mutual TLS beneath the key (`services/tls.py`).
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from typing import NamedTuple, Protocol

import zmq
from zmq.utils import z85

from services.config import ConfigError
from services.tls import Certificates, TlsSettings, certificates_of

_REMEMBERED_NONCES = 1 << 17
METADATA_KEY = "tandem-auth"


class CurveKeys(NamedTuple):
    """Z85 text of the cluster's CURVE pair; servers and clients use the same."""

    public: bytes
    secret: bytes


class KeySettings(TlsSettings, Protocol):
    """What a process, or a command, was told of the cluster's secrets."""

    @property
    def cluster_key(self) -> str: ...  # noqa: D102


class ClusterKey:
    """Signs and checks with the cluster's secret."""

    def __init__(self, secret: str, certificates: Certificates | None = None) -> None:
        if len(secret) < 16:
            raise ValueError("the cluster key is shorter than 16 characters; use e.g. `openssl rand -hex 32`")
        self._secret = hashlib.sha256(b"tandem-cluster-key\0" + secret.encode()).digest()
        self._seen: OrderedDict[str, None] = OrderedDict()
        curve_secret = z85.encode(hmac.digest(self._secret, b"curve", "sha256"))
        self.curve = CurveKeys(zmq.curve_public(curve_secret), curve_secret)
        self.kv_streams = hmac.digest(self._secret, b"kv-tcp", "sha256")
        self.certificates = certificates  # with them gRPC is mutual TLS, too

    def _mac(self, method: str, nonce: str) -> str:
        return hmac.new(self._secret, f"{method}\0{nonce}".encode(), hashlib.sha256).hexdigest()

    def sign(self, method: str) -> str:
        """Proof for one call of `method`."""
        nonce = secrets.token_hex(16)
        return f"{nonce}.{self._mac(method, nonce)}"

    def check(self, method: str, proof: str) -> bool:
        """Whether `proof` was made with this key for `method` and was not used before."""
        nonce, _, mac = proof.partition(".")
        if not hmac.compare_digest(self._mac(method, nonce).encode(), mac.encode()) or nonce in self._seen:
            return False
        self._seen[nonce] = None
        if len(self._seen) > _REMEMBERED_NONCES:
            self._seen.popitem(last=False)
        return True


def key_of(settings: KeySettings) -> ClusterKey | None:
    """The key that is configured; None where none is (loopback only). Raises ConfigError, of which TlsError is one."""
    certificates = certificates_of(settings)
    if settings.cluster_key:
        return ClusterKey(settings.cluster_key, certificates)
    if certificates is not None:
        raise ConfigError("tls_certificate: certificates come beside a cluster key, so set TANDEM_CLUSTER_KEY, too")
    return None
