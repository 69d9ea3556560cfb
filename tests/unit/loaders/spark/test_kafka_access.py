"""The connection of Kafka's clients in the JVM: from the settings and files of the configuration, without a secret in
an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme
from logferry.gateway.config import KafkaSettings
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.spark.kafka_access import described, jvm_options

SECRET = 's"e\\c;r=et'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    issued = authority.issue_cert("loader", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "certificate"))
    issued.private_key_pem.write_to_path(str(tmp_path / "old-key"))
    (tmp_path / "password").write_text(SECRET + "\n")
    (tmp_path / "token").write_text("a.b.c\n")
    return tmp_path


def options(**given: Any) -> dict[str, str]:
    return jvm_options(KafkaSettings(bootstrap_servers="kafka:9092", **given))


def test_plain():
    assert options() == {"bootstrap.servers": "kafka:9092", "security.protocol": "PLAINTEXT"}


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [("PLAIN", "plain.Plain"), ("SCRAM-SHA-256", "scram.Scram"), ("SCRAM-SHA-512", "scram.Scram")],
)
def test_a_password_is_quoted_for_the_login(mechanism: str, module: str, files: Path):
    login = {"sasl_mechanism": mechanism, "sasl_username": "web", "sasl_password_file": files / "password"}
    found = options(security_protocol="SASL_SSL", ca_file=files / "ca", **login)
    assert found["sasl.mechanism"] == mechanism
    assert found["sasl.jaas.config"] == (
        f'org.apache.kafka.common.security.{module}LoginModule required username="web" password="s\\"e\\\\c;r=et";'
    )
    assert found["ssl.truststore.certificates"] == (files / "ca").read_text()


def test_a_renewed_token_is_another_login(files: Path):
    token = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER", "sasl_token_file": files / "token"}
    before = options(**token)
    assert before == options(**token)
    assert "a.b.c" not in str(before)
    (files / "token").write_text("d.e.f")
    assert options(**token)["sasl.jaas.config"] != before["sasl.jaas.config"]


WRONG = {
    "no password": ({"sasl_password_file": "none"}, r"kafka\.sasl_password_file: .*none: No such file"),
    "no authority": ({"ca_file": "password"}, r"kafka\.ca_file: .*password"),
    "not PKCS 8": ({"cert_file": "certificate", "key_file": "old-key"}, r"kafka\.key_file: .*old-key: .*openssl pkcs8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_used(case: str, files: Path):
    changes, said = WRONG[case]
    given = {"sasl_username": "web", "sasl_password_file": files / "password", "ca_file": files / "ca"}
    given |= {name: files / value for name, value in changes.items()}
    with pytest.raises(LoaderConfigError, match=said) as caught:
        options(security_protocol="SASL_SSL", **given)
    assert SECRET not in str(caught.value)


def test_a_message_names_the_cluster_and_the_user(files: Path):
    settings = KafkaSettings(
        bootstrap_servers="kafka:9092",
        security_protocol="SASL_SSL",
        sasl_username="web",
        sasl_password_file=files / "password",
    )
    assert described(settings) == "kafka:9092 (SASL_SSL, as web)"
    assert described(KafkaSettings(bootstrap_servers="kafka:9092")) == "kafka:9092"
