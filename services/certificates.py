"""`tandem certificates`: a CA of the cluster's own, and certificates for its members."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder

_CLOCK_SKEW = datetime.timedelta(minutes=5)


def certificates(
    folder: Annotated[Path, typer.Argument(help="Where the files are written; a CA that is there is used again.")],
    name: Annotated[str, typer.Option(help="DNS name that all members have, as TANDEM_TLS_NAME says.")] = "tandem",
    days: Annotated[float, typer.Option(help="How long the certificate of the members is valid.")] = 90.0,
    ca_days: Annotated[float, typer.Option(help="How long a new CA is valid.")] = 3650.0,
) -> None:
    """Make certificates by which the processes of a cluster know each other: mutual TLS without a CA of your own.

    `ca.crt`, `tls.crt` and `tls.key` go to all processes of the cluster, `ca.key` to none: whoever has it can join.
    Run it again well before `tls.crt` expires: servers show the new one from the next connection on; who calls takes
    it for peers that are new to it, so restart processes in turn while the old one is valid.

    Example:

      tandem certificates certs

      tandem up --tls-certificate certs/tls.crt --tls-key certs/tls.key --tls-ca certs/ca.crt
    """
    from services.supervisor import EXIT_CONFIGURATION

    try:
        made = issue(folder, name, datetime.timedelta(days=days), datetime.timedelta(days=ca_days))
    except (OSError, ValueError, OverflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    print(f"{folder / 'tls.crt'}: {name}, valid until {made.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")


def issue(folder: Path, name: str, life: datetime.timedelta, ca_life: datetime.timedelta) -> Certificate:
    """Writes `tls.crt` and `tls.key`, before them `ca.crt` and `ca.key` if they are not there.

    Raises OSError, and ValueError for an unusable name or CA.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_key, ca = _authority(folder, ca_life)
    key = _new_key()
    builder = (
        _builder(name, key, life, issuer=ca)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([Usage.SERVER_AUTH, Usage.CLIENT_AUTH]), critical=False)
    )
    certificate = _signed(builder, ca_key)
    _write(folder / "tls.key", _pem(key))
    _write(folder / "tls.crt", _pem(certificate))
    return certificate


def _authority(folder: Path, life: datetime.timedelta) -> tuple[EllipticCurvePrivateKey, Certificate]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key_file, file = folder / "ca.key", folder / "ca.crt"
    if file.exists() or key_file.exists():  # half of a CA is not replaced: members may trust it
        found = load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(found, EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} was not made by this command: issue certificates with what made it")
        return found, x509.load_pem_x509_certificate(file.read_bytes())
    key = _new_key()
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder("Tandem cluster CA", key, life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = _signed(builder, key)
    _write(key_file, _pem(key))
    _write(file, _pem(certificate))
    return key, certificate


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    name: str, key: EllipticCurvePrivateKey, life: datetime.timedelta, issuer: Certificate | None = None
) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + life) - _CLOCK_SKEW)
        .not_valid_after(now + life)
    )


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey) -> Certificate:
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _pem(what: Certificate | EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.x509 import Certificate

    if isinstance(what, Certificate):
        return what.public_bytes(s.Encoding.PEM)
    return what.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Replaces the file at once; nobody else can read it."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.rename(path)
