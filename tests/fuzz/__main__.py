"""`python tests/fuzz codec|config [corpus directory] [-runs=N] [libFuzzer's other options]`.

The corpus directory keeps interesting inputs; by default it is temporary.
Prints a failing input and leaves it in a file `crash-…`.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    name, *arguments = sys.argv[1:] or ["help"]
    if name not in ("codec", "config"):
        sys.exit(__doc__)
    with atheris.instrument_imports(include=["unstable_lite", "tomllib"]):
        target = importlib.import_module(f"fuzz_{name}")
    with tempfile.TemporaryDirectory() as scratch:
        given = [argument for argument in arguments if not argument.startswith("-")]
        corpus = Path(given[0] if given else Path(scratch) / "corpus")
        corpus.mkdir(exist_ok=True)
        for number, seed in enumerate(target.seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
        dictionary = Path(scratch) / "dictionary"
        quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.DICTIONARY)
        dictionary.write_text("".join(f'"{word}"\n' for word in quoted))
        options = [argument for argument in arguments if argument.startswith("-")]
        atheris.Setup([sys.argv[0], str(corpus), f"-dict={dictionary}", *options], target.one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
