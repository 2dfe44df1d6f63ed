"""The project's Markdown, taken apart: links, code, commands. For the tests that hold it true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """Code between fences."""

    language: str
    text: str


@dataclass(frozen=True)
class Document:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """Without the code between fences."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[Block]:
        found = (Block(*match.groups()) for match in _FENCE.finditer(self.text))
        return [block for block in found if block.language == language]

    @property
    def inline_code(self) -> list[str]:
        return _INLINE.findall(self.prose)

    @property
    def links(self) -> list[str]:
        return [link for link in _LINK.findall(self.prose) if "://" not in link]

    @property
    def anchors(self) -> set[str]:
        """As GitHub makes them of headings."""
        kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(self.text))
        return {heading.replace(" ", "-") for heading in kept}

    def commands(self, program: str) -> list[list[str]]:
        """The words after `program`, of every line of a shell block that calls it: also of one
        that is a job's entrypoint."""
        found = []
        for block in self.blocks("sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                found += [
                    words[start + 1 :]
                    for start, word in enumerate(words)
                    if word == program and (start == 0 or words[start - 1] == "--")
                ]
        return found


def sections(document: Document) -> Iterator[tuple[str, str]]:
    """Each third-level heading, with what is below it until the next heading."""
    parts = re.split(r"^#{2,3} (.+)$", document.text, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


DOCUMENTS = [Document(path) for path in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))]
