"""The comment on a pull request, and the script that posts it to a server of our own."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from markdown_it import MarkdownIt

from rooftrace.reporting.gates import posting, reports
from tests.reporting.conftest import Run
from tests.reporting.gate_support import CASTS, MODELS, SETTINGS, repository

TOKEN = "s3cret-t0ken"


class Server(HTTPServer):
    """Comments of one thread as GitHub and GitLab keep them; `status` is what writing gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.comments: list[dict[str, Any]] = []
        self.status = 200
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _do(self) -> None:
        state = self.server
        headers = {name.lower(): text for name, text in self.headers.items()}
        state.requests.append((self.command, self.path, headers))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        answer: Any = {}
        status = 200
        if self.command == "GET":
            query = parse_qs(urlsplit(self.path).query)
            size, page = int(query["per_page"][0]), int(query["page"][0])
            answer = state.comments[(page - 1) * size : page * size]
        elif state.status != 200:
            status = state.status
        elif self.command == "POST":
            state.comments.append({"id": 100 + len(state.comments), **body})
        else:
            number = int(self.path.rsplit("/", 1)[1])
            next(c for c in state.comments if c["id"] == number).update(body)
        self.send_response(status)
        if status in (301, 302, 307):
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST = do_PATCH = do_PUT = _do

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as state:
        thread = threading.Thread(target=state.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        state.shutdown()
        thread.join()


@pytest.fixture
def job(server: Server, tmp_path: Path) -> dict[str, str]:
    """The environment of a job of GitHub on pull request 12."""
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 12}}))
    return {
        "GITHUB_REPOSITORY": "owner/models",
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_API_URL": server.url,
        "GITHUB_TOKEN": TOKEN,
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }


@pytest.fixture
def comment(tmp_path: Path) -> Path:
    path = tmp_path / "comment.md"
    path.write_text(f"{reports.MARKER}\n### Costs\nfirst\n")
    return path


def test_a_comment_is_posted_once_and_then_renewed(
    server: Server, job: dict[str, str], comment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.comments = [{"id": n, "body": f"talk {n}"} for n in range(150)]  # more than one page
    assert posting.main([str(comment)], job) == 0
    assert "commented on pull request 12" in capsys.readouterr().out
    comment.write_text(comment.read_text().replace("first", "second"))
    assert posting.main([str(comment)], job) == 0
    out, err = capsys.readouterr()
    assert "renewed the comment on pull request 12" in out
    ours = [c for c in server.comments if c["body"].startswith(reports.MARKER)]
    assert len(server.comments) == 151 and len(ours) == 1 and "second" in ours[0]["body"]
    methods = [(method, urlsplit(path).path) for method, path, _ in server.requests]
    assert methods[2] == ("POST", "/repos/owner/models/issues/12/comments")
    assert methods[-1] == ("PATCH", "/repos/owner/models/issues/comments/250")
    assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, _, headers in server.requests)
    assert TOKEN not in out + err


def test_gitlab_gets_a_note(server: Server, comment: Path) -> None:
    job = {
        "CI_API_V4_URL": f"{server.url}/api/v4",
        "CI_PROJECT_ID": "5",
        "CI_MERGE_REQUEST_IID": "7",
        "GITLAB_TOKEN": TOKEN,
    }
    assert posting.main([str(comment)], job) == posting.main([str(comment)], job) == 0
    notes = "/api/v4/projects/5/merge_requests/7/notes"
    writes = [(method, path) for method, path, _ in server.requests if method != "GET"]
    assert writes == [("POST", notes), ("PUT", f"{notes}/100")]
    assert all(headers["private-token"] == TOKEN for _, _, headers in server.requests)


@pytest.mark.parametrize("status", [403, 404, 302, 500])
def test_where_it_may_not_comment_the_summary_has_the_text(
    server: Server,
    job: dict[str, str],
    comment: Path,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.status = status
    assert posting.main([str(comment)], job) == 0
    out, err = capsys.readouterr()
    assert f"HTTP {status}" in out and "fork" in out and "summary" in out
    assert TOKEN not in out + err
    assert "### Costs" in Path(job["GITHUB_STEP_SUMMARY"]).read_text()
    assert not server.comments


@pytest.mark.parametrize("gone", ["GITHUB_TOKEN", "GITHUB_EVENT_PATH", "GITHUB_REPOSITORY"])
def test_without_a_pull_request_or_a_token_it_says_so(
    job: dict[str, str], comment: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {name: value for name, value in job.items() if name != gone}
    assert posting.main([str(comment)], job) == 0
    assert "no comment: this job is not about" in capsys.readouterr().out
    job.pop("GITHUB_STEP_SUMMARY")
    posting.main([str(comment)], job)
    assert "### Costs" in capsys.readouterr().out


def test_a_server_that_is_not_there(
    job: dict[str, str], comment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job["GITHUB_API_URL"] = "http://127.0.0.1:9"
    assert posting.main([str(comment)], job) == 0
    assert "no comment: GET of a comment on pull request 12: " in capsys.readouterr().out


def test_the_token_is_not_shown_by_any_error(job: dict[str, str]) -> None:
    thread = posting.thread_of(job)
    assert thread is not None and TOKEN not in repr(thread)


# -- the text --------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """The comment on a change that passes budgets."""
    repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("lock").code == 0
    (tmp_path / "models.py").write_text(MODELS.replace("self.up(self.norm(x))", CASTS))
    return run("check", "--format", "github").out


def test_the_comment_has_a_table_the_cause_and_folded_details(page: str) -> None:
    assert page.startswith(f"{reports.MARKER}\n")
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(page)
    assert html.count("<table>") == 2  # budgets that are passed, all steps
    assert html.count("<details>") == html.count("</details>") == 2
    assert "<code>layers.*</code>" in html and "+3 _to_copy fp32" in html
    assert "❌" in html and "█" in html
    (chart,) = re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL)
    bars = json.loads(re.findall(r"bar (\[.*\])", chart)[0])
    names = json.loads(re.findall(r"x-axis (\[.*\])", chart)[0])
    assert len(bars) == len(names) == page.count("\n1. ") + len(bars) - 1


def test_names_from_a_repository_do_not_act_in_a_comment(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = '"<img src=x>|[a](http://b) </details> ```"'
    repository(tmp_path, SETTINGS.replace("net =", f"{hostile} ="))
    monkeypatch.chdir(tmp_path)
    assert run("lock").code == 0
    (tmp_path / "models.py").write_text(MODELS.replace("self.up(self.norm(x))", CASTS))
    page = run("check", "--format", "github").out
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(page)
    assert "<img" not in html and "<a " not in html
    assert html.count("<details>") == html.count("</details>") == 2


def test_a_long_comment_leaves_out_what_is_folded_away(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    assert reports.MOST < 65_536  # what GitHub takes
    monkeypatch.setattr(reports, "MOST", len(page) - 1)
    short = run("check", "--format", "github").out
    assert len(short) <= reports.MOST
    assert short.count("<details>") == short.count("</details>") == page.count("<details>") - 1
    assert short.partition("<details>")[0] == page.partition("<details>")[0]
