"""Pages of the site that docs/ does not hold: the root's own, and those made from the code."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import prefixrl
from prefixrl.deploy.__main__ import main
from prefixrl.learner.__main__ import main as learner
from prefixrl.rollout.__main__ import main as rollout
from prefixrl.scorer.__main__ import main as scorer

ROOT = Path(__file__).parents[2]
PAGES = {path.stem for path in (ROOT / "docs").glob("[a-z]*.md")}
RESULTS = ROOT / "benchmarks/results"
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
FROM_ROOT = {
    "index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md",
    "LICENSE.txt": "LICENSE", "results.md": "benchmarks/RESULTS.md", "pages.md": "docs/README.md",
    "minimal.py": "deploy/examples/minimal.py",
}  # fmt: skip
PROGRAMS = {
    "prefixrl": main,
    "prefixrl-learner": learner,
    "prefixrl-rollout": rollout,
    "prefixrl-scorer": scorer,
}
LINKS = {
    "../README.md": "index.md", "docs/README.md": "pages.md", "docs/decisions/": "decisions/index.md",
    "decisions/": "decisions/index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt", "deploy/examples/minimal.py": "minimal.py",
}  # fmt: skip
"""Links of these pages, and what they lead to on the site."""
WIDTH = 100


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every decision and every result."""
    assert config.nav
    config.nav[-1]["Inside"][-1]["Decisions"] += [f"decisions/{path.name}" for path in DECISIONS]
    config.nav[-2]["Reference"] += [f"results/{path.name}" for path in sorted(RESULTS.glob("*.md"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    index = files.get_file_from_path("README.md")
    assert index
    files.remove(index)
    made = {name: (ROOT / path).read_text(encoding="utf-8") for name, path in FROM_ROOT.items()}
    made["command_reference.md"] = "".join(["# Commands and their options\n", *_commands()])
    made["python_reference.md"] = "".join(["# Python reference\n", *_members()])
    made["decisions/index.md"] = "".join(["# Decisions\n\n", *map(_decision, DECISIONS)])
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in RESULTS.iterdir():
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links lead to pages of the site, and names of pages be links, outside of code blocks."""
    up = "../" * page.file.src_uri.count("/")

    def linked(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return f"[{name}]({up}{name}.md)" if name in PAGES else found[0]

    def to_site(found: re.Match[str]) -> str:
        return f"]({LINKS.get(found[1]) or found[1].removeprefix('docs/').removeprefix('../benchmarks/')})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for place in range(0, len(parts), 2):
        text = re.sub(r"\]\(([\w./-]+)\)", to_site, parts[place])
        parts[place] = re.sub(r"`docs/(\w+)\.md`|(?<![`/(])\bdocs/(\w+)\.md", linked, text)
    return "".join(parts)


def _commands() -> Iterator[str]:
    for name, command in PROGRAMS.items():
        yield from _described(command, click.Context(command, info_name=name, terminal_width=WIDTH))


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner
            yield from _described(
                inner, click.Context(inner, parent=context, info_name=name, terminal_width=WIDTH)
            )


def _members() -> Iterator[str]:
    yield _member("prefixrl.launch", prefixrl.launch)
    yield _member("prefixrl.Run", prefixrl.Run)
    for name, member in vars(prefixrl.Run).items():
        if not name.startswith("_"):
            yield _member(f"Run.{name}", member)


def _member(name: str, member: Any) -> str:
    return f"\n## {name}\n\n```python\n{name}{inspect.signature(member)}\n```\n\n{inspect.getdoc(member)}\n"


def _decision(path: Path) -> str:
    return f"- [{path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}]({path.name})\n"
