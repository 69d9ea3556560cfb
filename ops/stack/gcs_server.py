"""A local Google Cloud Storage for tests: fake-gcs-server with its objects in memory, and before it the XML API.

    with GcsServer(folder) as server: ...     # server.endpoint, server.environment

It has the bucket ``warehouse`` and asks for no credentials. fake-gcs-server serves the JSON API, by which Spark's
connector works, and decides preconditions under a lock. Of the XML API, by which delta-rs works, it serves reads only.
The process before it turns writes into requests of the JSON API, preconditions included, and gives lists their pages. A
move, which fake-gcs-server lacks, becomes a copy and a deletion there.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.processes import Child, free_ports
from logferry.ops.stack.s3_server import BUCKET

INSTALL: Final = "go install github.com/fsouza/fake-gcs-server@v1.56.1"
_JSON: Final = ("storage/", "upload/", "download/", "batch/", "_internal/")
_MATCH: Final = "x-goog-if-generation-match"
_PAGE: Final = 1000
_READY_S: Final = 60.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.05


def fake_gcs_server() -> str | None:
    """The program: beside Python, in PATH, or where Go installs."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), str(Path.home() / "go" / "bin")]
    return shutil.which("fake-gcs-server", path=os.pathsep.join(places))


class GcsServer:
    """Both processes. ``endpoint``: the URL of both APIs."""

    def __init__(self, folder: Path) -> None:
        program = fake_gcs_server()
        if program is None:
            raise Unavailable(f"fake-gcs-server is missing: {INSTALL}")
        self.port, behind = free_ports(2)
        store = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(behind), "-backend", "memory"]
        store += ["-public-host", f"127.0.0.1:{self.port}", "-external-url", self.endpoint, "-log-level", "error"]
        before = [sys.executable, "-m", "logferry.ops.stack.gcs_server", str(self.port), str(behind)]
        self._children = [Child("gcs", store, folder / "gcs.log"), Child("gcs-xml", before, folder / "gcs-xml.log")]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which every command and library finds it."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def __enter__(self) -> Self:
        """Returns when it answers. Raises Unavailable."""
        for child in self._children:
            child.start()
        deadline = time.monotonic() + _READY_S
        bucket = json.dumps({"name": BUCKET}).encode()
        while _asked(self.port, "POST", "/storage/v1/b?project=p", bucket)[0] not in (200, 409):
            if not all(child.running for child in self._children) or time.monotonic() > deadline:
                self.__exit__()
                raise Unavailable(f"the server of gs:// does not start:\n{self._children[1].log_tail()}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.stop(_STOP_S)


Answer = tuple[int | None, dict[str, str], bytes]


def _asked(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
) -> Answer:
    """Status, headers and content; no status without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    except OSError:
        return None, {}, b""
    finally:
        connection.close()


class _XmlApi:
    """The XML API's writes, as requests of the JSON API at ``port``; the rest as it is, for the host ``public``."""

    def __init__(self, port: int, public: str) -> None:
        self._port, self._public = port, public
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)

    def answer(self, request: Any) -> Answer:
        path, method, said = request.environ["RAW_URI"], request.method, request.args
        body = request.get_data()
        bucket, _, name = path.partition("?")[0].lstrip("/").partition("/")
        if "/moveTo/o/" in path:
            return self._move(path.partition("?")[0])
        if path.lstrip("/").startswith(_JSON) or not name or method in ("GET", "HEAD"):
            # Go's server answers in its own way to what a client says of connections.
            headers = {n: v for n, v in request.headers if n.lower() not in ("host", "connection", "transfer-encoding")}
            headers["Host"] = self._public
            status, headers, content = _asked(self._port, method, path, body, headers)
            if "list-type" in said and status == 200:
                headers, content = {}, _page(content, said)
            return status, headers, content
        upload = said.get("uploadId", "")
        if method == "POST" and "uploads" in said:
            self._uploads[new := f"upload-{next(self._numbers)}"] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=new)
        if upload and upload not in self._uploads:
            return 404, {}, b"no such upload"
        if method == "PUT" and upload:
            self._uploads[upload][number := int(said["partNumber"])] = body
            return 200, {"ETag": f'"{number}"'}, b""
        if method == "POST":
            wanted = [int(e.text or "") for e in ElementTree.fromstring(body).iter() if e.tag.endswith("PartNumber")]
            parts = self._uploads[upload]
            status, headers, content = self._put(bucket, name, b"".join(parts[part] for part in wanted), request)
            if status == 200:
                del self._uploads[upload]
                content = _xml("CompleteMultipartUploadResult", ETag=headers["ETag"])
            return status, headers, content
        if method == "DELETE" and upload:
            del self._uploads[upload]
            return 204, {}, b""
        if method == "DELETE":
            status, headers, content = _asked(self._port, method, f"/storage/v1/b/{bucket}/o/{name}")
            return 204 if status == 200 else status, {}, b""
        return self._put(bucket, name, body, request) if "x-goog-copy-source" not in request.headers else (501, {}, b"")

    def _move(self, path: str) -> Answer:
        source, _, target = path.partition("/moveTo/o/")
        bucket = source.partition("/b/")[2].partition("/")[0]
        status, headers, content = _asked(self._port, "POST", f"{source}/rewriteTo/b/{bucket}/o/{target}")
        if status == 200:
            _asked(self._port, "DELETE", source)
            content = json.dumps(json.loads(content)["resource"]).encode()
        return status, {"Content-Type": "application/json"} if status == 200 else headers, content

    def _put(self, bucket: str, name: str, body: bytes, request: Any) -> Answer:
        query = {"uploadType": "media", "name": unquote(name)}
        if _MATCH in request.headers:
            query["ifGenerationMatch"] = request.headers[_MATCH]
        path = f"/upload/storage/v1/b/{bucket}/o?{urlencode(query, quote_via=quote)}"
        status, _, content = _asked(self._port, "POST", path, body, {"Content-Type": "application/octet-stream"})
        if status != 200:
            return status, {}, content
        stored = json.loads(content)
        return 200, {"ETag": f'"{stored["etag"]}"', "x-goog-generation": stored["generation"]}, b""


