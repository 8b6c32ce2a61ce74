"""The run file read: settings over it, validation with explained errors, absolute paths.

Workers receive the resolved config with their Welcome and override only what differs per host. Paths are relative to
the run file's folder, `directory` to the working folder.
"""

import difflib
import json
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from prefixrl.common.config import catalogue
from prefixrl.common.config.catalogue import ABSENT, GONE_KEYS, GONE_VALUES, SYNONYMS
from prefixrl.common.config.data import resolve
from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.foreign.files import explained, read_bytes, read_toml
from prefixrl.common.config.foreign.templates import AnyModel, adviser, with_texts
from prefixrl.common.config.foreign.verifier import load_verifier
from prefixrl.common.config.prompting import GGUF, checkpoint_of
from prefixrl.common.config.run import CheckpointConfig, RunConfig
from prefixrl.common.config.section import FROM_RUN_FILE, Section
from prefixrl.common.errors import ConfigError, to_copy

AnySection = TypeVar("AnySection", bound=Section)

CONFIG_FILE = "config.json"
"""File of a run directory with the resolved config of its run."""


def load(path: str | Path, settings: tuple[str, ...] = ()) -> RunConfig:
    """Read and resolve a run file or a run's `config.json`, with `KEY=VALUE` settings over it.

    /dev/null stands for an empty run file.
    """
    path = Path(path)
    if str(path) == os.devnull:
        return from_flags({}, settings)
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; give the run file, the TOML that describes the run, or "
            f"{to_copy('prefixrl resume', path)} for a run that has begun there"
        )
    if path.name == CONFIG_FILE:
        return changed(from_json(read_bytes(path, "the run file"), str(path)), settings, "--set")
    document = read_toml(path, "the run file")
    where = f"{path} with --set" if settings else str(path)
    with explained(f"{where}: a path in it cannot be used"):
        return _resolve_paths(_validate(document, settings, where), path.resolve().parent)


def from_flags(document: dict[str, Any], settings: tuple[str, ...]) -> RunConfig:
    """Resolve a config that flags alone describe; paths are relative to the working folder."""
    return _resolve_paths(_validate(document, settings, "the command line"), Path.cwd())


def import_functions(config: RunConfig) -> None:
    """Execute the files of the user's functions, and import the verifiers of packages that the run names.

    Raises ConfigError, which names the key of a bad function, the package of a bad verifier.
    """
    for name in config.data.added_verifiers:
        load_verifier(name)
    for key in user_function.CALLS:
        function_ref = attrgetter(key)(config)
        try:
            if function_ref is not None:
                user_function.check_call(key, function_ref)
        except ConfigError as error:
            raise ConfigError(f"{key} = {function_ref!r}: {error}") from None


def changed(config: RunConfig, settings: tuple[str, ...], where: str) -> RunConfig:
    """Return a resolved config with `KEY=VALUE` settings over it; raises ConfigError."""
    document = config.model_dump(mode="json")
    for setting in settings:
        _apply(document, setting)
    with _faults_explained(where):
        config = RunConfig.model_validate_json(json.dumps(document))
    # Templates that were read before stay as they are; a file in a setting is read now.
    adapter = with_texts(config.adapter, "adapter", Path.cwd())
    target = config.target and with_texts(config.target, "target", Path.cwd())
    return config.model_copy(update={"adapter": adviser(adapter, target), "target": target})


def from_json(text: str | bytes, where: str = "the broker's config") -> RunConfig:
    """Read a resolved config; raises ConfigError naming `where` if this release cannot read it."""
    fault = f"{where} cannot be read by this release (was it written by another one?)"
    with _faults_explained(fault):
        return RunConfig.model_validate_json(text)


