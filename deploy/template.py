"""Text files of a run, rendered from the templates that a package holds."""

from importlib.resources import files


def rendered(package: str, name: str, **values: object) -> str:
    """Return the file `templates/NAME` of a package with its values filled in; an unknown value is an error."""
    # Late: most commands render nothing.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files(package) / "templates"
    loader = FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    # A template is a text file, no web page: nothing is escaped.
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(name).render(values)
