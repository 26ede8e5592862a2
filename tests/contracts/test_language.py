"""Plain technical English: how docstrings open, and words that are retired.

python tests/contracts/test_language.py [PATH …]      # list what is to be rewritten
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("unstable_lite", "bench", "tests", "examples", "docs", "README.md")
_FRAGMENTS = """
    about across after against along among and as at before behind beside besides between beyond but by down during
    for from he how if in inside into is it its like near nobody nothing of off on onto or out outside over past per she
    since so somebody than that then there these it they this those through throughout to toward towards under until up
    upon was were what whatever when where which while who whoever whom whose why with within without
"""
FRAGMENTS = frozenset(_FRAGMENTS.split())
"""Words with which no docstring begins: prepositions, conjunctions, pronouns, fragments of a sentence."""
RETIRED = {
    r"\b(told|tells?)\b": "is logged, is reported, says",
    r"\b(go|goes|went|gone|going) on\b": "resume, continue",
    r"\b(nobody|somebody|anybody|whoever|whatever)\b": "name the process or the person",
    r"\b(hunger|household|stranger|attendant|sings?|sung)\b": "starvation, fleet, unknown peer, supervisor, passes",
    r"(?<!\")\bfigures?\b(?!\")": "metric",
    r"\b(anew|at hand|meanwhile|come round|comes round|came round)\b": "again, available, blocked",
    r"\bof (your|one's) own\b|\bof yours\b": "custom",
    r"(?<!there )(?<!has )(?<!was )\bis no (?!longer\b|more\b)": "is not a",
    r", for (it|they|he|she|there|this|that|what|nobody)\b": "because",
    r"(?<!no matter )\bwhat (?!to\b|if\b)": "name the noun",
    r"\bwhere (it|there|they|nothing|none|neither|that is)\b": "if",
    r"(^|[.:;] |\"\"\")(S|s)o (many|often|long)\b": "number of, how often",
}
DOCUMENTS = {pattern: instead for pattern, instead in RETIRED.items() if not pattern.endswith("what (?!to\\b|if\\b)")}
"""In running text a question is not a free relative."""


def _files() -> list[Path]:
    found = [ROOT / place for place in PLACES if (ROOT / place).is_file()]
    for place in PLACES:
        found += [path for path in (ROOT / place).rglob("*") if path.suffix in (".py", ".md", ".toml", ".sh")]
    return sorted(path for path in found if path != Path(__file__) and "results" not in path.parts)


def _texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of every comment and string, and if it is a docstring; of every line of other than Python."""
    if path.suffix != ".py":
        yield from ((line, text, False) for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
        return
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            is_statement = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            yield token.start[0], token.string, is_statement and token.type == tokenize.STRING
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def problems(path: Path) -> list[str]:
    """Return what in a file is to be rewritten."""
    found = []
    if path.suffix == ".py":
        for name in re.finditer(r"def (test_\w+)", path.read_text(encoding="utf-8")):
            for pattern, instead in DOCUMENTS.items():
                if re.search(pattern, name[1].replace("_", " ")):
                    found.append(f"{path}: {name[1]}: {instead}")
    retired = RETIRED if path.suffix == ".py" and "unstable_lite" in path.parts else DOCUMENTS
    any_of = re.compile("|".join(f"(?:{pattern})" for pattern in retired))
    for line, text, is_docstring in _texts(path):
        first = re.match(r"\w*[\"'][\W_]*([A-Za-z']+)", text) if is_docstring else None
        if first and first[1].lower() in FRAGMENTS:
            found.append(f"{path}:{line}: opens with {first[1]!r}")
        for pattern, instead in retired.items() if any_of.search(text) else ():
            for match in re.finditer(pattern, text):
                found.append(f"{path}:{line + text[: match.start()].count(chr(10))}: {match[0].strip()!r}: {instead}")
    return found


def test_text_is_plain_english():
    assert [problem for path in _files() for problem in problems(path)] == []


if __name__ == "__main__":
    paths = [path for given in sys.argv[1:] for path in ([Path(given)], Path(given).rglob("*"))[Path(given).is_dir()]]
    found = [
        problem
        for path in sorted({path.resolve() for path in paths or _files()})
        if path.suffix in (".py", ".md", ".toml", ".sh") and path != Path(__file__).resolve()
        for problem in problems(path)
    ]
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    sys.exit(bool(found))
