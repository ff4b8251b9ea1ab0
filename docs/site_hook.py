"""The site's build step: pages of the repository's root join the site, and links to files that it lacks become text."""

import re
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md"}
ROOT_PAGES |= {"LOG.md": "log.md"}
"""Page of the repository's root -> its page of the site."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root."""
    new_file = import_module("mkdocs.structure.files").File.generated  # where the checks run, mkdocs is not installed
    for source, page in ROOT_PAGES.items():
        files.append(new_file(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site; a link to another file of the repository keeps its text alone."""
    sources = {site: source for source, site in ROOT_PAGES.items()}
    here = PurePosixPath(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        file, hash_sign, anchor = target.partition("#")
        if not file or "://" in file:
            return match[0]
        path = (ROOT / here / file).resolve().relative_to(ROOT).as_posix()
        inside = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if (ROOT / path).exists() and (inside is None or files.get_file_from_path(inside) is None):
            return label
        return f"{mark}[{label}]({inside or path}{hash_sign}{anchor})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, markdown)
