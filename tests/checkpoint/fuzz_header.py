"""Coverage-guided fuzzing of the header reader, by hand; the test suite does not run it.

    pip install atheris
    python tests/checkpoint/fuzz_header.py -max_total_time=600 -max_len=4096 corpus/

`corpus/` is a folder where inputs that reach new code are kept; put a few safetensors files of some
hundred bytes in it first, because chance alone hardly ever writes a whole header. The run ends
at the first input that breaks a promise of `test_header_fuzz.check` and writes it to a file; give
that file as the only argument to run it again. Everything after the script's name is libFuzzer's.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["layerswap.checkpoint", "json"]):
    from test_header_fuzz import check


def one_input(content: bytes) -> None:
    """Check the bytes as a file, and as the header of a file that is otherwise in order."""
    check(content)
    check(len(content).to_bytes(8, "little") + content)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
