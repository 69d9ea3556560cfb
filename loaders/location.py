"""Where a table is: a folder of a mounted file system, or a URI of an object store or of HDFS. The values only.

    /warehouse/nginx          s3://bucket/warehouse/nginx (s3a:// is the same)
    hdfs://namenode/nginx     abfss://container@account.dfs.core.windows.net/nginx, gs://bucket/nginx

A URI has no keys in it: one with a user's name or a password is refused, and not repeated in the error.

S3 is accessed as the section ``[s3]`` of the configuration says, else by the variables ``AWS_ENDPOINT_URL``,
``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` and ``AWS_SESSION_TOKEN``, else by the roles of the
platform. Google Cloud Storage is accessed as ``[gs]`` says, else by ``STORAGE_EMULATOR_HOST``, else by Google's
application default credentials. Azure is accessed as ``[azure]`` says, else by ``AZURE_STORAGE_ACCOUNT_KEY``, or by
``AZURE_TENANT_ID``, ``AZURE_CLIENT_ID`` and ``AZURE_CLIENT_SECRET``. Secrets are read from their files at each use, so
that they can change, and are part of no representation.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import total_ordering
from pathlib import Path
from typing import Any, ClassVar, Final

# The schemes of URIs, each with the names by which it is known.
_SCHEMES: Final = {"s3": "s3", "s3a": "s3", "hdfs": "hdfs", "abfss": "abfss", "gs": "gs"}
_URI: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/]*)(/.*)?", re.DOTALL)
_ENDPOINT: Final = re.compile(r"https?://[^@?#\s]+")
_NO_GS_KEYS: Final = "credentials belong into a file, for [gs] or GOOGLE_APPLICATION_CREDENTIALS"
_NO_KEYS: Final = "keys belong into the files of [s3] or into the variables AWS_…"
# delta-rs ends the thread, or writes elsewhere, for these; Spark quotes names by backticks.
_REFUSED: Final = "`%\\[]^|"
_VARIABLES: Final = {
    "endpoint": "AWS_ENDPOINT_URL",
    "region": "AWS_REGION",
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}
# After this long without a store, a load fails and is repeated by its caller.
_RETRY: Final = "60s"
_SECRET: Final = ("access_key", "secret_key", "session_token")
# Whatever was read as a secret by this process, to keep it out of errors.
_known_secrets: set[str] = set()


@dataclass(frozen=True)
class S3Access:
    """How S3 is accessed; what is None is taken from the environment or the platform."""

    scheme: ClassVar = "s3"
    endpoint: str | None = None
    region: str | None = None
    access_key_file: Path | None = None
    secret_key_file: Path | None = None
    session_token_file: Path | None = None

    def values(self) -> dict[str, str]:
        """What is known, by the names of `_VARIABLES`. Raises OSError, ValueError for a secret's file, and ValueError
        for an endpoint that is no plain URL."""
        found = {name: os.environ[variable] for name, variable in _VARIABLES.items() if os.environ.get(variable)}
        files = {"access_key": self.access_key_file, "secret_key": self.secret_key_file}
        given: dict[str, str | None] = {"endpoint": self.endpoint, "region": self.region}
        if any(files.values()):
            # A token of the environment belongs to the keys of the environment.
            found.pop("session_token", None)
        for name, file in {**files, "session_token": self.session_token_file}.items():
            given[name] = None if file is None else _secret(file)
        found |= {name: value for name, value in given.items() if value is not None}
        if not _ENDPOINT.fullmatch(found.get("endpoint", "http://none")):
            raise ValueError(f"the endpoint of S3 is no URL like https://host:9000; {_NO_KEYS}")
        _known_secrets.update(found[name] for name in _SECRET if name in found)
        return found

    def delta_options(self) -> dict[str, str]:
        """The options of delta-rs: a commit is a PUT with If-None-Match."""
        values = self.values()
        options = {_VARIABLES[name]: value for name, value in values.items()}
        options |= {"aws_conditional_put": "etag", "retry_timeout": _RETRY}
        if "endpoint" in values:
            options["AWS_ALLOW_HTTP"] = str(values["endpoint"].startswith("http:")).lower()
            # Servers of one's own rarely have a name per bucket.
            options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "false"
            options.setdefault("AWS_REGION", "us-east-1")
        return options

    def arrow_options(self) -> dict[str, Any]:
        """The options of pyarrow's file system."""
        values = self.values()
        names = ("access_key", "secret_key", "session_token", "region")
        options: dict[str, Any] = {name: values[name] for name in names if name in values}
        if "endpoint" in values:
            scheme, _, host = values["endpoint"].rstrip("/").partition("://")
            options |= {"endpoint_override": host, "scheme": scheme}
            options.setdefault("region", "us-east-1")
        return options

    def hadoop_options(self) -> dict[str, str]:
        """The settings of Spark for S3A: files are uploaded where they belong, never renamed."""
        values = self.values()
        names = {"endpoint": "endpoint", "region": "endpoint.region", "access_key": "access.key"}
        names |= {"secret_key": "secret.key", "session_token": "session.token"}
        s3a = {names[name]: value for name, value in values.items()}
        if "endpoint" in values:
            s3a["path.style.access"] = "true"
            s3a["connection.ssl.enabled"] = str(not values["endpoint"].startswith("http:")).lower()
            s3a.setdefault("endpoint.region", "us-east-1")
        s3a |= {"committer.name": "magic", "committer.magic.enabled": "true", "fast.upload.buffer": "disk"}
        return {
            "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
            "spark.hadoop.mapreduce.outputcommitter.factory.scheme.s3a": (
                "org.apache.hadoop.fs.s3a.commit.S3ACommitterFactory"
            ),
            "spark.sql.sources.commitProtocolClass": "org.apache.spark.internal.io.cloud.PathOutputCommitProtocol",
            "spark.sql.parquet.output.committer.class": (
                "org.apache.spark.internal.io.cloud.BindingParquetOutputCommitter"
            ),
            **{f"spark.hadoop.fs.s3a.{name}": value for name, value in s3a.items()},
        }


