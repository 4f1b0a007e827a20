"""A planted change as data: edits by anchors, the tests that show it complete, and how many files it may touch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GENERATED = (
    *("proto/rollout_buffer/v1/*_pb2*", "docs/metrics.md", "docs/protocol_reference.md"),
    *("docs/concepts.md", "docs/policies.md", "docs/protocol.md"),
)
"""Files that `make proto` and `make metrics-reference` write, or write tables of."""


class DoesNotApply(Exception):
    """An edit does not find its place in the tree; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit of one file: `put` after, before or instead of the text `at`, which the file has once."""

    path: str
    put: str
    at: str = ""
    """Anchor; empty: the file is new."""
    where: Literal["after", "before", "instead"] = "after"

    def apply(self, root: Path) -> None:
        """Change the file under `root`. Raises DoesNotApply."""
        file = root / self.path
        if not self.at:
            if file.exists():
                raise DoesNotApply(f"it makes {self.path}, which the tree has already")
            file.write_text(self.put, "utf-8")
            return
        if not file.exists():
            raise DoesNotApply(f"it changes {self.path}, which the tree does not have")
        text = file.read_text("utf-8")
        if text.count(self.at) != 1:
            raise DoesNotApply(
                f"it looks for this in {self.path}, and finds it {text.count(self.at)} times:\n{self.at}"
            )
        put = {"after": self.at + self.put, "before": self.put + self.at, "instead": self.put}[self.where]
        file.write_text(text.replace(self.at, put), "utf-8")


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `name` is that of its module here, and of its check in checks/."""

    name: str
    title: str
    most_files: int
    """Most code files that it may touch by hand."""
    edits: Sequence[Edit]
    tests: Sequence[str]
    """Tests of the project that hold it, beside its own check: what pytest is called with."""
    not_in: str = ""
    """Folder in which it may touch nothing."""

    @property
    def files(self) -> list[str]:
        """Files that are touched by hand."""
        return list(dict.fromkeys(edit.path for edit in self.edits))

    @property
    def code(self) -> list[str]:
        """Files that are neither docs nor tests."""
        return [file for file in self.files if area(file) == "code"]

    def apply(self, root: Path) -> None:
        """Change the tree under `root`. Raises DoesNotApply."""
        for edit in self.edits:
            try:
                edit.apply(root)
            except DoesNotApply as error:
                raise DoesNotApply(
                    f"the planted change '{self.title}' does not apply: {error}\n"
                    f"Write the edit in tests/planted/{self.name}.py anew, as the change is to be made in the code of "
                    f"today; with at most {self.most_files} code files. Where that takes more, derive what is repeated."
                ) from None

    def excess(self) -> str:
        """Tell what is wrong with the number of its files; empty: nothing."""
        if len(self.code) > self.most_files:
            return f"{self.title}: {len(self.code)} code files, at most {self.most_files}: {', '.join(self.code)}"
        inside = [file for file in self.code if self.not_in and file.startswith(self.not_in)]
        return f"{self.title}: touches {', '.join(inside)}; nothing in {self.not_in} may need it" if inside else ""


def area(path: str) -> Literal["code", "docs", "tests"]:
    """Area of a file of the tree."""
    folder = path.partition("/")[0]
    return "tests" if folder == "tests" else "docs" if folder in {"docs", "CHANGELOG.md", "README.md"} else "code"
