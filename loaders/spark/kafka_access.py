"""The connection to Kafka for Kafka's own clients in the JVM: of the driver, and of Spark's executors.

PEM files are passed by their content, so that executors need no copy. A token is passed by its path: it is renewed, and
its file must exist on each host of the executors. Secrets are options of a read alone: they are in no configuration of
the session, which Spark's page and event log show.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from logferry.gateway.config import ConfigError, KafkaSettings
from logferry.gateway.tls import kafka_options, one_line_secret
from logferry.loaders.errors import LoaderConfigError

_SECURITY: Final = "org.apache.kafka.common.security"
_PASSWORD_LOGIN: Final = {
    "PLAIN": f"{_SECURITY}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{_SECURITY}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{_SECURITY}.scram.ScramLoginModule",
}
_TOKEN_LOGIN: Final = f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule"
_TOKEN_HANDLER: Final = f"{_SECURITY}.oauthbearer.OAuthBearerLoginCallbackHandler"
_PKCS8: Final = "-----BEGIN PRIVATE KEY-----"


def jvm_options(settings: KafkaSettings) -> dict[str, str]:
    """The settings of a Kafka client in the JVM, from the files as they are now. Raises LoaderConfigError, which names
    the setting and the file, never a secret.
    """
    try:
        kafka_options(settings)
        return {
            "bootstrap.servers": settings.bootstrap_servers,
            "security.protocol": settings.security_protocol,
            **_encryption(settings),
            **_login(settings),
        }
    except ConfigError as error:
        raise LoaderConfigError(str(error)) from None


def described(settings: KafkaSettings) -> str:
    """The cluster, and who connects, for messages."""
    who = f", as {settings.sasl_username}" if settings.sasl_username else ""
    how = "" if settings.security_protocol == "PLAINTEXT" else f" ({settings.security_protocol}{who})"
    return f"{settings.bootstrap_servers}{how}"


def _encryption(settings: KafkaSettings) -> dict[str, str]:
    found: dict[str, str] = {}
    if settings.ca_file is not None:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": settings.ca_file.read_text()}
    if settings.cert_file is not None and settings.key_file is not None:
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": settings.cert_file.read_text()}
        found["ssl.keystore.key"] = _pkcs8(settings.key_file)
    return found


def _pkcs8(path: Path) -> str:
    key = path.read_text()
    if _PKCS8 not in key:
        raise LoaderConfigError(
            f"kafka.key_file: {path}: Java reads PKCS #8 only; convert the key: "
            "openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW"
        )
    return key


def _login(settings: KafkaSettings) -> dict[str, str]:
    if not settings.is_authenticated:
        return {}
    found = {"sasl.mechanism": settings.sasl_mechanism}
    if settings.sasl_token_file is not None:
        token = one_line_secret(settings.sasl_token_file, "kafka.sasl_token_file")
        # Clients with the same options share one login, and a login keeps its token: the digest tells tokens apart.
        digest = hashlib.sha256(token.encode()).hexdigest()
        return found | {
            "sasl.jaas.config": f'{_TOKEN_LOGIN} required digest="{digest}";',
            "sasl.login.callback.handler.class": _TOKEN_HANDLER,
            "sasl.oauthbearer.token.endpoint.url": settings.sasl_token_file.absolute().as_uri(),
        }
    if settings.sasl_username is None or settings.sasl_password_file is None:
        raise LoaderConfigError(f"kafka: {settings.sasl_mechanism} needs sasl_username and sasl_password_file")
    password = one_line_secret(settings.sasl_password_file, "kafka.sasl_password_file")
    module, user = _PASSWORD_LOGIN[settings.sasl_mechanism], _quoted(settings.sasl_username)
    return found | {"sasl.jaas.config": f"{module} required username={user} password={_quoted(password)};"}


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