@dataclass(frozen=True)
class GsAccess:
    """How Google Cloud Storage is accessed; what is None is taken from the environment or the platform.

    Only the path of the key's file is known here: delta-rs and the connector of Spark read it themselves. An endpoint
    without TLS gets no credentials.
    """

    scheme: ClassVar = "gs"
    endpoint: str | None = None
    service_account_file: Path | None = None

    def url(self) -> str | None:
        """The endpoint; None for Google's. Raises ValueError where it is no plain URL."""
        said = self.endpoint or os.environ.get("STORAGE_EMULATOR_HOST")
        if not said:
            return None
        url = said if "://" in said else f"http://{said}"
        if not _ENDPOINT.fullmatch(url):
            raise ValueError(f"the endpoint of gs:// is no URL like https://host:9000; {_NO_GS_KEYS}")
        return url.rstrip("/")

    def delta_options(self) -> dict[str, str]:
        """The options of delta-rs: a commit is a PUT with x-goog-if-generation-match. Raises ValueError."""
        url, options = self.url(), {"retry_timeout": _RETRY}
        if url and url.startswith("http:"):
            # `google_skip_signature` of object_store 0.13 still asks the platform for a token before each write.
            nobody = {"gcs_base_url": url, "disable_oauth": True}
            nobody |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            return options | {"google_service_account_key": json.dumps(nobody)}
        if url:
            options["google_base_url"] = url
        if self.service_account_file:
            options["google_service_account"] = str(self.service_account_file)
        return options

    def hadoop_options(self) -> dict[str, str]:
        """The settings of Spark for Google's connector. Raises ValueError."""
        url, kind = self.url(), "APPLICATION_DEFAULT"
        gs = {"impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem"}
        if url:
            gs["storage.root.url"] = url
        if url and url.startswith("http:"):
            kind = "UNAUTHENTICATED"
        elif self.service_account_file:
            kind = "SERVICE_ACCOUNT_JSON_KEYFILE"
            gs["auth.service.account.json.keyfile"] = str(self.service_account_file)
        return {f"spark.hadoop.fs.gs.{name}": value for name, value in {**gs, "auth.type": kind}.items()}


