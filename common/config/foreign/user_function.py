"""A function of the user's own, named by a `function_ref`: `path/to/file.py:name`, or a name alone.

The file is executed as a module of its own, named after its path. Its folder is not on the import
path, so that it cannot shadow installed packages. A function that cannot be called as its key
demands is refused from its source alone.

A name alone is a function that an installed package adds at the entry point `prefixrl.rewards`. A
reference with a colon is always a file, so that a name can only reach what pip installed.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import math
import symtable
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from types import FunctionType, ModuleType

from prefixrl.common.config.foreign.plugins import Plugin, load_plugin, plugins
from prefixrl.common.errors import ConfigError

UserFunction = Callable[..., object]
FACTS = ("tokens", "finish", "prefix", "source")
"""Facts about an answer besides its text that a reward function may take."""
CALLS = {
    "reward.function": (("question", "text", "gold"), frozenset({"verdict", "verify", *FACTS})),
    "algorithm.advantage_function": (("rewards", "groups"), frozenset[str]()),
    "algorithm.loss_function": (
        ("logprobs", "proximal", "behaviour", "advantages", "mask"),
        frozenset({"ages", "entropy", "reference"}),
    ),
}
"""By key: what stands first in every call, and what is handed by name to a function with such a parameter."""


PLUGGED_IN = "reward.function"
"""The key that takes functions of installed packages, too."""


def is_file(function_ref: str) -> bool:
    """Return True for `file.py:name`, False for the name of an installed package's function."""
    return ":" in function_ref


def _plugin_of(name: str) -> Plugin:
    plugin = plugins("rewards").get(name)
    if plugin is None:
        raise ConfigError(
            f"{PLUGGED_IN} = {name!r}: no package that is installed on this host adds it (those "
            f"here add {', '.join(plugins('rewards')) or 'none'}); install the package"
        )
    return plugin


def resolve(key: str, function_ref: str, base: Path) -> str:
    """Return the reference with an absolute path; execute nothing; errors name the `key`."""
    if key == PLUGGED_IN and function_ref in plugins("rewards") and not is_file(function_ref):
        return function_ref
    path, separator, name = function_ref.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        added = f"; installed packages add {', '.join(plugins('rewards')) or 'none'}"
        raise ConfigError(
            f'{key} = {function_ref!r} is not FILE.py:NAME, for example {key} = "mine.py:score"'
            f"{added if key == PLUGGED_IN else ''}"
        )
    absolute = (base / Path(path).expanduser()).resolve()
    if not absolute.is_file():
        raise ConfigError(f"{key} = {function_ref!r}: there is no such file (looked at {absolute})")
    _check_source(key, f"{key} = {function_ref!r}", absolute, name)
    return f"{absolute}:{name}"


def _check_source(key: str, what: str, path: Path, name: str) -> None:
    try:
        source = importlib.util.decode_source(path.read_bytes())
        tree = ast.parse(source, str(path))
        table = symtable.symtable(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{what}: {path} is not valid Python: {explain(error, path)}; mend the file"
        ) from None
    bound = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    # `from x import *` may bind any name.
    takes_all = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree))
    if name not in bound and not takes_all:
        functions = [
            statement.name
            for statement in tree.body
            if isinstance(statement, ast.FunctionDef) and statement.name[0] != "_"
        ]
        names_there = (
            f"it defines {', '.join(functions)}" if functions else "it defines no function"
        )
        raise ConfigError(f"{what}: {path} has no {name!r}; {names_there}")
    # The last binding of the name is the one that is called; a decorator may change its signature.
    last = [statement for statement in tree.body if name in _bound_by(statement)][-1:]
    for statement in last:
        if (
            isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            and not statement.decorator_list
        ):
            _check_call(
                key, what, _signature(statement.args), isinstance(statement, ast.AsyncFunctionDef)
            )


def _bound_by(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module may bind."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.alias():
                names.add(node.asname or node.name)
    return names


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature that a definition has, without its defaults' values and annotations."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    return inspect.signature(eval(compile(bare, "<signature>", "eval")))  # noqa: S307  nothing of the user's is left in it


_DEFERRED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _check_call(key: str, what: str, signature: inspect.Signature, is_async: bool) -> None:
    first, by_name = CALLS[key]
    by_keyword = {name: None for name in by_name & signature.parameters.keys()}
    call = f"it is called with {', '.join(first)}"
    call += (
        f", and by name with {' and '.join(sorted(by_name))} where it has such a parameter"
        if by_name
        else ""
    )
    if is_async:
        raise ConfigError(
            f"{what} is async or a generator: nothing awaits or iterates it; use def and return"
        )
    try:
        signature.bind(*first, **by_keyword)
    except TypeError as error:
        raise ConfigError(f"{what} takes {signature}: {error}; {call}") from None


def check_call(key: str, function_ref: str) -> None:
    """Import a function; raise ConfigError if it cannot be called as its key demands."""
    function = load(function_ref)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # one of C that Python cannot describe
    _check_call(
        key,
        repr(function_ref.rpartition(":")[2]),
        signature,
        any(is_kind(function) for is_kind in _DEFERRED),
    )


def takes(function: UserFunction, name: str) -> bool:
    """Return True if a function has this parameter."""
    try:
        return name in inspect.signature(function).parameters
    except (ValueError, TypeError):
        return False


def file_of(function_ref: str) -> Path:
    """Return the file of a reference; ConfigError where its package is not installed here."""
    if is_file(function_ref):
        return Path(function_ref.rpartition(":")[0])
    plugin = _plugin_of(function_ref)
    module = plugin.target.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # the package's own code runs in its parents
        raise ConfigError(
            f"{plugin.package} adds {function_ref!r} to prefixrl.rewards, but {module} cannot be "
            f"found: {type(error).__name__}: {error}; update or uninstall the package"
        ) from error
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{plugin.package} adds {function_ref!r} to prefixrl.rewards, but {module} has no "
            f"file; update or uninstall the package"
        )
    return Path(spec.origin)


def load(function_ref: str) -> UserFunction:
    """Return the function of a resolved reference; raise ConfigError.

    The file is executed once per process.
    """
    if not is_file(function_ref):
        expected = f"a function of {', '.join(CALLS[PLUGGED_IN][0])}"
        return load_plugin(_plugin_of(function_ref), FunctionType, expected)
    path = file_of(function_ref)
    name = function_ref.rpartition(":")[2]
    module = _module(path)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{path} has no {name!r}")
    if not callable(function):
        raise ConfigError(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


@functools.cache
def _module(path: Path) -> ModuleType:
    """Execute the file as a module; raises ConfigError when it does not run."""
    digest = hashlib.blake2b(bytes(path), digest_size=8).hexdigest()
    name = f"prefixrl_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses, pickle and typing look for a class's module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {explain(error, path)}; mend the file"
        ) from error
    return module


def number(value: object) -> float:
    """Return a number (NumPy's and torch's too) as a float, infinite if too large; else NaN."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf


def explain(error: BaseException, path: Path) -> str:
    """Describe an error of the user's code in one line, with the line of their file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" ({path.name}, line {lines[-1]})" if lines else ""
    message = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {message}{where}"
