"""How bytes are kept secret on their way: to this worker, between workers, and to Kafka.

Everything is read from the files that the configuration names, before anything starts; what cannot be used is a
ConfigError that names the setting and the file, never what is in the file.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NoReturn

from logferry.gateway.config import ConfigError, KafkaSettings, Tls


def server_context(tls: Tls) -> ssl.SSLContext:
    """For those who connect to this worker. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, tls)
    return context


def load_certificate(context: ssl.SSLContext, tls: Tls) -> None:
    """Takes the certificate as it is now in its file, for connections from now on. Raises ConfigError."""
    _load_chain(context, tls.certificate, tls.key, "tls.certificate, tls.key")


def peer_context(tls: Tls) -> ssl.SSLContext:
    """For connections to the other workers, whose certificates are always verified. Raises ConfigError."""
    return _client_context(tls.ca, "tls.ca")


def kafka_options(settings: KafkaSettings) -> dict[str, Any]:
    """What every client of Kafka in this process is made with. Raises ConfigError."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "security_protocol": settings.security_protocol,
    }
    if settings.is_encrypted:
        context = _client_context(settings.ca_file, "kafka.ca_file")
        if settings.cert_file is not None and settings.key_file is not None:
            _load_chain(context, settings.cert_file, settings.key_file, "kafka.cert_file, kafka.key_file")
        options["ssl_context"] = context
    if settings.is_authenticated and settings.sasl_password_file is not None:
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = _secret(settings.sasl_password_file, "kafka.sasl_password_file")
    return options


def _client_context(ca: Path | None, setting: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(setting, ca, error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path, setting: str) -> None:
    def no_password() -> NoReturn:
        # Without this OpenSSL would ask on the terminal.
        raise ConfigError(f"{setting}: {key} is encrypted; a key without a password is needed")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(setting, f"{certificate}, {key}", error) from None


def _secret(path: Path, setting: str) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(setting, path, error) from None
    if not secret or "\n" in secret:
        raise ConfigError(f"{setting}: {path} does not hold one line with the password")
    return secret


def _unusable(setting: str, path: object, error: Exception) -> ConfigError:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not UTF-8"
    return ConfigError(f"{setting}: {path}: {reason}")
