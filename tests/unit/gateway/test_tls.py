"""TLS and Kafka's security out of files: what is made of them, and what is said when they cannot be used."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiokafka.errors import KafkaConnectionError
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from logferry.gateway.config import ConfigError, KafkaSettings, Tls
from logferry.gateway.tls import kafka_options, peer_context, server_context
from pydantic import ValidationError

SECRET = "not to be seen"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good ones: certificate, key, ca, password. And bad ones."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate")
    issued.private_key_pem.write_to_path(folder / "key")
    authority.cert_pem.write_to_path(folder / "ca")
    authority.issue_cert("other").private_key_pem.write_to_path(folder / "other-key")
    locked = load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(SECRET.encode())
    )
    (folder / "locked-key").write_bytes(locked)
    (folder / "password").write_text(SECRET + "\r\n")
    (folder / "empty").write_text("\n")
    (folder / "lines").write_text(f"{SECRET}\n{SECRET}\n")
    (folder / "bytes").write_bytes(b"\xff\xfe")
    (folder / "text").write_text(SECRET)
    return folder


def tls(folder: Path, certificate: str = "certificate", key: str = "key", ca: str = "ca") -> Tls:
    return Tls(certificate=folder / certificate, key=folder / key, ca=folder / ca)


def test_both_ends(files: Path) -> None:
    server, peer = server_context(tls(files)), peer_context(tls(files))
    assert server.minimum_version == peer.minimum_version == ssl.TLSVersion.TLSv1_2
    assert peer.verify_mode == ssl.CERT_REQUIRED
    assert peer.check_hostname
    assert len(peer.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"certificate": "none"}, "tls.certificate"),
        ({"key": "none"}, "tls.key"),
        ({"certificate": "text"}, "tls.certificate"),
        ({"key": "text"}, "tls.key"),
        ({"key": "other-key"}, "tls.key"),
        ({"key": "locked-key"}, "is encrypted"),
    ],
)
def test_a_pair_that_cannot_be_used(files: Path, given: Mapping[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_context(tls(files, **given))
    assert named in str(caught.value)
    assert str(files) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("ca", ["none", "text", "empty"])
def test_an_authority_that_cannot_be_used(files: Path, ca: str) -> None:
    with pytest.raises(ConfigError, match=r"tls\.ca"):
        peer_context(tls(files, ca=ca))


def kafka(**settings: Any) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers="kafka:9092", **settings)


def test_plain_is_the_default() -> None:
    assert kafka_options(kafka()) == {"bootstrap_servers": "kafka:9092", "security_protocol": "PLAINTEXT"}


async def test_a_token_is_read_for_each_connection(files: Path) -> None:
    (files / "token").write_text("one\n")
    settings = kafka(security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER", sasl_token_file=files / "token")
    provider = kafka_options(settings)["sasl_oauth_token_provider"]
    assert await provider.token() == "one"
    (files / "token").write_text("two")
    assert await provider.token() == "two"
    (files / "token").unlink()
    with pytest.raises(KafkaConnectionError, match=r"kafka\.sasl_token_file: .*token: No such file"):
        await provider.token()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sasl_mechanism": "OAUTHBEARER"}, "needs sasl_token_file"),
        (
            {"sasl_mechanism": "OAUTHBEARER", "sasl_token_file": "t", "sasl_username": "u"},
            "sasl_username has no effect",
        ),
        ({"sasl_username": "u", "sasl_password_file": "p", "sasl_token_file": "t"}, "sasl_token_file has no effect"),
        ({"security_protocol": "PLAINTEXT", "sasl_token_file": "t"}, "sasl_token_file has no effect"),
    ],
)
def test_settings_of_a_login_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kafka(**{"security_protocol": "SASL_SSL", **given})


def test_everything_is_passed_on(files: Path) -> None:
    settings = kafka(
        security_protocol="SASL_SSL",
        sasl_username="gateway",
        sasl_password_file=files / "password",
        ca_file=files / "ca",
        cert_file=files / "certificate",
        key_file=files / "key",
    )
    assert SECRET not in repr(settings)
    options = kafka_options(settings)
    context = options.pop("ssl_context")
    assert options == {
        "bootstrap_servers": "kafka:9092",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "gateway",
        "sasl_plain_password": SECRET,
    }
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize("password", ["none", "empty", "lines", "bytes"])
def test_a_password_that_cannot_be_used(files: Path, password: str) -> None:
    settings = kafka(security_protocol="SASL_PLAINTEXT", sasl_username="gateway", sasl_password_file=files / password)
    with pytest.raises(ConfigError, match=r"kafka\.sasl_password_file") as caught:
        kafka_options(settings)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"security_protocol": "TLS"}, "security_protocol"),
        ({"security_protocol": "SASL_SSL"}, "needs sasl_username and sasl_password_file"),
        ({"security_protocol": "SASL_SSL", "sasl_username": "x"}, "needs sasl_username and sasl_password_file"),
        ({"security_protocol": "SSL", "sasl_username": "x"}, "sasl_username has no effect"),
        ({"sasl_mechanism": "PLAIN"}, "sasl_mechanism has no effect"),
        ({"ca_file": "x"}, "ca_file has no effect"),
        ({"security_protocol": "SSL", "cert_file": "x"}, "cert_file and key_file go together"),
        ({"sasl_password": SECRET}, "sasl_password"),
    ],
)
def test_settings_that_would_not_do_what_they_say(settings: Mapping[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        kafka(**settings)
