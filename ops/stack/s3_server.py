"""Local S3 servers: moto's for the demo and for tests, and S3Proxy for tests. Each is a process of its own.

    with S3Server(folder) as server: ...     # server.endpoint, server.environment

They have the bucket ``warehouse``. A PUT with ``If-None-Match: *`` is atomic, and so is the end of an upload in parts.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import s3_proxy_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child, free_ports, get

BUCKET: Final = "warehouse"
KEYS: Final = ("logferry", "logferry-secret")
_LOGBACK: Final = """<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %level %logger %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
_READY_S: Final = 60.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.05


class S3Server:
    """moto's, which keeps objects in memory until its end. Any keys are valid. ``endpoint``: its URL."""

    def __init__(self, folder: Path, port: int | None = None, keys: tuple[str, str] = KEYS) -> None:
        self.port = port or free_ports(1)[0]
        self.keys = keys
        self._folder = folder
        self._child = Child("s3", self._command(), folder / "s3.log")

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "logferry.ops.stack.s3_server", str(self.port)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every command and library finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.keys[0],
            "AWS_SECRET_ACCESS_KEY": self.keys[1],
        }

    def __enter__(self) -> Self:
        """Returns when it answers. Raises Unavailable."""
        self._child.start()
        deadline = time.monotonic() + _READY_S
        while not self._is_ready():
            if not self._child.running or time.monotonic() > deadline:
                self._child.stop(_STOP_S)
                raise Unavailable(f"the S3 server does not start:\n{self._child.log_tail()}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop(_STOP_S)

    def _is_ready(self) -> bool:
        return get(self.endpoint, f"/{BUCKET}", "PUT")[0] == 200


class S3Proxy(S3Server):
    """S3Proxy, which keeps objects as files in the folder and checks signatures. It can be killed and started again."""

    def _command(self) -> list[str]:
        objects, properties = self._folder / "objects", self._folder / "s3proxy.properties"
        (objects / BUCKET).mkdir(parents=True, exist_ok=True)
        settings = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": self.keys[0],
            "s3proxy.credential": self.keys[1],
            "s3proxy.endpoint": self.endpoint,
            "jclouds.provider": "filesystem",
            "jclouds.filesystem.basedir": str(objects),
        }
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
        (self._folder / "logback.xml").write_text(_LOGBACK, encoding="utf-8")
        jars = os.pathsep.join([str(self._folder), *map(str, s3_proxy_jars())])
        java = [str(find_java().executable), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", jars]
        return [*java, "org.gaul.s3proxy.Main", "--properties", str(properties)]

    def kill(self) -> None:
        """SIGKILL. `__enter__` starts it again, with the objects that it had."""
        self._child.send(signal.SIGKILL)

    def _is_ready(self) -> bool:
        return get(self.endpoint, "/")[0] == 403


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
        from moto.iam.access_control import IAMRequestBase
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import run_simple
    except ImportError as error:
        raise Unavailable(f"{error}: pip install 'logferry[s3-server]'") from None
    # Where a test has policies enforced: it miscalculates the signature of an encoded query.
    IAMRequestBase.check_signature = lambda _: None  # type: ignore[method-assign, assignment]
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = _corrected(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", parser.parse_args().port, app, threaded=True)


if __name__ == "__main__":
    main()