def _page(content: bytes, said: Mapping[str, str]) -> bytes:
    """The part of a whole list that a request wants."""
    root = ElementTree.fromstring(content)
    found = {
        e.findtext("Key") or e.findtext("Prefix") or "": e for e in root if e.tag in ("Contents", "CommonPrefixes")
    }
    later = sorted(key for key in found if key > max(said.get("continuation-token", ""), said.get("start-after", "")))
    page = later[: min(_PAGE, int(said.get("max-keys", _PAGE)))]
    for key in found.keys() - set(page):
        root.remove(found[key])
    if len(page) < len(later):
        ElementTree.SubElement(root, "NextContinuationToken").text = page[-1]
    return ElementTree.tostring(root)


def _xml(kind: str, **said: str) -> bytes:
    root = ElementTree.Element(kind)
    for name, value in said.items():
        ElementTree.SubElement(root, name).text = value
    return ElementTree.tostring(root)


def main() -> None:
    """The process before fake-gcs-server."""
    from werkzeug.serving import run_simple
    from werkzeug.wrappers import Request, Response

    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("behind", type=int)
    ports = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    api = _XmlApi(ports.behind, f"127.0.0.1:{ports.port}")

    @Request.application
    def app(request: Request) -> Response:
        status, headers, content = api.answer(request)
        kept = {n: v for n, v in headers.items() if n.lower() not in ("connection", "transfer-encoding", "date")}
        response = Response(content, status or 503)
        response.headers.update(kept)
        return response

    run_simple("127.0.0.1", ports.port, app, threaded=True)


if __name__ == "__main__":
    main()
