"""`prefixrl docs`, `example`, `completion`: pages of the documentation, examples to copy, and a shell's script."""

import re
import shutil
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from prefixrl.common.errors import ConfigError, to_copy

FOLDER = Path(__file__).parent.parent / "docs"
"""The pages in `docs/` of the repository: a link there, files in the wheel."""
INDEX = "README"
EXAMPLES = FOLDER.parent / "examples"
_ROW = re.compile(r"\| \[(\w+)\]\(\w+\.md\) \| (.*) \|")


@click.command()
@click.argument("topic", required=False)
def docs(topic: str | None) -> None:
    """Print the page TOPIC of the documentation; without one, list the pages."""
    pages = sorted(path.stem for path in FOLDER.glob("*.md"))
    if topic:
        name = topic.removesuffix(".md").replace("-", "_")
        if name not in pages:
            raise ConfigError(f"there is no page {topic!r}; there are: {', '.join(pages)}")
        click.echo(_text(name), nl=False)
        return
    questions = dict(_ROW.findall(_text(INDEX)))
    width = max(map(len, questions))
    click.echo("`prefixrl docs TOPIC` prints a page:\n")
    for name in pages:
        if name != INDEX:
            click.echo(f"{name:{width}}  {questions.get(name, '')}".rstrip())


@click.command()
@click.argument("name", required=False)
@click.argument("directory", required=False, type=click.Path(path_type=Path))
def example(name: str | None, directory: Path | None) -> None:
    """Copy the example NAME to a new folder DIRECTORY (default: NAME); without them, list the examples."""
    examples = sorted(path.name for path in EXAMPLES.glob("[a-z]*") if path.is_dir())
    if name is None:
        click.echo("`prefixrl example NAME [DIRECTORY]` copies one:\n")
        for file in sorted(EXAMPLES.glob("*/run.toml")):
            click.echo(f"{file.parent.name:18} {file.read_text().splitlines()[0].lstrip('# ')}")
        return
    folder = directory or Path(name)
    if name not in examples:
        raise ConfigError(f"there is no example {name!r}; there are: {', '.join(examples)}")
    if folder.exists():
        raise ConfigError(
            f"{folder} is there already; give a new folder: prefixrl example {name} DIRECTORY"
        )
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    # Its scripts import the modules beside them; data of another example stays where it is.
    for path in (*folder.glob("*.py"), *folder.glob("*.toml")):
        text = path.read_text(encoding="utf-8").replace(f"prefixrl.deploy.examples.{name}.", "")
        path.write_text(text.replace('"../', f'"{EXAMPLES}/'), encoding="utf-8")
    run_file = folder / "run.toml"
    what = f": {to_copy('prefixrl launch', run_file)} trains it" if run_file.exists() else ""
    click.echo(f"{folder} holds the example {name}{what}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes commands and options.

    For example, in ~/.bashrc: eval "$(prefixrl completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind, "click makes the script of each"
    click.echo(kind(context.find_root().command, {}, "prefixrl", "_PREFIXRL_COMPLETE").source())


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
