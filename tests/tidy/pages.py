"""What is executable in the documentation: command lines, configuration blocks, code spans."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("services/*/*.md"),
        *ROOT.glob("shared/*/*.md"),
        *ROOT.glob("deploy/**/*.md"),
    ]
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
OURS = re.compile(r"pointsman(-[a-z-]+)?")
SEPARATORS = {"|", "||", "&&", ";", "&"}
WRAPPERS = {"env", "nice", "sudo", "chrt", "--rr", "1"}


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Fenced blocks of a page, then indented ones (without a language)."""
    fenced = [Block(match[1], match[2]) for match in FENCE.finditer(page)]
    return [*fenced, *(Block("", match[0]) for match in INDENTED.finditer(FENCE.sub("", page)))]


def spans(page: str) -> list[str]:
    """Inline code of a page."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", page))]


def command_lines(text: str) -> Iterator[list[str]]:
    """Words of each command in a shell block: continued lines joined, prompts, comments, variables and wrappers removed.

    Raises ValueError for a quote that is never closed.
    """
    pending = ""
    for raw in text.splitlines():
        line = pending + raw.strip().removeprefix("$ ")
        if line.endswith("\\"):
            pending = line[:-1]
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            pending = line + " "
            continue
        pending = ""
        yield from _commands(words)
    if pending:
        raise ValueError(f"never ends: {pending[:100]}")


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, ";"]:
        ended = word.endswith(";")
        if word not in SEPARATORS:
            command.append(word.removesuffix(";"))
        if ended or word in SEPARATORS:
            while command and (ASSIGNMENT.match(command[0]) or command[0] in WRAPPERS):
                command = command[1:]
            if command:
                yield [Path(command[0]).name if ".venv/" in command[0] else command[0], *command[1:]]
            command = []


def our_commands(page: str) -> Iterator[tuple[list[str], bool]]:
    """Commands of ours in a page, and whether each stands in a shell block (is whole) or in a sentence (may be a part)."""
    for block in blocks(page):
        if block.language in ("sh", "bash"):
            found = command_lines(block.text)
        elif block.language in ("", "console"):
            found = command_lines("\n".join(_lines_of_ours(block.text)))
        else:
            continue
        for words in map(_in_a_container, map(_unredirected, found)):
            if OURS.fullmatch(words[0]) or words[0] in ("make", "python"):
                yield words, True
    for span in spans(page):
        if "*" not in span and re.match(
            r"([A-Z_]+=\S+ )*(\.venv/bin/)?(pointsman[a-z-]*|make|python -m) [\[a-zA-Z-]", span
        ):
            optional = re.sub(r"[\[\]]", "", span)
            yield from ((words, False) for words in command_lines(optional) if words[0] != "...")


def _unredirected(words: list[str]) -> list[str]:
    return list(takewhile(lambda word: word not in ("<", ">"), words))


def _in_a_container(words: list[str]) -> list[str]:
    """What kubectl or Docker Compose runs, if it is a command of ours."""
    if words[0] == "kubectl" or words[:2] == ["docker", "compose"]:
        begin = next((at for at, word in enumerate(words) if word in ("exec", "run")), len(words))
        return next((words[at:] for at in range(begin, len(words)) if OURS.fullmatch(words[at])), words)
    return words


def _lines_of_ours(text: str) -> Iterator[str]:
    """Of a block that also shows output, the lines that run a command of ours, with the lines that continue them."""
    continued = False
    for line in text.splitlines():
        command = line.strip().removeprefix("$ ")
        if continued or OURS.fullmatch(Path(command.partition(" ")[0]).name):
            yield line
            continued = line.endswith("\\")


def examples(help_text: str) -> Iterator[list[str]]:
    """Command lines in the help text of a command; remarks follow after two blanks, continuations are indented more."""
    lines: list[str] = []
    indent = -1
    for raw in help_text.splitlines():
        depth, text = len(raw) - len(raw.lstrip()), re.split(r" {2,}", raw.strip())[0]
        if text.startswith("pointsman"):
            lines.append(text)
            indent = depth
        elif text and 0 <= indent < depth:
            lines[-1] += f" {text}"
        else:
            indent = -1
    for line in lines:
        yield from (words for words in command_lines(line) if OURS.fullmatch(words[0]))
