"""TLS contexts and Kafka credentials from the configuration: for callers, other workers and Kafka.

All files are read before anything starts; one that cannot be used is a ConfigError with the setting and the file, never
with the file's content.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final, NoReturn

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError
from logferry.gateway.config import ConfigError, KafkaSettings, Tls
from logferry.gateway.metrics import CERTIFICATES_REFUSED

_NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


class _Handshake(ssl.SSLObject):
    """Of a caller. The event loop closes a failed handshake without sending what TLS has to say about it: so the first
    failure waits for the caller, which gets the alert (`unknown ca`, `certificate expired`, …) and closes."""

    _failed = False

    def do_handshake(self) -> None:
        if self._failed:
            raise ssl.SSLError("the caller's certificate was refused")
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLCertVerificationError) and error.reason != _NO_CERTIFICATE:
                raise
            CERTIFICATES_REFUSED.inc()
            self._failed = True
            raise ssl.SSLWantReadError from None


def server_context(tls: Tls, client_ca: Path | None = None) -> ssl.SSLContext:
    """For connections to this worker. ``client_ca``: callers need a certificate that it signs. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, tls)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise _unusable("receivers.syslog.client_ca", client_ca, error) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def caller_context(tls: Tls) -> ssl.SSLContext:
    """For connections of callers, with their certificates if there is an authority of these. Raises ConfigError."""
    context = server_context(tls)
    for setting, path in ("tls.client_ca", tls.client_ca), ("tls.client_crl", tls.client_crl):
        if path is not None:
            try:
                context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise _unusable(setting, path, error) from None
    if tls.client_crl is not None:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
        if tls.client_certificates == "required":
            context.verify_mode = ssl.CERT_REQUIRED
            _check_own_certificate(tls, context)
        context.sslobject_class = _Handshake
    return context


def _check_own_certificate(tls: Tls, callers: ssl.SSLContext) -> None:
    """Raises ConfigError where the other workers, whose settings are the same, would refuse this one."""
    peer = peer_context(tls)
    peer.check_hostname, peer.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = peer.wrap_bio(to_client, to_server), callers.wrap_bio(to_server, to_client, server_side=True)
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            what = f"tls.client_certificates: required, also of other workers, but {tls.certificate} is refused"
            raise ConfigError(f"{what}: {error.verify_message}") from None


def load_certificate(context: ssl.SSLContext, tls: Tls) -> None:
    """Loads the certificate for connections from now on. Raises ConfigError."""
    _load_chain(context, tls.certificate, tls.key, "tls.certificate, tls.key")


def peer_context(tls: Tls) -> ssl.SSLContext:
    """For connections to the other workers, whose certificates are always verified. Raises ConfigError."""
    context = _client_context(tls.ca, "tls.ca")
    if tls.client_certificates == "required":
        load_certificate(context, tls)
    return context


def kafka_options(settings: KafkaSettings) -> dict[str, Any]:
    """The options of every Kafka client in this process. Raises ConfigError."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "security_protocol": settings.security_protocol,
    }
    if settings.is_encrypted:
        context = _client_context(settings.ca_file, "kafka.ca_file")
        if settings.cert_file is not None and settings.key_file is not None:
            _load_chain(context, settings.cert_file, settings.key_file, "kafka.cert_file, kafka.key_file")
        options["ssl_context"] = context
    if settings.is_authenticated:
        options["sasl_mechanism"] = settings.sasl_mechanism
        if settings.sasl_token_file is not None:
            one_line_secret(settings.sasl_token_file, "kafka.sasl_token_file")
            options["sasl_oauth_token_provider"] = _TokenFile(settings.sasl_token_file)
        if settings.sasl_password_file is not None:
            options["sasl_plain_username"] = settings.sasl_username
            options["sasl_plain_password"] = one_line_secret(settings.sasl_password_file, "kafka.sasl_password_file")
    return options


class _TokenFile(AbstractTokenProvider):  # type: ignore[misc]
    """Another program renews the token in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """Raises KafkaConnectionError, as any connection that cannot be opened now."""
        try:
            return one_line_secret(self._path, "kafka.sasl_token_file")
        except ConfigError as error:
            raise KafkaConnectionError(str(error)) from None


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
        raise ConfigError(f"{setting}: {key} is encrypted; use a key without a password")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(setting, f"{certificate}, {key}", error) from None


def one_line_secret(path: Path, setting: str) -> str:
    """The secret that the file holds. Raises ConfigError."""
    try:
        secret = path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(setting, path, error) from None
    if not secret or "\n" in secret:
        raise ConfigError(f"{setting}: {path} must hold the secret on one line")
    return secret


def _unusable(setting: str, path: object, error: Exception) -> ConfigError:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not UTF-8"
    return ConfigError(f"{setting}: {path}: {reason}")
