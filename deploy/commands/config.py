"""`prefixrl config`: the keys of the run file, and the page that lists them."""

import difflib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from prefixrl.common.config.catalogue import ABSENT, SYNONYMS, Setting, json_schema, settings
from prefixrl.common.errors import ConfigError

WIDTH = 100
BAR = "\\|"
"""A bar inside a cell of a table."""
PAGE = (Path(__file__).parent / "tables" / "configuration.txt").read_text(encoding="utf-8")


@click.command("config")
@click.argument("key", required=False)
@click.option(
    "--markdown", "form", flag_value="markdown", help="All keys, as the page docs/configuration.md."
)
@click.option(
    "--json-schema", "form", flag_value="schema", help="The JSON schema of a run file, for editors."
)
def config_command(key: str | None, form: str | None) -> None:
    """Explain a KEY or section of the run file; without one, list the sections.

    KEY may also be the name of the same setting in TRL, verl, OpenRLHF, prime-rl or OpenR.
    """
    if form == "schema":
        click.echo(json.dumps(json_schema(), indent=2))
    elif form == "markdown":
        click.echo(page(), nl=False)
    else:
        for line in explained(key):
            click.echo(line)


def explained(key: str | None) -> Iterator[str]:
    """Yield the lines for one key, a section, or all sections; raises ConfigError."""
    entries = settings()
    if key is None:
        yield "prefixrl config KEY explains a key or a section; --markdown and --json-schema print all.\n"
        sections = [each for each in entries if "." not in each.key]
        width = max(len(each.key) for each in sections)
        yield from (f"{each.key:{width}}  {each.sentence}" for each in sections)
        return
    matches = [each for each in entries if each.key == key or each.key.startswith(f"{key}.")]
    if not matches:
        parts = key.replace("-", "_").split(".")  # other trainers have it in other sections
        places = [".".join(parts[-2:]), parts[-1]]
        foreign_key = next((place for place in places if place in SYNONYMS or place in ABSENT), "")
        last = "" if "." in foreign_key else parts[-1]
        matches = [
            each
            for each in entries
            if each.key.rsplit(".", 1)[-1] == last or each.key == SYNONYMS.get(foreign_key)
        ]
        if not matches and foreign_key:
            yield from textwrap.wrap(f"{key}: there is none, because {ABSENT[foreign_key]}", WIDTH)
            return
    if not matches:
        near = difflib.get_close_matches(key, [each.key for each in entries], n=3, cutoff=0.75)
        hint = (
            f"did you mean {', '.join(near)}?" if near else "`prefixrl config` lists the sections"
        )
        raise ConfigError(f"{key}: there is no such key or section; {hint}")
    for setting in matches:
        yield from _long(setting)


def _long(setting: Setting) -> Iterator[str]:
    if setting.is_section:
        yield f"[{setting.key}]  {setting.sentence}"
        return
    default = ""
    if setting.default == "required":
        default = "  (required)"
    elif setting.default:
        default = f"  (default: {setting.default})"
    yield f"{setting.key} = {setting.values}{default}"
    yield from textwrap.wrap(
        setting.sentence, WIDTH, initial_indent="    ", subsequent_indent="    "
    )


def page() -> str:
    """Return `docs/configuration.md`."""
    entries = settings()
    lines = [PAGE, *_table(entries, "")]
    for section in (each for each in entries if each.is_section):
        lines += ["", f"## `[{section.key}]`", "", section.sentence, ""]
        lines += _table(entries, f"{section.key}.")
    return "\n".join(lines) + "\n"


def _table(entries: tuple[Setting, ...], prefix: str) -> Iterator[str]:
    """Yield a table of the keys directly below a section."""
    yield "| key | values | default | what it does |"
    yield "|---|---|---|---|"
    for setting in entries:
        name = setting.key.removeprefix(prefix)
        if setting.key.startswith(prefix) and "." not in name and not setting.is_section:
            default = setting.default
            if default not in ("", "required"):
                default = f"`{default}`"
            cells = (f"`{name}`", setting.values, default, setting.sentence)
            yield f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"
