#!/usr/bin/env bash
# What the GitHub Action runs; it runs anywhere: ROOFTRACE_PYTHON=python bash action.sh
# Exit code: that of `rooftrace check`; a comment that cannot be posted fails nothing.
set -uo pipefail

folder="${RUNNER_TEMP:-$(mktemp -d)}"
comment="$folder/rooftrace-comment.md"
python="${ROOFTRACE_PYTHON:-python}"
rm -f "$comment"

options=(--format github --out "$comment")
[ -n "${ROOFTRACE_LOCK:-}" ] && options+=(--lock "$ROOFTRACE_LOCK")
[ "${ROOFTRACE_STRICT:-false}" = true ] && options+=(--strict)

# The code of the models runs here: it gets no token.
env -u ROOFTRACE_TOKEN -u GITHUB_TOKEN -u GITLAB_TOKEN "$python" -m rooftrace check "${options[@]}"
verdict=$?

if [ ! -f "$comment" ]; then # a request that makes no sense: an older comment must not stay green
    printf '%s\n### Costs\n\n**❌ rooftrace check could not run (exit code %s): the log says why.**\n' \
        '<!-- rooftrace check -->' "$verdict" >"$comment"
fi
[ -n "${GITHUB_OUTPUT:-}" ] && printf 'comment-file=%s\n' "$comment" >>"$GITHUB_OUTPUT"
if [ "${ROOFTRACE_COMMENT:-true}" = true ]; then
    [ -n "${ROOFTRACE_TOKEN:-}" ] && export GITHUB_TOKEN="$ROOFTRACE_TOKEN"
    # From a folder of the runner: what lies in the repository is not imported beside the token.
    (cd "$folder" && "$python" -m rooftrace.reporting.gates.posting "$comment") || true
else
    cat "$comment"
fi
[ "$verdict" -ne 0 ] && echo "rooftrace check: exit code $verdict"
exit "$verdict"
