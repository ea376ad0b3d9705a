"""What Dynamo says of a graph break, in plain words."""

from __future__ import annotations

import re

NO_REASON = "step_unsupported"
"""What Dynamo says of a graph that ends at a line where it can go on in no other way."""
_PLAIN: tuple[tuple[str, str], ...] = (
    (r"generic_jump|Data-dependent branching", "if or while asks for the value of a tensor"),
    (r"Unsupported Tensor\.item\(\)", "item() takes a number out of a tensor"),
    (r"Call to `torch\._dynamo\.graph_break\(\)`", "torch._dynamo.graph_break() is called"),
    (
        r"Skip calling `torch\.compiler\.disable\(\)`d function",
        "the function is marked with torch.compiler.disable",
    ),
    (r"graph break in loop|for/while loop", "a break inside a for or while loop"),
    (NO_REASON, "Dynamo cannot go on at this line"),
    (r"Dynamo recompile limit exceeded", "compiled as often as torch._dynamo.config allows"),
)
_ARGUMENTS = re.compile(r" with argument types .*$")
_GUARD = re.compile(r"^\s*(?:\d+/\d+:\s*)?(.*?)\s*(?:\s#.*|\(HINT.*)?$")
_EXPLANATION = re.compile(r"^\s*Explanation:\s*(.*?)\s*$", re.MULTILINE)
_HINT = re.compile(r"^\s*Hint:\s*(.*?)\s*$", re.MULTILINE)
_MORE = "\n*** While handling this graph break"
_OWN_HINTS = ("Please report an issue", "It may be possible to write")
_LONGEST = 200


def plain_reason(text: str) -> str:
    """One sentence on why a graph ends, from the message of Dynamo."""
    first = text.partition(_MORE)[0]
    headline = first.strip().partition("\n")[0].rstrip(".:")
    for pattern, words in _PLAIN:
        if re.search(pattern, headline):
            return words
    explained = _EXPLANATION.search(first)
    sentence = (explained.group(1) if explained else "").partition(". ")[0].rstrip(".")
    sentence = _ARGUMENTS.sub("", sentence)
    shown = sentence or headline or "no reason is given"
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def hints_of(text: str) -> tuple[str, ...]:
    """What the message advises, each once; without the advice to report it."""
    hints = _HINT.findall(text.partition(_MORE)[0])
    return tuple(dict.fromkeys(hint for hint in hints if not hint.startswith(_OWN_HINTS)))


def guard_words(text: str) -> str:
    """What a guard of compiled code hints to differ, from the message of Dynamo."""
    first = text.strip().partition("\n")[0]
    matched = _GUARD.match(first)
    return matched.group(1) if matched else first
