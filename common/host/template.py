"""Text files that are rendered from templates: job scripts, units, run files."""

from importlib.resources import files


def rendered(package: str, name: str, **values: object) -> str:
    """Return a template of a package (its path there) with values filled in; each must be given."""
    # Late: most commands render nothing.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    # A template is a text file, no web page: nothing is escaped.
    environment = Environment(
        loader=FunctionLoader(lambda name: (files(package) / name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(values)
