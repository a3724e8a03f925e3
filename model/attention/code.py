"""A person's own file, which registers forms, modifiers and tasks: code=FILE."""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import dropwhile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from common.errors import SettingsError, os_error_reason
from model.attention.registry import FORMS, MODIFIERS


class Ran(NamedTuple):
    """A file that has run here, with the neighbours that it imports."""

    files: list[Path]  # the file, then its neighbours
    hash: str  # of them all
    hashes: set[str]  # of each alone


RAN: dict[Path, Ran] = {}
"""The files that have run here."""


def run_code(name: str | None, *registries: dict[str, Any]) -> str | None:
    """Run the file of code=NAME, once in a process, and return its hash; None without a name.

    registries: those to which it may add, besides forms and modifiers. The hash, the first 16 digits of a SHA-256,
    covers the neighbours that the file imports. An error in the file prints its traceback. Raises SettingsError for
    such an error, with the registries as they were, and for a file that has changed since it ran.
    """
    if name is None:
        return None
    try:
        path = path_of(name)
        if path not in RAN:
            files = [path, *execute(name, path, (FORMS, MODIFIERS, *registries))]
            RAN[path] = Ran(files, digest(files), {digest([file]) for file in files})
        ran = RAN[path]
        if digest(ran.files) != ran.hash:
            problem = f"code={name} has changed since this process ran it"
            raise SettingsError(problem, "start the command again, a sweep in a new folder")
        return ran.hash
    except (OSError, RuntimeError) as error:
        remedy = "give a Python file that registers a form, a modifier or a task"
        raise SettingsError(f"code={name} cannot be read ({os_error_reason(error)})", remedy) from None


def run_codes(arguments: Sequence[str]) -> list[str]:
    """Run each file of code=FILE among the arguments of a command; return the others.

    Of attention=NAME only the name is returned.
    """
    for argument in arguments:
        if argument.startswith("code="):
            run_code(argument.removeprefix("code="))
    return [argument.removeprefix("attention=") for argument in arguments if not argument.startswith("code=")]


def file_of(arguments: Sequence[str]) -> str | None:
    """Return FILE of the first code=FILE among the arguments of a command, None without one."""
    return next((argument.removeprefix("code=") for argument in arguments if argument.startswith("code=")), None)


def path_of(name: str) -> Path:
    """Return the path of the file of code=NAME."""
    return Path(name).expanduser().resolve()


def digest(files: list[Path]) -> str:
    """Return the hash of some files' content."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def execute(name: str, path: Path, registries: Sequence[dict[str, Any]]) -> list[Path]:
    """Run a file; return the neighbours that it imports."""
    # Relative imports find the neighbours in a package of the file's own. torch.compile finds the module by its name.
    package = ModuleType(f"code_{hashlib.sha256(bytes(path)).hexdigest()[:8]}")
    package.__path__ = [str(path.parent)]
    module = ModuleType(f"{package.__name__}.{path.stem}")
    module.__package__ = package.__name__
    module.__file__ = str(path)
    sys.modules |= {package.__name__: package, module.__name__: module}
    neighbours = Neighbours(f"{package.__name__}.")
    sys.meta_path.insert(0, neighbours)

    # Run its source: a compiled copy may be older.
    source = path.read_bytes()
    before = [dict(registry) for registry in registries]
    try:
        with explained(name), chdir("."), torch_kept():  # chdir() gives back the folder that it is in
            exec(compile(source, path, "exec"), vars(module))
        neighbours.are_complete = True
        if before == [*registries]:
            problem = f"code={name} registers nothing"
            names = "@form, @modifier or @task" if len(registries) > 2 else "@form or @modifier"
            raise SettingsError(problem, f"decorate a function or a class with {names}")
    except SettingsError:
        for registry, content in zip(registries, before, strict=True):
            registry.clear()
            registry.update(content)
        raise
    for modifier in MODIFIERS.keys() - before[1].keys():
        check_results(name, MODIFIERS[modifier])
    loaded = [each for key, each in sys.modules.items() if key.startswith(f"{package.__name__}.") and each != module]
    return sorted(Path(each.__file__) for each in loaded if each.__file__)


@contextmanager
def torch_kept() -> Iterator[None]:
    """Give back what a file may set for all of torch: a command computes the same without it.

    These are the generator of the CPU, the default type and device of new tensors, and whether there are gradients.
    """
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)


class Neighbours:
    """Finds the neighbours of a file for import, by the prefix of their names.

    Those that are imported later would be missing in the hash of the file: they are refused.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.are_complete = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(self.prefix):
            return None
        if self.are_complete:
            problem = f"{name.removeprefix(self.prefix)} is imported after the file has run, and is not in its hash"
            raise SettingsError(problem, "import it at the top of the file")
        spec = PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = FromSource(name, spec.loader.path)
        return spec


