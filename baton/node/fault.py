"""Why a process of a node cannot go on: the last line that it logs, and its exit code."""

import logging
import traceback
from dataclasses import dataclass, replace

from baton.core.errors import ConfigError
from baton.core.supervisor import Supervisor
from baton.engine.device.out_of_memory import describe_out_of_memory
from baton.settings.reader import write_error

log = logging.getLogger("baton")


@dataclass(frozen=True)
class Fault:
    """Ranks send theirs to rank 0, which logs it for all of them.

    Attributes:
        reason: one line; "": nobody needs one.
        exit_code: 2: a setting cannot work; 1: another fault; 0: none.
        lines: the traceback of an error that nobody raises on purpose.
        setting: the error of a setting.
        place: of the fault, such as a rank and its process; "": this process.
    """

    reason: str
    exit_code: int = 1
    lines: str = ""
    setting: ConfigError | None = None
    place: str = ""

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

    def within(self, place: str) -> "Fault":
        """The same fault for others, who need to know its place."""
        return replace(self, place=f"{place}: {self.place}" if self.place else place)

    @property
    def line(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason

    def log(self, program: str, supervisor: Supervisor | None = None) -> None:
        """Writes it as the last line of this process; a wrong setting is shown by the supervisor where there is one."""
        if self.setting is not None:
            write_error(f"{program}: {self.place}" if self.place else program, self.setting, supervisor)
        elif self.reason:
            log.log(logging.ERROR if self.exit_code else logging.INFO, "%s", self.line, extra={"lines": self.lines})
