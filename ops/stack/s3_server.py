"""A local S3 server for the demo and for tests: moto's, in a process of its own. It keeps objects in memory.

    with S3Server(folder) as server: ...     # server.endpoint, server.environment

It has the bucket ``warehouse``, and any keys are valid. A PUT with ``If-None-Match: *`` is atomic.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.processes import Child, free_ports

BUCKET: Final = "warehouse"
_READY_S: Final = 60.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.05


class S3Server:
    """``endpoint``: its URL. Not restarted: its objects end with it."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port = port or free_ports(1)[0]
        command = [sys.executable, "-m", "logferry.ops.stack.s3_server", str(self.port)]
        self._child = Child("s3", command, folder / "s3.log")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every command and library finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "logferry",
            "AWS_SECRET_ACCESS_KEY": "logferry-secret",
        }

    def __enter__(self) -> S3Server:
        """Returns when it answers. Raises Unavailable."""
        self._child.start()
        deadline = time.monotonic() + _READY_S
        while not self._has_bucket():
            if not self._child.running or time.monotonic() > deadline:
                self._child.stop(_STOP_S)
                raise Unavailable(f"the S3 server does not start:\n{self._child.log_tail()}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop(_STOP_S)

    def _has_bucket(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("PUT", f"/{BUCKET}")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]


def _corrected(app: Wsgi) -> Wsgi:
    """moto looks first and writes later; and it gives the end of an upload a name that strict clients do not know."""
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" in environ:
            with lock:
                return app(environ, start)
        if environ["REQUEST_METHOD"] != "POST" or "uploadId=" not in environ.get("QUERY_STRING", ""):
            return app(environ, start)
        said: list[Any] = []
        body = b"".join(app(environ, lambda *given: said.extend(given)))
        body = body.replace(b"CompleteMultipartUploadResponse", b"CompleteMultipartUploadResult")
        headers = [(name, value) for name, value in said[1] if name.lower() != "content-length"]
        start(said[0], [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return serve


def main() -> None:
    """The server's process."""
    try:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import run_simple
    except ImportError as error:
        raise Unavailable(f"{error}: pip install 'logferry[s3-server]'") from None
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = _corrected(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", parser.parse_args().port, app, threaded=True)


if __name__ == "__main__":
    main()
