"""The certificate authorities that this machine trusts, as a file that Java reads.

A Java that came as a wheel brings a list of its own and knows nothing of an authority that was added to the
machine, as companies do whose proxies look into TLS.
"""

from __future__ import annotations

import hashlib
import ssl
import struct
from collections.abc import Sequence
from pathlib import Path

_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
# Java's store of certificates is sealed with a hash over password, this text and content; it is no secret.
_SEAL = b"Mighty Aphrodite"
PASSWORD = "changeit"


def write_truststore(file: Path) -> bool:
    """Writes what Python's TLS trusts by default. False, and no file, where it finds no authorities."""
    certificates = ssl.create_default_context().get_ca_certs(binary_form=True)
    if not certificates:
        return False
    file.write_bytes(_store(certificates))
    return True


def _store(certificates: Sequence[bytes]) -> bytes:
    """Java's format "JKS": head, one entry a certificate, seal."""
    content = struct.pack(">III", _MAGIC, _VERSION, len(certificates))
    for number, certificate in enumerate(certificates):
        alias = _text(f"authority-{number}")
        head = struct.pack(">I", _TRUSTED_CERTIFICATE) + alias + struct.pack(">Q", 0) + _text("X.509")
        content += head + struct.pack(">I", len(certificate)) + certificate
    return content + hashlib.sha1(PASSWORD.encode("utf-16-be") + _SEAL + content).digest()


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")
