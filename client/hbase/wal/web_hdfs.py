"""HDFS over WebHDFS, for reading: a NameNode names a DataNode, which sends the bytes.

* Of a file that is being written, a DataNode shows what its writer has flushed. The NameNode does not know how long
  such a file is, and refuses places behind what it knows: it is asked without a place, and only the DataNode gets one.
* Several NameNodes are tried in turn, from the one that answered last: one that is standby, starting or gone is left.
* A DataNode that is gone is named to the NameNode, which then names another one that has the block, if there is one.
* A file that ends is no proof of its length: the blocks of a writer that died may be shorter on one DataNode than on
  another until HDFS has recovered its lease. So only a file that is closed, of which all bytes were read, is whole.
* The user or the token is in the URLs, as WebHDFS wants it: no text of this module has more of them than host and path.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from logferry.client.events import log_event
from logferry.client.hbase.definition import Unfit
from logferry.client.hbase.wal.folders import FolderEntry
from logferry.client.transport.connections import Connections, Dialer, NoResponse, Reply

SCHEMES: Final = {"webhdfs": "http", "swebhdfs": "https"}
_PREFIX: Final = "/webhdfs/v1"
_ANSWER_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 4 << 20
# A folder of 100,000 files.
_LARGEST_BYTES: Final = 64 << 20
_DATA_NODE_ATTEMPTS: Final = 3
_TOKEN: Final = re.compile(r"[A-Za-z0-9_=-]+\Z")
_NO_RIGHT: Final = ("AccessControlException", "AuthorizationException", "SecurityException", "InvalidToken")
# What another NameNode, or the same one a little later, may answer otherwise.
_NOT_ACTIVE: Final = ("StandbyException", "RetriableException", "SafeModeException", "ObserverRetryOnActiveException")


class HdfsRefused(OSError):
    """A NameNode or DataNode answers, and refuses. ``is_final``: it will refuse the same later."""

    def __init__(self, text: str, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class WebHdfs:
    """For one thread. ``hosts``: each NameNode as HOST:PORT. ``user``: where there is no security. ``token_file``: with
    a delegation token, read before each request, so that a token may be replaced.
    """

    def __init__(self, scheme: str, hosts: list[str], user: str, token_file: Path | None, dialer: Dialer) -> None:
        self._http, self._hosts, self._user, self._token_file = SCHEMES[scheme], hosts, user, token_file
        self._name = f"{scheme}://{','.join(hosts)}"
        self._connections = Connections(_ANSWER_TIMEOUT_S, dialer, _LARGEST_BYTES)

    def close(self) -> None:
        self._connections.close()

    def entries(self, folder: str) -> list[FolderEntry]:
        reply = self._ask("LISTSTATUS", folder)
        found = self._json(reply, folder, "FileStatuses", "FileStatus")
        return [FolderEntry(one["pathSuffix"], one["type"] == "DIRECTORY") for one in found if one["pathSuffix"]]

    def read(self, path: str, at: int, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            wanted = min(size - len(data), _PIECE_BYTES)
            piece = self._piece(path, at + len(data), wanted)
            data += piece
            if len(piece) < wanted:
                break
        return bytes(data)

    def is_all(self, path: str, size: int) -> bool:
        found = self._json(self._ask("GET_BLOCK_LOCATIONS", path), path, "LocatedBlocks")
        return not found["isUnderConstruction"] and bool(found["fileLength"] <= size)

    def size(self, path: str) -> int:
        return int(self._json(self._ask("GET_BLOCK_LOCATIONS", path), path, "LocatedBlocks", "fileLength"))

    def check(self, folder: str) -> None:
        try:
            status = self._json(self._ask("GETFILESTATUS", folder), folder, "FileStatus")
            if status["type"] == "DIRECTORY":
                return
        except FileNotFoundError:
            pass
        except HdfsRefused as error:
            if error.is_final:
                raise Unfit(str(error)) from None
            return
        except OSError:
            return
        raise Unfit(f"{self._name}{folder} is no folder: name WALs and oldWALs of HBase (hbase.rootdir, hbase.wal.dir)")

    # ---- NameNodes --------------------------------------------------------------------------------------------------

    def _ask(self, op: str, path: str, **more: str) -> Reply:
        """The answer of the active NameNode: 200, or a redirect."""
        who = {"delegation": self._token(self._token_file)} if self._token_file else {"user.name": self._user}
        target = f"{_PREFIX}{quote(path)}?{urlencode({'op': op, **who, **more})}"
        why = ""
        for host in list(self._hosts):
            try:
                reply = self._connections.exchange(f"{self._http}://{host}{target}", {}, None, "GET")
            except NoResponse as error:
                why = str(error)
            else:
                if reply.status in (200, 307):
                    return reply
                kind, text = _remote(reply)
                if kind not in _NOT_ACTIVE and reply.status < 500:
                    raise self._refusal(reply, f"{self._name}{path}", kind, text)
                why = f"{host}: {reply.status} {kind} {text}".rstrip()
            self._hosts.append(self._hosts.pop(0))
        raise OSError(f"no NameNode of {self._name} answers; the last one: {why}")

    @staticmethod
    def _token(file: Path) -> str:
        try:
            return read_token(file)
        except ValueError as error:
            raise OSError(str(error)) from None

    # ---- DataNodes --------------------------------------------------------------------------------------------------

    def _piece(self, path: str, at: int, size: int) -> bytes:
        without: list[str] = []
        while True:
            more = {"excludedatanodes": ",".join(without)} if without else {}
            url = self._ask("OPEN", path, **more).headers.get("location", "")
            parts = urlsplit(url)
            if parts.scheme != self._http or not parts.hostname:
                raise HdfsRefused(f"{self._name}{path}: the NameNode names no DataNode with {self._http}")
            where = {**dict(parse_qsl(parts.query)), "offset": str(at), "length": str(size)}
            try:
                reply = self._connections.exchange(urlunsplit(parts._replace(query=urlencode(where))), {}, None, "GET")
                return self._data(reply, path, parts.netloc)
            except NoResponse as error:
                if len(without) + 1 >= _DATA_NODE_ATTEMPTS:
                    raise OSError(f"{path}: no DataNode sends it: {error}") from None
            without.append(self._transfer_address(path, parts.hostname, parts.port))

    def _transfer_address(self, path: str, host: str, port: int | None) -> str:
        """Of the DataNode with this address of HTTP: it is what a NameNode knows it by."""
        try:
            blocks = self._json(self._ask("GET_BLOCK_LOCATIONS", path), path, "LocatedBlocks", "locatedBlocks")
            nodes = [node for block in blocks for node in block["locations"]]
            return next(
                f"{node['ipAddr']}:{node['xferPort']}"
                for node in nodes
                if host in (node["hostName"], node["ipAddr"]) and port in (node["infoPort"], node["infoSecurePort"])
            )
        except (KeyError, TypeError, StopIteration):
            return host

    def _data(self, reply: Reply, path: str, node: str) -> bytes:
        if reply.status == 200:
            # Less than was promised is no end of the file, but that of a DataNode.
            if reply.headers.get("content-length") != str(len(reply.body)):
                raise NoResponse(f"{node} sent {len(reply.body)} bytes of {reply.headers.get('content-length')}")
            return reply.body
        kind, text = _remote(reply)
        if kind == "EOFException":  # the place is behind the end
            return b""
        raise self._refusal(reply, f"{self._name}{path} at {node}", kind, text)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _refusal(self, reply: Reply, path: str, kind: str, text: str) -> OSError:
        if kind == "FileNotFoundException":
            return FileNotFoundError(f"{path}: {text}")
        if reply.status == 401 and "negotiate" in reply.headers.get("www-authenticate", "").lower():
            return HdfsRefused(
                f"{path}: HDFS wants Kerberos, which is not supported: give a delegation token (--hdfs-token-file)",
                True,
            )
        return HdfsRefused(f"{path}: {reply.status} {kind}: {text}", reply.status == 401 or kind in _NO_RIGHT)

    def _json(self, reply: Reply, path: str, *keys: str) -> Any:
        try:
            found = json.loads(reply.body)
            for key in keys:
                found = found[key]
        except (ValueError, KeyError, TypeError):
            raise HdfsRefused(f"{self._name}{path}: the answer is not that of WebHDFS") from None
        return found


def _remote(reply: Reply) -> tuple[str, str]:
    """Name and text of the exception that HDFS answers with; empty for another answer."""
    try:
        found = json.loads(reply.body)["RemoteException"]
        return str(found["exception"]), str(found["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        return "", ""


def is_url(text: str) -> bool:
    return text.partition("://")[0] in SCHEMES


def web_hdfs(urls: list[str], user: str, token_file: Path | None, dialer: Dialer) -> tuple[WebHdfs, str, str]:
    """HDFS, and the paths in it, of two URLs as ``webhdfs://HOST:PORT[,HOST:PORT...]/PATH``. Raises ValueError."""
    parts = [urlsplit(url) for url in urls]
    if len({(one.scheme, one.netloc) for one in parts}) > 1 or not is_url(urls[0]):
        raise ValueError(f"{' and '.join(urls)}: must be in one HDFS")
    hosts = parts[0].netloc.split(",")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9._-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", host):
            raise ValueError(f"{urls[0]}: {host!r} is not HOST:PORT of a NameNode, as dfs.namenode.http-address")
    for url, one in zip(urls, parts, strict=True):
        if not one.path.strip("/") or one.query or one.fragment:
            raise ValueError(f"{url}: names no folder")
    if token_file is not None:
        read_token(token_file)
        if parts[0].scheme == "webhdfs":
            why = "the delegation token crosses the network in plain text: give HDFS TLS, and its URL with swebhdfs"
            log_event("token-unencrypted", url=f"webhdfs://{parts[0].netloc}", why=why)
    wals, old_wals = (one.path.rstrip("/") for one in parts)
    return WebHdfs(parts[0].scheme, hosts, user, token_file, dialer), wals, old_wals


def read_token(file: Path) -> str:
    """A delegation token, as WebHDFS gives it. Raises ValueError, without what the file holds."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    if not _TOKEN.match(text):
        raise ValueError(f"{file}: is no delegation token, one word of letters and digits")
    return text