@dataclass(frozen=True)
class AzureAccess:
    """How Azure's storage accounts are accessed; a key that is None is taken from the environment.

    An emulator of the Blob service is used as delta-rs does: with ``AZURE_STORAGE_USE_EMULATOR=true``, that at
    ``AZURITE_BLOB_STORAGE_URL``.
    """

    scheme: ClassVar = "abfss"
    account_key_file: Path | None = None

    @staticmethod
    def emulator() -> str | None:
        """Its URL. Raises ValueError where it is no plain URL."""
        if os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() not in ("1", "true"):
            return None
        url = os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000")
        if not _ENDPOINT.fullmatch(url):
            raise ValueError("AZURITE_BLOB_STORAGE_URL is no URL like http://127.0.0.1:10000")
        return url

    def _key(self) -> str | None:
        """Raises OSError, ValueError for the file."""
        file = self.account_key_file
        key = os.environ.get("AZURE_STORAGE_ACCOUNT_KEY") if file is None else _secret(file)
        if key:
            _known_secrets.add(key)
        return key or None

    def delta_options(self) -> dict[str, str]:
        """The options of delta-rs: a commit is a PUT with If-None-Match. It knows the variables itself."""
        key = self._key()
        return {"retry_timeout": _RETRY} | ({} if key is None else {"azure_storage_account_key": key})

    def hadoop_options(self) -> dict[str, str]:
        """The settings of Spark for Hadoop's driver; without a key or a client, those of the cluster decide."""
        url, key, azure = self.emulator(), self._key(), {"ssl.channel.mode": "Default_JSSE"}
        names = ("TENANT_ID", "CLIENT_ID", "CLIENT_SECRET")
        tenant, client, secret = (os.environ.get(f"AZURE_{name}") for name in names)
        if key:
            azure |= {"account.auth.type": "SharedKey", "account.key": key}
        elif tenant and client and secret:
            _known_secrets.add(secret)
            azure |= {
                "account.auth.type": "OAuth",
                "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
                "account.oauth2.client.endpoint": f"https://login.microsoftonline.com/{tenant}/oauth2/v2.0/token",
                "account.oauth2.client.id": client,
                "account.oauth2.client.secret": secret,
            }
        if url:
            # It has the Blob service alone.
            azure |= {"abfs.endpoint": url.split("/")[2], "always.use.https": str(url.startswith("https:")).lower()}
            azure |= {"account.hns.enabled": "false", "fns.account.service.type": "BLOB"}
        return {f"spark.hadoop.fs.azure.{name}": value for name, value in azure.items()}


Access = S3Access | GsAccess | AzureAccess
_ACCESSES: Final[dict[str, type[Access]]] = {one.scheme: one for one in (S3Access, GsAccess, AzureAccess)}


def _has_keys(text: str) -> bool:
    """Whether this may be a URI with a user or password. A secret key may hold a slash, so all of S3's is looked at."""
    if ":/" not in text:
        return False
    scheme, _, rest = text.partition(":")
    host = rest.lstrip("/").partition("/")[0]
    if scheme.lower() in ("s3", "s3a"):
        return "@" in rest or ":" in host
    if scheme.lower() == "file":
        return False
    return "@" in host and (scheme.lower() != "abfss" or ":" in host)


def _secret(file: Path) -> str:
    text = file.read_text(encoding="utf-8").strip()
    if not text or not text.isprintable() or " " in text:
        raise ValueError(f"{file} does not hold a key: one line without spaces is expected")
    return text


