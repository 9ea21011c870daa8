"""`lowp view`: the report of a study that is still running, served on this machine alone.

Two addresses: `/` is the page, `/state` tells a stamp that changes whenever a run writes something. The page asks for the stamp
every few seconds, and loads itself again when it is another. Files that did not change are not read again.

The server listens on 127.0.0.1. It answers only where the browser was told that address or `localhost`: a page from elsewhere
could otherwise give its own name this address and read the report (DNS rebinding).
"""

import hashlib
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lowp.lab.report.document import report_document
from lowp.lab.report.page import page_of
from lowp.lab.results import paths_under, readable_results
from lowp.lab.study_directory import PLAN
from lowp.training.rundir import LOCK, STATUS
from lowp.training.runs import METRICS, Run, is_run

HOST = "127.0.0.1"


class LiveReport:
    """The page of what a folder holds now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[Path, tuple[str, Run]] = {}
        self._page: tuple[str, str] = ("", "")
        self._lock = threading.Lock()
        paths_under(folder)  # is there anything?

    def stamp(self) -> str:
        """Of all files that a report is made of: names, sizes and times."""
        told = hashlib.sha256()
        for path in paths_under(self._folder):
            told.update(_stamp_of(path / PLAN).encode())
            for run in (path, *sorted((path / "runs").glob("*"))):
                if is_run(run):
                    told.update(f"{run}{_stamp_of_run(run)}".encode())
        return told.hexdigest()

    def page(self) -> str:
        with self._lock:
            stamp = self.stamp()
            if self._page[0] != stamp:
                results, unreadable = readable_results(paths_under(self._folder), self._read)
                document = report_document(results, f"lowp view {self._folder}", stamp=stamp)
                for line in unreadable:
                    document["studies"][0]["damage"].append(line)
                self._page = stamp, page_of(document)
            return self._page[1]

    def _read(self, path: Path) -> Run:
        stamp = _stamp_of_run(path)
        known = self._runs.get(path)
        if known is None or known[0] != stamp or known[1].state == "running":
            known = self._runs[path] = stamp, Run.read(path)
        return known[1]


def _stamp_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_size}:{found.st_mtime_ns}"


def _stamp_of_run(path: Path) -> str:
    return " ".join(_stamp_of(path / name) for name in (METRICS, STATUS, LOCK))


class _Handler(BaseHTTPRequestHandler):
    @property
    def _report(self) -> LiveReport:
        assert isinstance(self.server, LiveServer)
        return self.server.report

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to 127.0.0.1 and localhost alone")
            return
        try:
            if self.path == "/":
                self._answer(HTTPStatus.OK, "text/html", self._report.page())
            elif self.path == "/state":
                self._answer(HTTPStatus.OK, "application/json", json.dumps({"stamp": self._report.stamp()}))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /state")
        except (OSError, ValueError) as error:  # the folder is gone, or is being made anew
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's news."""


class LiveServer(ThreadingHTTPServer):
    """`with LiveServer(folder, 0) as server: server.serve_forever()`; port 0 is any free one."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.report = LiveReport(folder)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"
