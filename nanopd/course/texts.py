"""Where the course's texts are in a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanopd.errors import CourseError


@dataclass(frozen=True)
class Root:
    """The folder of a checkout, and the places in it that hold texts."""

    path: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Root:
        """The checkout around ``start`` (default: the working directory), else the one this package stands in.

        Raises:
            CourseError: neither is a checkout (nanopd was installed from a wheel).
        """
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents, Path(__file__).resolve().parents[2]):
            if (folder / "notebooks").is_dir() and (folder / "nanopd").is_dir():
                return cls(folder)
        raise CourseError(f"{start} is not inside a checkout of nanopd; the texts of the course are only there")

    @property
    def results(self) -> Path:
        return self.path / "docs" / "results"

    @property
    def locale(self) -> Path:
        return self.path / "locales" / "zh"

    def notebooks(self) -> list[Path]:
        """The English notebooks, in course order."""
        return sorted((self.path / "notebooks").glob("[0-9][0-9]_*.ipynb"))

    def docs(self) -> list[Path]:
        """The English chapters and the English README: every file that must have a Chinese twin."""
        return [self.path / "README.md", *sorted((self.path / "docs" / "en").rglob("*.md"))]

    def chinese(self, path: Path) -> Path:
        """The Chinese twin of an English notebook, chapter or README, and of the folder of chapters."""
        relative = path.relative_to(self.path)
        folder, name = relative.parent.as_posix(), relative.name
        if folder == "notebooks" and name.endswith(".ipynb"):
            return self.path / "notebooks" / "zh" / name
        if relative.parts[:2] == ("docs", "en") and (name.endswith(".md") or len(relative.parts) == 2):
            return self.path.joinpath("docs", "zh", *relative.parts[2:])
        if (folder, name) == (".", "README.md"):
            return self.path / "README.zh.md"
        raise CourseError(f"{relative} has no Chinese edition")

    def po(self, notebook: Path) -> Path:
        return self.locale / f"{notebook.stem}.po"

    def show(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()


def read_text(path: Path) -> str:
    """A text of the course. Raises CourseError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"cannot read {path.name}: {error}") from None


def read_notebook(path: Path) -> Any:
    """A notebook as nbformat's objects. Raises CourseError if the file is none."""
    import nbformat

    text = read_text(path)
    try:
        return nbformat.reads(text, as_version=4)
    except Exception as error:  # of a JSON text that is no notebook: whatever its first surprise leads to
        raise CourseError(f"{path.name} is not a notebook: {type(error).__name__}: {error}") from None


def markdown_files(root: Root) -> list[Path]:
    """Every Markdown file of the project, both languages."""
    return sorted(
        [
            *root.path.glob("*.md"),
            *(root.path / "docs" / "en").rglob("*.md"),
            *(root.path / "docs" / "zh").rglob("*.md"),
        ]
    )


def write_if_changed(path: Path, text: str) -> bool:
    """Writes only a changed text, so that nothing downstream is rebuilt for no reason. Returns whether it wrote."""
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True