class FromSource(SourceFileLoader):
    """Compiles a module from its source.

    Python takes a compiled copy for a file of the same size that was written in the same second, as a program does that
    changes a number and runs again.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def check_results(name: str, modifier: Any) -> None:
    """Let a modifier's methods raise SettingsError for results that do not fit.

    Those of another type or shape than they got.
    """

    def checked(method: Callable[..., Any], count: int) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            result = method(self, *arguments)
            if torch.compiler.is_compiling():  # a compiled graph cannot raise it
                return result
            found = shapes(result if count > 1 and isinstance(result, tuple) else (result,))
            wanted = shapes(arguments[:count])
            if found != wanted:
                problem = f"code={name}: {modifier.__name__}.{method.__name__}() returned {found}, not {wanted}"
                raise SettingsError(problem, "return its arguments, changed in value alone")
            return result

        return call

    changed = {"mix": 3, "score": 1}
    if modifier.queries_per_head == 1:  # else finish() joins the results of a head's queries
        changed["finish"] = 1
    for method in changed.keys() & vars(modifier).keys():
        setattr(modifier, method, checked(vars(modifier)[method], changed[method]))


def shapes(values: tuple) -> str:
    """Return the shapes of tensors, and the types of other values."""
    return ", ".join(
        str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__ for value in values
    )


@contextmanager
def explained(name: str | None, sizes: str = "") -> Iterator[None]:
    """Turn an error in code=NAME into a SettingsError with its line; print its traceback.

    Without a name all errors pass, and a SettingsError that is not of the file does.

    sizes: those of the layers that are tried, which an error of shapes names.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if name is None:
            raise
        trace = traceback.extract_tb(error.__traceback__)
        frames = [*dropwhile(lambda frame: frame.filename != str(path_of(name)), trace)]
        line = frames[0].lineno if frames else getattr(error, "lineno", None)  # of a SyntaxError
        problem = traceback.format_exception_only(error)[-1].strip()
        remedy = "correct the file"
        if sizes and any(word in problem for word in ("size", "shape", "index")):
            remedy += f", which has to fit {sizes}"
        if isinstance(error, ImportError) and is_neighbour(name, error.name):
            remedy = f"write a dot before its neighbour, as in from .{error.name} import NAME"
        if "deterministic implementation" in problem:  # torch goes on with ways that are not ours
            problem = problem.partition(", but")[0]
            remedy = f"{remedy}, or set deterministic=false"
        fault = SettingsError(problem, remedy)
        if isinstance(error, SettingsError):
            if not frames:
                raise
            fault = error
        place = f"code={name}"
        if line:
            place += f", line {line}"
            if os.environ.get("RANK", "0") == "0":
                traceback.print_exception(error, limit=-len(frames))  # from the file on
        raise SettingsError(f"{place}: {fault.problem}", fault.remedy) from error


def is_neighbour(name: str, module: str | None) -> bool:
    """Return whether a module is a file or a package beside the file of code=NAME."""
    beside = path_of(name).parent / (module or "")
    return bool(module) and (beside.with_suffix(".py").is_file() or (beside / "__init__.py").is_file())


def run_command(main: Callable[[list[str]], int | None]) -> None:
    """Run main() on this process's arguments and end it, at a mistake with a sentence.

    --help prints the docstring of the command.
    """
    try:
        if {"-h", "--help"} & {*sys.argv[1:]}:
            print((sys.modules["__main__"].__doc__ or "").strip())
            status = None
        else:
            status = main(sys.argv[1:])
        sys.stdout.flush()
    except SettingsError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
