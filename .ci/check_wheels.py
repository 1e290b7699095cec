"""Checks the wheels given as arguments: no file is in two, no large one stands twice, the protobuf code is there."""

import sys
from collections import Counter
from zipfile import ZipFile

infos = [info for path in sys.argv[1:] for info in ZipFile(path).infolist()]
twice = [name for name, count in Counter(info.filename for info in infos).items() if count > 1]
assert not twice, f"in two wheels: {twice}"
large = [info for info in infos if info.file_size > 10_000 and not info.filename.endswith("/LICENSE")]
assert len({info.CRC for info in large}) == len(large), "one large file is there twice"
assert any(info.filename == "baton/protos/v1/common_pb2.py" for info in infos), "the protobuf code was not generated"
