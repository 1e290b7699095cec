"""Why a process of a node cannot go on: the last line that it logs, and its exit code."""

import logging
import traceback
from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.settings_reader import write_error
from engine.device.out_of_memory import describe_out_of_memory

log = logging.getLogger("baton")


@dataclass(frozen=True)
class Fault:
    """Ranks send theirs to rank 0, which logs it for all of them.

    Attributes:
        reason: one line; "": nobody needs one.
        exit_code: 2: a setting cannot work; 1: another fault; 0: none.
        lines: the traceback of an error that nobody raises on purpose.
        setting: the error of a setting.
    """

    reason: str
    exit_code: int = 1
    lines: str = ""
    setting: ConfigError | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        if isinstance(error, ConfigError):
            return cls(str(error), 2, setting=error)
        if isinstance(error, SystemExit):
            return cls("", error.code if isinstance(error.code, int) else 0)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", 0)
        if (line := describe_out_of_memory(error)) is not None:
            return cls(line)
        name = f"{type(error).__name__}: {error}".partition("\n")[0]
        return cls(name, lines="".join(traceback.format_exception(error)))

    def of_rank(self, place: str) -> "Fault":
        """As rank 0 logs it.

        Args:
            place: the rank, its process or host.
        """
        return replace(self, reason=f"{place}: {self.reason}")

    def log(self, program: str) -> None:
        if self.setting is not None and self.reason == str(self.setting):
            write_error(program, self.setting)
        elif self.reason:
            log.log(logging.ERROR if self.exit_code else logging.INFO, "%s", self.reason, extra={"lines": self.lines})
