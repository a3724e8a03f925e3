"""The end of a command: one sentence for a person's mistake, an exit status for the shell."""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.console import close_console, open_console, print_error
from common.errors import (
    ON_THE_CPU,
    DeviceError,
    SettingsError,
    device_failed,
    first_line,
    lacks_memory,
    lacks_operator,
    lacks_temporary,
    misfit,
)
from common.settings import in_our_words
from common.text import StreamFormatter, visible

# errno of the OSErrors that a bug of ours would raise. All others are a person's mistakes; if a setting led to one,
# common/files.py has named it.
OURS = (None, errno.ENOENT, errno.EEXIST, errno.EBADF, errno.EINVAL)


def answer_help(text: str | None) -> None:
    """Print a command's docstring and end the process, if the command line asks for --help."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print((text or "").strip())
        raise SystemExit(0)


@contextmanager
def mistakes_explained(explain: Callable[[BaseException], str | None] = lambda error: None) -> Iterator[None]:
    """End the process with status 1 and one sentence if the body raises a person's mistake.

    explain: returns the sentence for a library's exception if a mistake caused it, otherwise None.
    """
    status = 0
    rank = os.environ.get("RANK")
    at_once = rank is not None
    open_console()
    if logging.lastResort:  # the handler of messages that no other handler takes
        logging.lastResort.setFormatter(StreamFormatter(lambda: sys.stderr))
    try:
        yield
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        pass
    except SystemExit as exiting:
        status = exiting.code if isinstance(exiting.code, int) else 1
        if isinstance(exiting.code, str):  # as Python prints it
            print_error(exiting.code)
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        status = 130
        at_once = True
    except Exception as error:
        sentence = sentence_for(error) or explain(error)
        if not sentence and rank is None:
            raise
        # Under torchrun all ranks make the same mistake, and rank 0 alone prints it. A device fails on one rank. Where
        # something else set RANK, there may be no rank 0.
        is_later_rank = "TORCHELASTIC_RUN_ID" in os.environ and (rank or "").strip("0").isdecimal()
        if not is_later_rank or not sentence or isinstance(error, DeviceError | RuntimeError):
            print_error(f"error: {visible(sentence)}".replace("\n", "␊") if sentence else traceback.format_exc())
        status = 1
    close_console()
    if at_once:
        # All files are written. An orderly shutdown could wait forever for threads, or for ranks that are gone.
        os._exit(status)
    if status:
        sys.exit(status)


def sentence_for(error: BaseException) -> str | None:
    """Return the sentence for a person's mistake, or None for an error of ours."""
    # A setting, or a file.
    reason = lacks_temporary(error)
    if reason and "TMPDIR" not in str(error):  # which another message may have led to
        return f"there is no folder for temporary files ({reason}): let TMPDIR name one that you may write to."
    if isinstance(error, SettingsError):
        return str(in_our_words(error))
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "there are too many open files: raise the limit that ulimit -n shows."
    if isinstance(error, OSError) and error.errno not in (*OURS, errno.ENOMEM):
        place = error.filename or "standard output or a file"
        return f"{place} cannot be used ({error.strerror}): check its name, its permissions and the room on its disk."
    # The system: its libraries, and its memory.
    reason = misfit(error)
    if reason:
        others = "unset LD_LIBRARY_PATH, which names libraries to take first, or "
        remedy = f"{others * ('LD_LIBRARY_PATH' in os.environ)}install into a fresh virtual environment"
        return f"a library does not fit this system ({reason}): {remedy}."
    if lacks_memory(error):
        remedy = "choose a smaller model or batch, or raise the limits that ulimit -a shows"
        return f"there is not enough memory, or too few threads ({first_line(error)}): {remedy}."
    # The device, and other processes.
    if lacks_operator(error):
        return f"Apple's GPU lacks an operation of this command ({first_line(error).partition('. ')[0]}): {ON_THE_CPU}."
    if isinstance(error, RuntimeError) and "gloo" in str(error) and "by peer" in str(error):
        return "another process of this run has ended, so this one cannot go on: look for the message of that one."
    if device_failed(error):
        is_nvidias = not any(word in str(error) for word in ("HIP", "MPS", "Metal"))
        place = "nvidia-smi and dmesg" if is_nvidias else "the log of the system"
        return f"the GPU failed ({first_line(error)}): look for the cause in {place}, or set device=cpu."
    return None
