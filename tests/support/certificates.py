"""A certificate authority for tests: certificates that are right, expired, or of somebody else."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOOPBACK = IPv4Address("127.0.0.1")
DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = (
            _begun(self._name, self._name, self._key, -DAY, DAY)
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(_key_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / f"{name}-ca.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, ends: timedelta = DAY) -> Certificate:
        """For the loopback address, as server and client. `ends`: from now; negative for an expired one."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issued = (
            _begun(_named(name), self._name, key, -2 * DAY, ends)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(LOOPBACK)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files.certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    others = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=True, key_cert_sign=signs, crl_sign=signs, **others)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: timedelta, ends: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )
