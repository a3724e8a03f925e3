"""Dataclasses of settings as a person meets them: NAME=VALUE made into one, its names, what they take, --help."""

import ast
import difflib
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from errors import SettingsError, first_line
from runs.formatting import flat, literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = TypeVar("Schema", bound="DataclassInstance")
MISSING_MARK = "\ue000"  # stands for the text ???, which OmegaConf takes for a value that is missing


def from_arguments(schema: type[Schema], arguments: list[str], base: Schema | None = None) -> Schema:
    """Return the `schema` object that NAME=VALUE arguments describe, on top of `base` or the defaults."""
    cfg: DictConfig = OmegaConf.structured(schema)
    if base is not None:
        cfg.update(literal(asdict(base)))
    for argument in arguments:
        name, _, text = argument.partition("=")
        kinds = setting_kinds(schema, name)
        value: Any = None if NoneType in kinds and text == "null" else text  # text stays as it is, to the letter
        try:
            if str not in kinds and text[:1] == "[":
                value = yaml.load(text, yaml.BaseLoader)  # which makes strings only
            elif list in kinds and text != "null":
                value = [text]
            OmegaConf.update(cfg, name, MISSING_MARK if text == "???" else literal(value))
        except yaml.YAMLError as error:
            raise SettingsError(f"{name}={text} cannot be read as a list ({first_line(error)}).") from None
        except OmegaConfBaseException as error:
            raise SettingsError(explain_value(error, schema)) from error
    settings = to_settings(cfg, schema)
    vars(settings).update({name: "???" for name, value in vars(settings).items() if value == MISSING_MARK})
    return settings


def to_settings(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """Return the checked `schema` object that a config stands for; SettingsError where it cannot."""
    given: Any = OmegaConf.to_container(cfg)
    if unknown := flat(given).keys() - set(setting_names(schema)):  # +key=value slips past Hydra
        raise SettingsError(unknown_setting(min(unknown), schema))
    try:
        return OmegaConf.to_object(cfg)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise SettingsError(explain_value(error, schema)) from error


def setting_names(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield every setting of a dataclass and of those inside it, dotted: model, model.n_head, …"""
    hints = get_type_hints(schema)
    for field in fields(schema):
        yield prefix + field.name
        if is_dataclass(hints[field.name]):
            yield from setting_names(hints[field.name], f"{prefix}{field.name}.")


def setting_kinds(schema: type, name: str) -> set[Any]:
    """Return the types that a setting's value may have; SettingsError where there is no such setting."""
    kind: Any = schema
    for part in name.split("."):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        if part not in hints:
            raise SettingsError(unknown_setting(name, schema))
        kind = hints[part]
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return {get_origin(kind) or kind for kind in kinds}


def unknown_setting(name: str, schema: type) -> str:
    """Return the sentence for a name that is no setting, with the nearest ones that are."""
    if name.startswith("hydra."):
        return f"there is no setting {name}: --cfg hydra shows those there are."
    by_last_part = {known.rpartition(".")[2]: known for known in setting_names(schema)}
    near = difflib.get_close_matches(name, [*setting_names(schema)], n=2, cutoff=0.75)
    near += [by_last_part[n] for n in difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1)]
    hint = f": did you mean {' or '.join(dict.fromkeys(near))}?" if near else "; --help lists them all."
    return f"there is no setting {name}{hint}"


def explain_value(error: OmegaConfBaseException, schema: type) -> str:
    """Return the sentence for a name or value that OmegaConf refuses."""
    name = error.full_key or error.key
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return unknown_setting(str(name), schema)
    if name is None:  # of an interpolation
        return f"{first_line(error)}."
    is_list = "ListConfig" in str(error)
    return f"{name} takes a list, as in '{name}=[a,b]'." if is_list else f"{name}: {first_line(error)}."


def refuse_flags(schema: type, arguments: list[str], *, others: bool = False) -> None:
    """Raise SettingsError for what is not typed NAME=VALUE, unless `others` are Hydra's to read."""
    for argument, following in pairwise([*arguments, "VALUE"]):
        typed, equals, value = argument.lstrip("-").partition("=")
        is_flag = argument.startswith("-")
        if is_flag and (name := typed.replace("-", "_")) in setting_names(schema):
            raise SettingsError(f"settings are typed without dashes: write {name}={value if equals else following}.")
        if not typed or not (others or (equals and not is_flag)):
            problem = f"there is no flag {argument}" if is_flag else f"cannot read {argument!r}"
            raise SettingsError(f"{problem}: settings are typed NAME=VALUE; --help lists them.")


def help_text(schema: type, about: str, groups: str = "") -> str:
    """Return what --help shows: about the command, its groups, and each setting with its default and meaning."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    lines = [f"{about.strip()}\n\n{groups}Settings and their defaults:\n"]
    for name, default, meaning in described(schema):
        left = f"  {name}={default}"
        filled = textwrap.fill(meaning, width, initial_indent=" " * 36, subsequent_indent=" " * 36)
        lines.append(f"{left:<35} {filled[36:]}" if len(left) < 36 else f"{left}\n{filled}")
    return "\n".join(lines)


def described(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of every setting that takes a value, groups after single ones."""
    hints, meanings = get_type_hints(schema), setting_docs(schema)
    for field in sorted(fields(schema), key=lambda field: is_dataclass(hints[field.name])):
        if is_dataclass(hints[field.name]):
            yield from described(hints[field.name], f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = default if isinstance(default, str) and default else json.dumps(default)
        sentence = re.match(r".*?\.(?= [A-Z]|$)|.*", meanings[field.name])
        yield prefix + field.name, shown, sentence[0] if sentence else ""


def setting_docs(schema: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, on one line each."""
    docs = {}
    for kind in reversed(schema.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs
