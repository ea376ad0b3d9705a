"""Posts a comment to a pull or merge request, or renews the one that it posted before.

    python -m rooftrace.reporting.gates.posting comment.md

Knows where it runs by what GitHub Actions and GitLab CI set in the environment.  Where it may not
comment, as for a fork on GitHub, the text goes into the summary of the job; elsewhere to stdout.
Standard library only.  The token goes into one header, to the server of the job, and nowhere else.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PAGE = 100
"""Comments of a page; both servers give no more."""
_PAGES = 50
_SECONDS = 30.0


class PostError(RuntimeError):
    """A comment that could not be posted: says what the server answered."""


@dataclass(frozen=True, repr=False)
class Thread:
    """The comments of one request on one server.  Not shown: it holds the token."""

    comments: str  # URL of the list
    comment: str  # URL of one of them, {id} in it
    headers: Mapping[str, str]
    method: str  # of an update
    event: str  # what it is of, for messages: "pull request 12"


def thread_of(environ: Mapping[str, str]) -> Thread | None:
    """The thread of the request that this job is about; None where it is about none."""
    if "GITHUB_REPOSITORY" in environ:
        return _on_github(environ)
    return _on_gitlab(environ) if "CI_MERGE_REQUEST_IID" in environ else None


def _on_github(environ: Mapping[str, str]) -> Thread | None:
    number = _number(environ.get("GITHUB_EVENT_PATH", ""))
    token = environ.get("GITHUB_TOKEN", "")
    if number is None or not token:
        return None
    api = environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
    issues = f"{api}/repos/{urllib.parse.quote(environ['GITHUB_REPOSITORY'])}/issues"
    return Thread(
        comments=f"{issues}/{number}/comments",
        comment=f"{issues}/comments/{{id}}",
        headers={
            "Authorization": f"Bearer {token}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
        },
        method="PATCH",
        event=f"pull request {number}",
    )


def _number(event: str) -> int | None:
    """The number of the pull request in the file of an event."""
    try:
        data = json.loads(Path(event).read_bytes())
        return int(data["pull_request"]["number"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _on_gitlab(environ: Mapping[str, str]) -> Thread | None:
    token = environ.get("GITLAB_TOKEN", "")
    api, project = environ.get("CI_API_V4_URL", ""), environ.get("CI_PROJECT_ID", "")
    if not (token and api and project):
        return None
    number = urllib.parse.quote(environ["CI_MERGE_REQUEST_IID"], safe="")
    project = urllib.parse.quote(project, safe="")
    notes = f"{api.rstrip('/')}/projects/{project}/merge_requests/{number}/notes"
    return Thread(
        comments=notes,
        comment=f"{notes}/{{id}}",
        headers={"PRIVATE-TOKEN": token},
        method="PUT",
        event=f"merge request {number}",
    )


def post(thread: Thread, text: str) -> str:
    """Post a comment, or renew the first one that begins with the same line, its marker.

    Returns what was done.  Raises PostError.
    """
    marker = text.split("\n", 1)[0]
    for page in range(1, _PAGES + 1):
        batch = _ask(thread, "GET", f"{thread.comments}?per_page={_PAGE}&page={page}")
        for old in batch:
            if str(old.get("body") or "").split("\n", 1)[0].strip() == marker:
                url = thread.comment.format(id=int(old["id"]))
                _ask(thread, thread.method, url, {"body": text})
                return f"renewed the comment on {thread.event}"
        if len(batch) < _PAGE:
            break
    _ask(thread, "POST", thread.comments, {"body": text})
    return f"commented on {thread.event}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _ask(thread: Thread, method: str, url: str, data: Mapping[str, str] | None = None) -> Any:
    body = None if data is None else json.dumps(data).encode()
    headers = {**thread.headers, "Content-Type": "application/json", "User-Agent": "rooftrace"}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise PostError(f"{method} of a comment on {thread.event}: HTTP {error.code}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise PostError(f"{method} of a comment on {thread.event}: {reason}") from None


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Post the text of a file; where that is not possible, say so and keep the text visible."""
    if len(arguments) != 1:
        print("expected one file: the comment", file=sys.stderr)
        return 2
    try:
        text = Path(arguments[0]).read_text(encoding="utf-8")
    except OSError as error:
        print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
        return 2
    reason = "this job is not about a pull or merge request, or it has no token"
    thread = thread_of(environ)
    if thread is not None:
        try:
            print(post(thread, text))
            return 0
        except PostError as error:
            reason = f"{error}; a pull request of a fork has a token that may only read"
    print(f"no comment: {reason}")
    _show(text, environ.get("GITHUB_STEP_SUMMARY", ""))
    return 0


def _show(text: str, summary: str) -> None:
    """The text in the summary of the job, else on stdout."""
    if not summary:
        print(text)
        return
    with open(summary, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")
    print("the text is in the summary of this job")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