def without_secrets(text: str) -> str:
    """The text without the keys that this process uses: stores repeat them in some of their errors."""
    for secret in sorted(_known_secrets, key=len, reverse=True):  # A key may begin with another one.
        text = text.replace(secret, "***")
    return text


def _access(scheme: str, accesses: Iterable[Access | None]) -> Access | None:
    return next((access for access in accesses if access is not None and access.scheme == scheme), None)


@total_ordering
@dataclass(frozen=True, eq=False)
class Location:
    """A folder or file. ``uri``: an absolute path for a mounted file system. Equal where the URIs are.

    ``access``: None where the configuration has none for the scheme.
    """

    uri: str
    access: Access | None = field(default=None, repr=False)

    @classmethod
    def of(cls, place: Location | Path | str, *accesses: Access | None) -> Location:
        """``accesses``: of several stores; that of the place's scheme is taken.

        Raises ValueError for a URI without a bucket or path, of an unknown scheme, or with ``..`` in it, and for
        characters that some of the programs involved take for something else.
        """
        if isinstance(place, Location):
            return replace(place, access=_access(place.scheme, accesses) or place.access) if accesses else place
        text = str(place)
        if _has_keys(text):
            raise ValueError(f"a table's URI holds no user and no password; {_NO_KEYS}")
        if any(c in _REFUSED or not c.isprintable() for c in text):
            raise ValueError(f"{text!r}: a table's path holds none of {' '.join(_REFUSED)} and no control character")
        match = _URI.fullmatch(text)
        if match is None:
            # pathlib takes one slash of "s3://bucket".
            if ":/" in text:
                raise ValueError(f"{text} is neither a path nor a URI like s3://bucket/table")
            return cls(str(Path(text).absolute()))
        scheme, host, path = match[1].lower(), match[2], (match[3] or "").rstrip("/")
        if scheme == "file":
            return cls(str(Path(path or "/").absolute()))
        if scheme not in _SCHEMES:
            raise ValueError(f"{text}: {scheme}:// is not known; {', '.join(f'{name}://' for name in _SCHEMES)} are")
        parts = path.split("/")[1:]
        if not host or not parts or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{text}: a bucket or host, and a path without empty parts and dots, are expected")
        scheme = _SCHEMES[scheme]
        access = _access(scheme, accesses) or (_ACCESSES[scheme]() if scheme in _ACCESSES else None)
        return cls(f"{scheme}://{host}/{'/'.join(parts)}", access)

    @property
    def scheme(self) -> str:
        """Empty for a mounted file system."""
        match = _URI.fullmatch(self.uri)
        return match[1] if match else ""

    @property
    def is_local(self) -> bool:
        return not self.scheme

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return replace(self, uri=self.uri.rpartition("/")[0] or "/")

    def with_name(self, name: str) -> Location:
        return self.parent / name

    def __truediv__(self, name: str) -> Location:
        return replace(self, uri=f"{self.uri.rstrip('/')}/{name}")

    @property
    def options(self) -> dict[str, str] | None:
        """For delta-rs. Raises OSError, ValueError for a secret's file."""
        return None if self.access is None else self.access.delta_options()

    @property
    def for_spark(self) -> str:
        """As Hadoop names it: with ``abfss``, its driver always wants TLS."""
        if isinstance(self.access, AzureAccess) and (self.access.emulator() or "").startswith("http:"):
            return f"abfs{self.uri[5:]}"
        return f"s3a{self.uri[2:]}" if self.scheme == "s3" else self.uri

    def __str__(self) -> str:
        return self.uri

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(f"{self.uri} is not in a mounted file system")
        return self.uri

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self.uri == other.uri

    def __lt__(self, other: Location) -> bool:
        return self.uri < other.uri

    def __hash__(self) -> int:
        return hash(self.uri)