def _apply(document: dict[str, Any], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--set {setting!r} is not KEY=VALUE, for example --set algorithm.kl=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()  # an unquoted string: --set rollout.engine=transformers
    *sections, last = key.strip().split(".")
    for section in sections:
        if document.get(section) is None:  # absent, or null in a resolved config
            document[section] = {}
        document = document[section]
        if not isinstance(document, dict):
            raise ConfigError(f"--set {setting!r}: {section} is not a section of the run file")
    if text.strip() != "null":
        document[last] = value
    elif document.pop(last, None) is None:
        raise ConfigError(
            f"--set {setting!r}: null takes a key out of the run file, which has no {key.strip()}"
        )


def _validate(document: dict[str, Any], settings: tuple[str, ...], where: str) -> RunConfig:
    for setting in settings:
        _apply(document, setting)
    with _faults_explained(where):
        return RunConfig.model_validate(document, context=FROM_RUN_FILE)


@contextmanager
def _faults_explained(where: str) -> Iterator[None]:
    """Raise ConfigError with a line for each fault that validation finds."""
    try:
        yield
    except ValidationError as error:
        lines = [
            _explain(fault["loc"], fault["type"], fault["msg"], fault.get("input"))
            for fault in error.errors()
        ]
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        raise ConfigError("\n".join([f"{where}: {count}", *lines])) from None


def _explain(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden" and key in GONE_KEYS:
        return f"  {key}: there is no such key any more; {GONE_KEYS[key]}"
    if isinstance(value, str) and (key, value) in GONE_VALUES:
        return (
            f"  {key} = {json.dumps(value)}: there is no such value any more; "
            + (GONE_VALUES[key, value])
        )
    if kind == "extra_forbidden":
        return f"  {key}: unknown key{_nearest(str(loc[-1]), _known_keys(loc[:-1]))}"
    if kind == "missing":
        return f"  {key}: missing"
    if kind == "value_error":
        return f"  {key + ': ' if key else ''}{message.removeprefix('Value error, ')}"
    return f"  {key} = {json.dumps(value, default=str)}: {message}"


def _nearest(name: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    settings = catalogue.settings()
    elsewhere = [each.key for each in settings if each.key.rpartition(".")[2] == name]
    # A key of exactly this name is more likely meant than a section of a similar name.
    if elsewhere and (not near or near[0] in [each.key for each in settings if each.is_section]):
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    if not near and name in SYNONYMS:
        return f"; did you mean {SYNONYMS[name]!r}?"
    if not near and name in ABSENT:
        return f"; there is none, because {ABSENT[name]}"
    near = near or difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(keys)}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in (each for each in loc if isinstance(each, str)):  # the others are indices of lists
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = get_args(annotation) if get_origin(annotation) else (annotation,)
        models = [
            item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)
        ]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)


def _resolve_paths(config: RunConfig, base: Path) -> RunConfig:
    """Return the config with absolute paths, relative ones from `base`; raises ConfigError."""
    directory = Path(os.path.expanduser(config.directory)).resolve()
    directory.exists()  # raises where no file system takes such a path
    adapter = _with_folder(config.adapter, "adapter", base)
    if adapter.init_from is not None:
        start = checkpoint_of(adapter.init_from, base, directory)
        adapter = adapter.model_copy(update={"init_from": start})
    data = config.data
    if config.reward.is_own and data.answer_reading is None:
        # The function reads gold answers in its own way.
        data = data.model_copy(update={"answer_reading": "as_it_is"})
    functions: dict[str, dict[str, str]] = defaultdict(dict)
    for key in user_function.CALLS:
        section, _, name = key.partition(".")
        if (function_ref := attrgetter(key)(config)) is not None:
            functions[section][name] = user_function.resolve(key, function_ref, base)
    prm = with_models(config.scorer.prm, "scorer.prm", base)
    target = config.target
    if target is not None:
        # Behind a chat endpoint the model is a name there, and nothing of it is read here.
        is_name = config.scorer.is_chat
        target = (with_texts if is_name else _with_folder)(target, "target", base)
    resolved = {
        "directory": str(directory),
        "adapter": adviser(adapter, target),
        "target": target,
        "data": resolve(data, base),
        "scorer": config.scorer.model_copy(update={"prm": prm}),
        "implicit_reward": with_models(config.implicit_reward, "implicit_reward", base),
        "checkpoint": _with_upload(config.checkpoint, base),
        "reward": config.reward.model_copy(update=functions["reward"]),
        "algorithm": config.algorithm.model_copy(update=functions["algorithm"]),
    }
    return config.model_copy(update=resolved)


def _model_folder(key: str, name: str, base: Path) -> str:
    """Return a local model folder's absolute path, or a hub name as it is."""
    local = base / os.path.expanduser(name)
    if local.is_file():
        raise ConfigError(f"{key} = {name!r}: {local} is a file; give a Hugging Face folder{GGUF}")
    if local.exists():
        return str(local.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"{key} = {name!r}: there is no such folder (looked at {local}) and it is not a hub "
            f"name (org/name)"
        )
    return name


def _with_folder(model: AnyModel, section: str, base: Path) -> AnyModel:
    folder = _model_folder(f"{section}.model", model.model, base)
    return with_texts(model.model_copy(update={"model": folder}), section, base)


def with_models(section: AnySection | None, name: str, base: Path) -> AnySection | None:
    """Return a section, if it is there, with the absolute paths of its models."""
    folders = {
        key: _model_folder(f"{name}.{key}", model, base)
        for key in ("model", "reference_model")
        if (model := getattr(section, key, None)) is not None
    }
    return section and section.model_copy(update=folders)


def _with_upload(checkpoint: CheckpointConfig, base: Path) -> CheckpointConfig:
    """Return the section with the absolute path of an upload's program, unless PATH finds it."""
    upload = checkpoint.upload
    if upload and "/" in upload[0]:
        program = str((base / os.path.expanduser(upload[0])).resolve())
        upload = (program, *upload[1:])
    return checkpoint.model_copy(update={"upload": upload})
