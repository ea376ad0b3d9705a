"""Posts a comment to a pull or merge request, or renews the one that it posted before.

    python -I -S posting.py comment.md

GitHub Actions and GitLab CI are told by their environment variables.  Where it may not comment, as
for a fork on GitHub, the text goes into the summary of the job; elsewhere to stdout.
The token goes into one header, to the server of the job, and nowhere else.

One file of the standard library, since it runs where the code of a request has run before: it
imports nothing that such code could have written, and takes the comment for a stranger's.
"""

from __future__ import annotations

import json
import os
import stat
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
_MOST = 1 << 18
"""Bytes of a comment: GitHub takes 65,536 letters."""
_MARKER = "<!-- rooftrace check -->"
"""The first line of a comment.  With another one it could renew a comment of someone else."""


class PostError(RuntimeError):
    """A comment that could not be read or posted, with the answer of the server."""


@dataclass(frozen=True, repr=False)
class Thread:
    """The comments of one request on one server.  Not shown: it holds the token."""

    comments: str  # URL of the list
    comment: str  # URL of one of them, {id} in it
    headers: Mapping[str, str]
    method: str  # of an update
    event: str  # for messages: "pull request 12"

    def ask(self, method: str, url: str, data: Mapping[str, str] | None = None) -> Any:
        """The answer of the server.  Raises PostError."""
        return _ask(f"a comment on {self.event}", self.headers, method, url, data)


def thread_of(environ: Mapping[str, str]) -> Thread | None:
    """The thread of the pull or merge request of this job; None where it has none."""
    if "GITHUB_REPOSITORY" in environ:
        return _on_github(environ)
    return _on_gitlab(environ) if "CI_MERGE_REQUEST_IID" in environ else None


def _on_github(environ: Mapping[str, str]) -> Thread | None:
    token = environ.get("GITHUB_TOKEN", "")
    if not token:
        return None
    api = environ.get("GITHUB_API_URL", "https://api.github.com").rstrip("/")
    repository = f"{api}/repos/{urllib.parse.quote(environ['GITHUB_REPOSITORY'])}"
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    number = _number(environ, repository, headers)
    if number is None:
        return None
    return Thread(
        comments=f"{repository}/issues/{number}/comments",
        comment=f"{repository}/issues/comments/{{id}}",
        headers=headers,
        method="PATCH",
        event=f"pull request {number}",
    )


def _number(environ: Mapping[str, str], repository: str, headers: Mapping[str, str]) -> int | None:
    """The number of the pull request: as the Action says it, or of the file of the event.

    For a workflow that another one set off it is the one whose head that other one ran.
    """
    head, hash_ = environ.get("ROOFTRACE_HEAD", ""), environ.get("ROOFTRACE_SHA", "")
    try:
        if hash_:
            query = urllib.parse.urlencode({"state": "open", "head": head, "per_page": _PAGE})
            pulls = _ask("pull requests", headers, "GET", f"{repository}/pulls?{query}")
            return next((int(p["number"]) for p in pulls if p["head"]["sha"] == hash_), None)
        if "ROOFTRACE_PULL" in environ:
            return int(environ["ROOFTRACE_PULL"])
        data = json.loads(Path(environ.get("GITHUB_EVENT_PATH", "")).read_bytes())
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

    Returns a sentence on it.  Raises PostError.
    """
    marker = text.split("\n", 1)[0]
    for page in range(1, _PAGES + 1):
        batch = thread.ask("GET", f"{thread.comments}?per_page={_PAGE}&page={page}")
        for old in batch:
            if str(old.get("body") or "").split("\n", 1)[0].strip() == marker:
                url = thread.comment.format(id=int(old["id"]))
                thread.ask(thread.method, url, {"body": text})
                return f"renewed the comment on {thread.event}"
        if len(batch) < _PAGE:
            break
    thread.ask("POST", thread.comments, {"body": text})
    return f"commented on {thread.event}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _ask(
    subject: str,
    headers: Mapping[str, str],
    method: str,
    url: str,
    data: Mapping[str, str] | None = None,
) -> Any:
    body = None if data is None else json.dumps(data).encode()
    headers = {**headers, "Content-Type": "application/json", "User-Agent": "rooftrace"}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise PostError(f"{method} of {subject}: HTTP {error.code}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise PostError(f"{method} of {subject}: {reason}") from None


def _text_of(path: str) -> str:
    """The comment in a file.  Raises PostError for a link, a file of another user, another text."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    mine = (os.geteuid(), 0) if hasattr(os, "geteuid") else (0,)
    try:
        with open(os.open(path, flags), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_uid not in mine:
                raise PostError(f"{path!r}: expected a plain file of this user, and no link")
            content = file.read(_MOST + 1)
    except OSError as error:
        raise PostError(f"{path!r}: expected a plain file: {error.strerror}") from None
    if len(content) > _MOST:
        raise PostError(f"{path!r}: expected a comment of at most {_MOST:,} bytes")
    text = content.decode("utf-8", "replace")
    if text.partition("\n")[0] != _MARKER:
        raise PostError(f"{path!r}: expected a comment of `rooftrace check --format github`")
    return text


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Post the text of a file; where that is not possible, say so and keep the text visible."""
    if len(arguments) != 1:
        print("expected one file: the comment", file=sys.stderr)
        return 2
    try:
        text = _text_of(arguments[0])
    except PostError as error:
        print(error, file=sys.stderr)
        return 2
    reason = "this job is not about a pull or merge request, or it has no token"
    try:
        thread = thread_of(environ)
        if thread is not None:
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
        print("\n".join(f"| {line}" for line in text.split("\n")))  # no line is a command of CI
        return
    with open(summary, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")
    print("the text is in the summary of this job")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
