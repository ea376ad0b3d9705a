#!/usr/bin/env bash
# What the GitHub Action checks with; it runs anywhere: ROOFTRACE_PYTHON=python bash .github/actions/check/action.sh
# Exit code: that of `rooftrace check`.  The comment is posted by another step, since the code of
# the models runs here: what is in the environment of this script, that code can read.
set -uo pipefail
unset GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN

comment="${RUNNER_TEMP:-$(mktemp -d)}/rooftrace-comment.md"
rm -f "$comment"

options=(--format github --out "$comment")
[ -n "${ROOFTRACE_LOCK:-}" ] && options+=(--lock "$ROOFTRACE_LOCK")
[ "${ROOFTRACE_STRICT:-false}" = true ] && options+=(--strict)
"${ROOFTRACE_PYTHON:-python}" -m rooftrace check "${options[@]}"
verdict=$?

if [ ! -f "$comment" ]; then # a request that makes no sense: an older comment must not stay green
    [ "$verdict" -eq 0 ] && verdict=2
    rm -f "$comment"
    printf '%s\n### Costs\n\n**❌ rooftrace check could not run (exit code %s): the log says why.**\n' \
        '<!-- rooftrace check -->' "$verdict" >"$comment"
fi
# What the models' code left for the next steps, as BASH_ENV or a folder on PATH.
for file in "${GITHUB_ENV:-}" "${GITHUB_PATH:-}"; do
    [ -n "$file" ] && : >"$file"
done
[ -n "${GITHUB_OUTPUT:-}" ] && printf 'comment-file=%s\n' "$comment" >"$GITHUB_OUTPUT"
[ "${ROOFTRACE_COMMENT:-true}" = true ] || cat "$comment"
[ "$verdict" -ne 0 ] && echo "rooftrace check: exit code $verdict"
exit "$verdict"
