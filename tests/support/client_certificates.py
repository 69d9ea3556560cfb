"""Client certificates of an authority of the tests, and its list of revoked ones."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization


def client(server_authority: trustme.CA, certificate: trustme.LeafCert | None) -> ssl.SSLContext:
    """A context that trusts the server and shows the certificate."""
    context = ssl.create_default_context()
    server_authority.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


def write_revocations(authority: trustme.CA, path: Path, *revoked: trustme.LeafCert) -> None:
    """The list of the authority with these certificates."""
    now = datetime.now(UTC)
    own = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    builder = x509.CertificateRevocationListBuilder().issuer_name(own.subject)
    builder = builder.last_update(now - timedelta(minutes=1)).next_update(now + timedelta(days=1))
    for certificate in revoked:
        serial = x509.load_pem_x509_certificate(certificate.cert_chain_pems[0].bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - timedelta(minutes=1))
        builder = builder.add_revoked_certificate(entry.build())
    key = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
