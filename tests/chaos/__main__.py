import asyncio
import sys
import time
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.history import Ended, line_of
from tests.chaos.run import run
from tests.chaos.scenario import draw

seed, seconds = int(sys.argv[1]), float(sys.argv[2])
logs = Path(tempfile.mkdtemp(prefix="chaos-"))
outcome = asyncio.run(run(draw(seed, seconds=seconds), logs, progress=lambda stage, s: print(time.strftime("%T"), stage, f"{s:.0f}", flush=True)))
print(logs)
(logs / "history").write_text("\n".join(line_of(event) for event in outcome.history.events))
print(Counter((e.how.value, e.error) for e in outcome.history.events if isinstance(e, Ended)))
print(len(outcome.answers), outcome.history.now_s())
for violation in outcome.violations:
    print(violation)
