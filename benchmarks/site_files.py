"""A hook of mkdocs: files of the repository outside docs/ that pages link to become files of the site.

Markdown becomes a page, a folder a page that lists its files, everything else is copied. So every link of a page works
on the site as it does in the repository, and `mkdocs build --strict` refuses one that leads nowhere.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r'(\]\(|<img src=")([^)"#\s:]+)(?=[)"#])')
_FOLDER = "repository"
_SHOWN = (".yaml", ".yml", ".md", ".py", ".sh", ".json", ".jsonl", ".ipynb", ".toml", ".txt")


def on_files(files: Files, *, config: Any) -> Files:  # noqa: ANN401  # mkdocs' own
    """Adds what pages link to, and what that links to."""
    root, docs = _folders(config)
    waiting = [docs / file.src_uri for file in files.documentation_pages()]
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for path in _linked(page, root):
            if path in seen or path.is_relative_to(docs):
                continue
            seen.add(path)
            files.append(_file_of(path, root, config))
            waiting += [path] if path.suffix == ".md" else _listed(path)
            for each in _listed(path) if path.is_dir() else ():
                if each not in seen and each.suffix != ".md":
                    seen.add(each)
                    files.append(_file_of(each, root, config))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:  # noqa: ANN401
    """The page with links to where the site has the files."""
    root, docs = _folders(config)
    uri = page.file.src_uri
    is_outside = uri.startswith(f"{_FOLDER}/")
    source = root / uri.removeprefix(f"{_FOLDER}/") if is_outside else docs / uri
    folder = source.parent

    def moved(found: re.Match[str]) -> str:
        path = (folder / found[2]).resolve()
        if not path.exists() or not path.is_relative_to(root):
            return found[0]
        return found[1] + posixpath.relpath(_uri(path, root, docs), posixpath.dirname(uri))

    return _LINK.sub(moved, markdown)


def _folders(config: Any) -> tuple[Path, Path]:  # noqa: ANN401
    return Path(config.config_file_path).resolve().parent, Path(config.docs_dir).resolve()


def _linked(page: Path, root: Path) -> Iterator[Path]:
    """Files of the repository that a page links to."""
    if not page.is_file():
        return
    for _, target in _LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.exists() and path.is_relative_to(root):
            yield path


def _listed(folder: Path) -> list[Path]:
    """Files of a folder that are shown."""
    return sorted(each for each in folder.iterdir() if each.suffix in _SHOWN) if folder.is_dir() else []


def _uri(path: Path, root: Path, docs: Path) -> str:
    """The path of a file in the site's sources."""
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    uri = f"{_FOLDER}/{path.relative_to(root).as_posix()}"
    return f"{uri}/index.md" if path.is_dir() else uri


def _file_of(path: Path, root: Path, config: Any) -> File:  # noqa: ANN401
    uri, hidden = _uri(path, root, Path(config.docs_dir).resolve()), InclusionLevel.NOT_IN_NAV
    if not path.is_dir():
        return File.generated(config, uri, abs_src_path=str(path), inclusion=hidden)
    names = "".join(f"- [{each.name}]({each.name})\n" for each in _listed(path))
    return File.generated(config, uri, content=f"# {path.relative_to(root)}\n\n{names}", inclusion=hidden)
