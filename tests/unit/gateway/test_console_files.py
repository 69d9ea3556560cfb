"""The console's files: served as they are, with headers that let them do what they need and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from logferry.gateway.console.pages import ConsoleApi
from logferry.gateway.errors import Problem
from logferry.gateway.http.router import Call

FILES = Path(__file__).parents[3] / "gateway" / "console" / "files"
SCRIPTS = sorted(FILES.glob("*.js"))
# What makes markup or code of a text, what outlives the page, and what leaves this gateway.
FORBIDDEN = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"),
    *("localStorage", "sessionStorage", "document.cookie", "indexedDB", "http://", "https://", "style="),
)
# A name, not an address.
NAMESPACE = "http://www.w3.org/2000/svg"


async def get(name: str, **headers: str) -> web.Response:
    call = Call(cast(Any, SimpleNamespace(headers=headers)), ["", "console", name], {})
    return cast(web.Response, await ConsoleApi().get(call))


async def test_the_page_and_each_of_its_files_are_served_with_a_strict_policy() -> None:
    for path in FILES.iterdir():
        answer = await get(path.name)
        assert answer.body == path.read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    page = await get("")
    assert (page.content_type, page.body) == ("text/html", (FILES / "index.html").read_bytes())


async def test_what_a_browser_has_already_is_not_sent_again() -> None:
    tag = (await get("app.js")).headers["ETag"]
    again = await get("app.js", **{"If-None-Match": tag})
    assert (again.status, again.body) == (304, None)


@pytest.mark.parametrize("name", ["none.js", "..%2fpages.py", "%2e%2e%2fpages.py", "__init__.py"])
async def test_nothing_else_is_served(name: str) -> None:
    with pytest.raises(Problem) as problem:
        await get(name)
    assert problem.value.kind == "not-found"


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_a_file_makes_no_markup_of_texts_keeps_nothing_and_leads_nowhere_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert [word for word in FORBIDDEN if word in text] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_module_is_small_and_imports_what_there_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    for names, other in re.findall(r"import (.*?) from \"\./([\w-]+\.js)\"", text, re.DOTALL):
        exported = (FILES / other).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names) if names.startswith("{") else ():
            assert re.search(rf"export (?:async )?(?:function|const|class) {name}\b", exported), (other, name)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run a module of the console")
def test_a_lane_beyond_their_number_is_a_row_while_a_worker_holds_it() -> None:
    """So it is for a moment after the number became smaller."""
    lanes = [{"lane": number, "state": "serving"} for number in (0, 3)]
    program = f"""
        globalThis.document = {{ baseURI: "http://127.0.0.1/console/" }};
        const {{ laneRows }} = await import({json.dumps((FILES / "view-lanes.js").as_uri())});
        const rows = laneRows([["w", {{ lanes_total: 2, lanes: {json.dumps(lanes)} }}]]);
        console.log(JSON.stringify(rows.map((row) => [row.lane, row.url])));
    """
    # Without a package beside them, node takes files of this name for modules only when it is told so.
    command = ["node", "--experimental-default-type=module", "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, "w"], [1, None], [3, "w"]]
