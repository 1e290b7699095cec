"""Runs pytest once for each argument, which has the arguments of one command as JSON. All in this process, because most
of a run's time is for imports. Ends with the first failure's exit code; no chosen test is a failure too."""

import json
import sys

import pytest

if __name__ == "__main__":
    for each in sys.argv[1:]:
        if code := pytest.main(json.loads(each)):
            sys.exit(int(code))
