"""Mutual TLS for the cluster's gRPC: each member shows a certificate of the cluster's CA that has the cluster's name.

The files are checked when a process starts, so that one that would be refused by all its peers says why. They are read
again when they change: a server shows the new certificate from the next connection on, a client in the next channel.
New files that are wrong are not taken, and the log says why.
"""

from __future__ import annotations

import datetime
import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc
import structlog

from services.config import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = structlog.get_logger()

_LONGEST_FILE = 1 << 20  # bytes


class TlsSettings(Protocol):
    """The settings that name the files."""

    @property
    def tls_certificate(self) -> str: ...  # noqa: D102
    @property
    def tls_key(self) -> str: ...  # noqa: D102
    @property
    def tls_ca(self) -> str: ...  # noqa: D102
    @property
    def tls_name(self) -> str: ...  # noqa: D102


class TlsError(ConfigError):
    """Certificates that peers would refuse; the message names the file and what to do."""


class _Content(NamedTuple):
    """PEM, as gRPC takes it."""

    certificate: bytes
    key: bytes
    authority: bytes


class Certificates:
    """A member's certificate with its chain, its key, and the CA that signs for all members. Raises TlsError."""

    def __init__(self, certificate: Path, key: Path, authority: Path, name: str) -> None:
        self.name = name
        self._files = (certificate, key, authority)
        self._lock = threading.Lock()  # gRPC asks from its own threads
        self._seen = self._changed()
        self._content = self._checked()
        self._server = _server_configuration(self._content)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port whose clients must show a certificate, too; it follows the files."""
        return grpc.dynamic_ssl_server_credentials(self._server, self._latest_of_server, True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel, by the files as they are now."""
        with self._lock:
            self._refresh()
            content = self._content
        return grpc.ssl_channel_credentials(content.authority, content.key, content.certificate)

    @property
    def channel_options(self) -> list[tuple[str, Any]]:
        """Whoever is called must have the cluster's name, whatever its address: addresses of pods are not foreseen."""
        return [("grpc.ssl_target_name_override", self.name)]

    def _latest_of_server(self) -> Any:
        """gRPC's thread, at each handshake: the configuration, or None where it has not changed."""
        with self._lock:
            return self._server if self._refresh() else None

    def _refresh(self) -> bool:
        """Takes changed files; whether there were any that could be taken."""
        try:
            seen = self._changed()
            if seen == self._seen:
                return False
            self._seen = seen  # what is wrong is told once
            self._content = self._checked()
        except TlsError as error:
            log.error("changed certificates are not taken", error=str(error))
            return False
        self._server = _server_configuration(self._content)
        log.info("certificates taken", certificate=str(self._files[0]))
        return True

    def _changed(self) -> tuple[tuple[int, int, int], ...]:
        """What tells the files from later ones."""
        found = []
        for path in self._files:
            try:
                stat = path.stat()
            except OSError as error:
                raise TlsError(f"{path} cannot be read ({error.strerror})") from error
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def _checked(self) -> _Content:
        content = _Content(*map(_read, self._files))
        _check(content, self._files, self.name)
        return content


def certificates_of(settings: TlsSettings) -> Certificates | None:
    """The certificates that are configured; None if none are. Raises TlsError."""
    files = {name: getattr(settings, name) for name in ("tls_certificate", "tls_key", "tls_ca")}
    if not any(files.values()):
        return None
    if missing := [name for name, path in files.items() if not path]:
        raise TlsError(f"{missing[0]} is not set: tls_certificate, tls_key and tls_ca are given together, or none")
    paths = (Path(settings.tls_certificate), Path(settings.tls_key), Path(settings.tls_ca))
    return Certificates(*paths, settings.tls_name)


def _server_configuration(content: _Content) -> Any:
    pairs = [(content.key, content.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=content.authority)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise TlsError(f"{path} cannot be read ({error.strerror})") from error
    if len(content) > _LONGEST_FILE:
        raise TlsError(f"{path} is longer than {_LONGEST_FILE} bytes: it is no file of certificates")
    return content


def _check(content: _Content, files: tuple[Path, ...], name: str) -> None:
    """Raises TlsError for what peers would refuse in a handshake, where the reason is hard to see."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    file, key_file, authority_file = files
    chain, authorities = _certificates(content.certificate, file), _certificates(content.authority, authority_file)
    try:
        key = load_pem_private_key(content.key, password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise TlsError(f"{key_file}: no private key in PEM without a password ({error})") from error
    own = chain[0]
    if key.public_key() != own.public_key():
        raise TlsError(f"{key_file} is not the key of {file}")
    for certificate in chain:
        _check_time(certificate, file)
    _check_use(own, file, name)
    _check_chain(chain, authorities, file, authority_file)


def _certificates(text: bytes, path: Path) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(text)
    except ValueError as error:
        raise TlsError(f"{path}: no certificates in PEM ({error})") from error


def _check_time(certificate: Certificate, path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise TlsError(f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: issue another")
    if now < certificate.not_valid_before_utc:
        raise TlsError(f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")


def _check_use(own: Certificate, path: Path, name: str) -> None:
    from cryptography.x509 import DNSName, ExtendedKeyUsage, ExtensionNotFound, SubjectAlternativeName
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

    try:
        names = own.extensions.get_extension_for_class(SubjectAlternativeName).value.get_values_for_type(DNSName)
    except ExtensionNotFound:
        names = []
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise TlsError(
            f"{path}: {name!r} is not among its DNS names ({has}): issue one with it, or set TANDEM_TLS_NAME"
        )
    try:
        uses = set(own.extensions.get_extension_for_class(ExtendedKeyUsage).value)
    except ExtensionNotFound:
        return
    if not {Usage.SERVER_AUTH, Usage.CLIENT_AUTH} <= uses:
        raise TlsError(f"{path}: members are servers and clients: it must be for both (extended key usage)")


def _check_chain(chain: list[Certificate], authorities: list[Certificate], path: Path, authority_path: Path) -> None:
    """Each certificate is issued by the next one, the last one by a CA whose time has not passed."""
    from cryptography.exceptions import InvalidSignature

    def issued(certificate: Certificate, issuer: Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    for certificate, issuer in itertools.pairwise(chain):
        if not issued(certificate, issuer):
            raise TlsError(f"{path}: its certificates are no chain: each must be issued by the next one")
    issuers = [authority for authority in authorities if issued(chain[-1], authority)]
    if not issuers:
        raise TlsError(f"{path} is not issued by a CA of {authority_path}")
    _check_time(max(issuers, key=lambda issuer: issuer.not_valid_after_utc), authority_path)
