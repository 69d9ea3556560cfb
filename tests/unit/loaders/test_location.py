"""Locations: which texts are one, what they become for Spark and delta-rs, and that secrets stay out of sight."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import pytest
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import AzureAccess, GsAccess, Location, S3Access, without_secrets
from logferry.loaders.storage.files import open_table

WRONG = {
    "s3://bucket": "a bucket or host",
    "s3:///key": "a bucket or host",
    "s3://bucket/a//b": "without empty parts",
    "s3://bucket/../b": "dots",
    "s3:/bucket/a": "neither a path nor a URI",
    "ftp://host/a": "ftp:// is not known",
    "/data/a%20b": "holds none of",
    "/data/[a]": "holds none of",
    "s3://bucket/a|b": "holds none of",
    "/data/a\nb": "control character",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_location(text: str):
    with pytest.raises(ValueError, match=re.escape(WRONG[text])):
        Location.of(text)


@pytest.mark.parametrize(
    "text",
    [
        *("s3://AKIA:sEcReT@bucket/t", "s3a://AKIA:sEc/ReT@bucket/t", "S3://AKIA@bucket/t", "s3:/AKIA:sEcReT@bucket/t"),
        *("s3://AKIA:sEcReT/t", "s3://AKIA:sEc/ReT@bucket", "s3://AKIA:sEc%2FReT@bucket/t", "s3://AKIA:sEcReT@b/../t"),
        *("hdfs://user:sEcReT@name/t", "ftp://user:sEcReT@host/t", "abfss://box:sEcReT@account.net/t"),
        *("gs://AKIA:sEcReT@bucket/t", "https://AKIA:sEcReT@host/bucket/t"),
    ],
)
def test_a_uri_with_keys_is_refused_and_not_repeated(text: str):
    with pytest.raises(ValueError, match="no user and no password") as refused:
        Location.of(text)
    assert not any(part in str(refused.value) for part in ("AKIA", "sEc", "ReT"))


@pytest.mark.parametrize("text", ["/data/a@b", "hdfs://name:8020/logs@home", "abfss://box@account.net/t", "gs://b/a@b"])
def test_an_at_sign_elsewhere_is_none_of_a_key(text: str):
    assert str(Location.of(text)) == text


def test_an_endpoint_with_keys_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch):
    for endpoint in ("https://AKIA:sEcReT@host:9000", "https://host/?key=sEcReT", "box:9001"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(ValueError, match="the endpoint of S3 is no URL") as refused:
            S3Access().values()
        assert endpoint not in str(refused.value)
        assert "sEcReT" not in str(refused.value)


def test_one_place_has_one_name():
    same = {Location.of(text) for text in ("s3://b/x/t", "s3a://b/x/t/", "S3A://b/x/t")}
    assert [(str(at), at.for_spark, at.name, str(at.parent)) for at in same] == [
        ("s3://b/x/t", "s3a://b/x/t", "t", "s3://b/x")
    ]
    local = {Location.of(text) for text in ("/x/t", "file:///x/t", "/x/t/", Path("/x/t"))}
    assert [(str(at), at.for_spark, os.fspath(at), at.is_local) for at in local] == [("/x/t", "/x/t", "/x/t", True)]
    assert str(Location.of("x")) == str(Path("x").absolute())
    assert Location.of("hdfs://name:8020/x").for_spark == "hdfs://name:8020/x"
    assert str(Location.of("s3://b/x/t").with_name("t_ledger") / "a") == "s3://b/x/t_ledger/a"
    assert Location.of("s3://b/x") < Location.of("s3://b/y")
    with pytest.raises(TypeError, match="not in a mounted file system"):
        os.fspath(Location.of("s3://b/x"))


def test_a_part_of_a_location_has_its_access(tmp_path: Path):
    access = S3Access("http://host:9000", access_key_file=tmp_path / "a")
    at = Location.of("s3://b/x/t", access)
    assert (at / "y").access is at.with_name("z").access is Location.of(at).access is access


def test_keys_of_files_come_before_those_of_the_environment_and_are_read_at_each_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("ACCESS_KEY_ID", "a0"), ("SECRET_ACCESS_KEY", "s0"), ("SESSION_TOKEN", "t0")):
        monkeypatch.setenv(f"AWS_{name}", value)
    at = Location.of("s3://b/t")
    assert at.options is not None
    assert (at.options["AWS_ACCESS_KEY_ID"], at.options["AWS_SESSION_TOKEN"]) == ("a0", "t0")
    assert "AWS_ENDPOINT_URL" not in at.options, "that of AWS"
    (tmp_path / "a").write_text("key-one\n")
    (tmp_path / "s").write_text("secret-one\n")
    at = Location.of("s3://b/t", S3Access("http://h:1", "eu", tmp_path / "a", tmp_path / "s"))
    assert at.options == {
        "AWS_ENDPOINT_URL": "http://h:1",
        "AWS_REGION": "eu",
        "AWS_ACCESS_KEY_ID": "key-one",
        "AWS_SECRET_ACCESS_KEY": "secret-one",
        "AWS_ALLOW_HTTP": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        "aws_conditional_put": "etag",
        "retry_timeout": "60s",
    }
    assert isinstance(at.access, S3Access)
    hadoop = at.access.hadoop_options()
    assert hadoop["spark.hadoop.fs.s3a.secret.key"] == "secret-one"
    assert hadoop["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "false"
    assert "spark.hadoop.fs.s3a.session.token" not in hadoop, "the token belongs to other keys"
    assert at.access.arrow_options()["endpoint_override"] == "h:1"
    (tmp_path / "a").write_text("key-two\n")
    assert at.options["AWS_ACCESS_KEY_ID"] == "key-two"
    (tmp_path / "a").write_text("two words\n")
    with pytest.raises(ValueError, match="does not hold a key"):
        _ = at.options


def test_secrets_are_not_shown(tmp_path: Path):
    (tmp_path / "a").write_text("key-that-is-secret")
    at = Location.of("s3://b/t", S3Access("http://h:1", None, tmp_path / "a"))
    assert at.options
    assert "key-that-is-secret" not in f"{at} {at!r} {at.access!r}"
    assert without_secrets("403: key-that-is-secret is unknown") == "403: *** is unknown"


GS: Final = "spark.hadoop.fs.gs."


def test_google_cloud_storage_gets_credentials_only_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = tmp_path / "key.json"
    at, auth = Location.of("gs://b/t", S3Access("http://h:1"), GsAccess(None, key)), f"{GS}auth.type"
    assert at.options == {"retry_timeout": "60s", "google_service_account": str(key)}
    assert isinstance(at.access, GsAccess)
    assert at.access.hadoop_options() == {
        f"{GS}impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
        f"{GS}auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
        f"{GS}auth.service.account.json.keyfile": str(key),
    }
    assert Location.of("gs://b/t").options == {"retry_timeout": "60s"}
    assert GsAccess().hadoop_options()[auth] == "APPLICATION_DEFAULT"
    private = GsAccess("https://private.example/", key)
    assert private.delta_options()["google_base_url"] == "https://private.example"
    assert private.hadoop_options()[f"{GS}storage.root.url"] == "https://private.example"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "h:4443")
    for access in (GsAccess(None, key), GsAccess("http://h:4443", key)):
        options = access.delta_options()
        assert "google_service_account" not in options
        assert json.loads(options["google_service_account_key"])["disable_oauth"] is True
        assert access.hadoop_options()[auth] == "UNAUTHENTICATED"
        assert not any(name.endswith("keyfile") for name in access.hadoop_options())
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://user:sEcReT@h")
    with pytest.raises(ValueError, match="the endpoint of gs:// is no URL") as refused:
        GsAccess().url()
    assert "sEcReT" not in str(refused.value)


AZURE: Final = "spark.hadoop.fs.azure."


def test_of_a_key_that_begins_with_another_one_nothing_is_shown(tmp_path: Path):
    for number in range(20):  # In one set of them the order is by chance.
        for name, key in (("short", f"{number}-begins"), ("long", f"{number}-begins-and-goes-on")):
            (tmp_path / name).write_text(key)
            assert Location.of("abfss://box@account.dfs.core.windows.net/t", AzureAccess(tmp_path / name)).options
        assert without_secrets(f"{number}-begins-and-goes-on is wrong") == "*** is wrong"


def test_azure_gets_the_key_of_the_file_or_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "key").write_text("sEcReT==\n")
    at = Location.of("abfss://box@account.dfs.core.windows.net/t", AzureAccess(tmp_path / "key"))
    assert at.options == {"retry_timeout": "60s", "azure_storage_account_key": "sEcReT=="}
    assert at.access is not None
    of_key = {f"{AZURE}account.auth.type": "SharedKey", f"{AZURE}account.key": "sEcReT=="}
    assert at.access.hadoop_options() == {f"{AZURE}ssl.channel.mode": "Default_JSSE", **of_key}
    assert at.for_spark == at.uri
    assert "sEcReT" not in f"{at!r} {at.access!r}"
    assert without_secrets("sEcReT== is wrong") == "*** is wrong"
    nothing = Location.of("abfss://box@account.dfs.core.windows.net/t").access
    assert nothing is not None
    assert nothing.hadoop_options() == {f"{AZURE}ssl.channel.mode": "Default_JSSE"}, "the cluster's settings decide"
    for name in ("TENANT_ID", "CLIENT_ID", "CLIENT_SECRET"):
        monkeypatch.setenv(f"AZURE_{name}", f"the-{name}")
    assert nothing.hadoop_options()[f"{AZURE}account.auth.type"] == "OAuth"
    assert "/the-TENANT_ID/" in nothing.hadoop_options()[f"{AZURE}account.oauth2.client.endpoint"]
    assert nothing.delta_options() == {"retry_timeout": "60s"}, "delta-rs knows the variables itself"


def test_an_emulator_of_azure_is_used_where_the_variables_say_so(monkeypatch: pytest.MonkeyPatch):
    at = Location.of("abfss://box@account.dfs.core.windows.net/t")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10001")
    assert at.for_spark == at.uri
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    assert at.for_spark == "abfs://box@account.dfs.core.windows.net/t"
    assert at.access is not None
    options = at.access.hadoop_options()
    assert options[f"{AZURE}abfs.endpoint"] == "127.0.0.1:10001"
    assert options[f"{AZURE}fns.account.service.type"] == "BLOB"
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://user:sEcReT@host")
    with pytest.raises(ValueError, match="AZURITE_BLOB_STORAGE_URL is no URL") as refused:
        at.access.hadoop_options()
    assert "sEcReT" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ["sEcReT", '{"private_key": "sEcReT", "client_email": "a@b", "private_key_id": "1"}']
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_broken_key_file_is_named_and_not_repeated(
    content: str, by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key = tmp_path / "key.json"
    key.write_text(content)
    if by_variable:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(StorageUnavailable, match="gs://b/t cannot be read") as failed:
        open_table(Location.of("gs://b/t", None if by_variable else GsAccess(None, key)))
    assert "sEcReT" not in str(failed.value)
