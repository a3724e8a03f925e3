"""The values of a sweep's settings, typed or of an experiment's file."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from itertools import product
from typing import Any, get_args, get_origin

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep, Sweep, ValueType

from common.errors import SettingsError, format_value
from common.settings import TEXT_KINDS, setting_hints
from common.text import QUOTED, quote, quoted_as_typed
from training.config import TrainConfig

SETTINGS = setting_hints(TrainConfig)
FOLDERS = {"hydra.sweep.dir", "hydra.sweep.subdir", "hydra.sweeper.baseline", "hydra.sweeper.confirm"}
TEXTS = FOLDERS | {name for name, kind in SETTINGS.items() if kind in TEXT_KINDS}
OPTION_GROUPS = {field.name for field in fields(TrainConfig) if is_dataclass(field.type)}
OPTION_GROUPS |= {"experiment", "hydra/launcher", "hydra/sweeper"}
"""Names whose value in a command is an option: a file of conf/."""
COMPUTED = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
"""A ${…} that a job computes from its settings, with others in it."""


def for_hydra(override: str) -> str:
    """Return a typed override for Hydra, with its text, or its option's name, as typed.

    choice(A,B) is A,B: in a function Hydra takes neither null nor the quotes of a text.
    """
    choice = re.fullmatch(r"([^=]+=)choice\((.+)\)", override, re.DOTALL)
    if choice and not {*"()"} & {*re.sub(QUOTED, "", choice[2])}:
        override = choice[1] + choice[2]
    return quoted_as_typed(override, TEXTS, OPTION_GROUPS)


def parse_values(loader: ConfigLoader, overrides: Iterable[str]) -> list[Override]:
    """Return typed overrides as Hydra reads them; loader: for the options of glob().

    Raises SettingsError for a log scale of values that have none: a sweeper would pass over it.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*map(for_hydra, overrides)])
    for override in parsed:
        value = override.value()
        if "log" in getattr(value, "tags", ()) and not isinstance(value, IntervalSweep):
            problem = f"{override.input_line}: only an interval has a log scale"
            raise SettingsError(problem, "list the values, or write tag(log,interval(A,B)) for hydra/sweeper=optuna")
    return parsed


def computed_in_job(override: str) -> str:
    """Return NAME=VALUE of a variant for Hydra, in quotes if it has a ${…}."""
    name, _, value = override.partition("=")
    if re.search(COMPUTED, value) and not re.search(QUOTED, value):
        return f'{name}="{value}"'
    return for_hydra(override)


def range_text(name: str, value: Any) -> str:
    """Return an experiment's values of a setting as they are typed: [1, 2] is 1,2.

    A list of texts is the one value of a setting that takes one. Raises SettingsError for an empty list.
    """
    takes_list = any(get_origin(kind) is list for kind in (SETTINGS.get(name), *get_args(SETTINGS.get(name))))
    if not isinstance(value, list) or (takes_list and all(isinstance(each, str) for each in value)):
        text = format_value(value)
        return f'"{text}"' if re.fullmatch(COMPUTED, text) else text
    if not value:
        raise SettingsError(f"hydra.sweeper.params has no values of {name}", "leave the setting out, or give some")
    return ",".join(map(in_list, value))


def in_list(value: Any) -> str:
    """Return one of several values of a setting for Hydra, in quotes if it needs them."""
    text = format_value(value)
    if isinstance(value, list):
        return text
    if re.search(COMPUTED, text):
        return f'"{text}"'
    is_plain = re.fullmatch(r"[\w.+/-]+", text, re.ASCII) and value != "null"  # which YAML has in quotes
    return text if is_plain else quote(text)


def expand_ranges(override: Override) -> None:
    """Replace the ranges among an override's values, as in range(1,3),7, by their numbers."""
    choices = override.value()
    if isinstance(choices, RangeSweep):
        alone: list[Any] = [choices]
        choices = ChoiceSweep(list=alone, shuffle=choices.shuffle)
        override._value = choices
        override.value_type = ValueType.CHOICE_SWEEP
    if not isinstance(choices, ChoiceSweep):
        return
    expanded: list[Any] = []
    for value in choices.list:
        if isinstance(value, RangeSweep):
            expanded += numbers_of(override, value)
        elif isinstance(value, Sweep | Glob) or "Sweep(" in repr(value):  # of a choice in a choice, or in a list
            raise SettingsError(f"{override.input_line} has values within a value", "write it as 1,2,3 or range(1,5),7")
        else:
            expanded.append(value)
    choices.list = expanded


def numbers_of(override: Override, swept: RangeSweep) -> Sequence[float]:
    """Return the numbers of a range as decimals have them.

    Those of range(0.3,0.9,0.3) are 0.3 and 0.6: Hydra adds the binary fraction of 0.3, and comes to 0.8999999999999999.
    Its sort() begins elsewhere than the range if the end is none of the steps.
    """
    check_numbers(override, swept)
    if re.search(r"\bsort\(.*range\(", str(override.input_line)):
        raise SettingsError(f"{override.input_line} sorts a range", "leave sort() out: the order changes no result")
    numbers = (swept.start, swept.stop, swept.step)
    if all(isinstance(number, int) for number in numbers):
        return range(*numbers)  # type: ignore[arg-type]
    start, stop, step = (Decimal(str(number)) for number in numbers)
    return [float(start + i * step) for i in range(max(0, math.ceil((stop - start) / step)))]


def check_numbers(override: Override, swept: Any) -> None:
    """Raise SettingsError unless all numbers of a range are finite, and no step 0."""
    numbers = vars(swept)  # start, stop or end, and step
    is_finite = all(math.isfinite(value) for value in numbers.values() if isinstance(value, int | float))
    if not is_finite or numbers.get("step") == 0:  # which would never end
        problem = f"{override.input_line} must have finite numbers, and no step of 0"
        raise SettingsError(problem, "write it as range(1,5)")


def check_values(override: Override) -> None:
    """Raise SettingsError unless an override lists values, of finite numbers and with a step."""
    name = override.key_or_group
    if isinstance(override.value(), Glob) and name in SETTINGS:
        problem = f"{override.input_line}: glob() chooses among options, and {name} has none"
        raise SettingsError(problem, f"list its values, as in {name}=A,B")
    check_numbers(override, override.value())
    if not override.is_discrete_sweep() or next(override.sweep_string_iterator(), None) is None:
        remedy = "write it as 1,2,3 or range(1,5)"
        if "interval(" in str(override.input_line):
            remedy += "; hydra/sweeper=optuna draws values from an interval"
        raise SettingsError(f"{override.input_line} lists no value", remedy)


def combinations(overrides: Iterable[Override]) -> list[list[str]]:
    """Return the jobs of a grid, each as its overrides: every combination of the values given."""
    choices = []
    for override in overrides:
        is_choice = override.is_sweep_override()
        values = override.sweep_string_iterator() if is_choice else [override.get_value_element_as_str()]
        choices.append([f"{override.get_key_element()}={value}" for value in values])
    return [*map(list, product(*choices))]
