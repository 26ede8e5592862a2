"""`python docs/config_reference.py > docs/config.md`: every key of a config, from the models that read it.

A test fails where the page is not what this prints.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen

from unstable_lite.checkpoints import to_toml
from unstable_lite.config import AlarmConfig, Config, Section, TemplateConfig, Transformation
from unstable_lite.types import EvalEnvSpec, TrainEnvSpec

HEAD = """# Every key of a config

Made by `docs/config_reference.py` from the models in [`unstable_lite/config.py`](../unstable_lite/config.py) and
[`unstable_lite/types.py`](../unstable_lite/types.py); change it there.

A config is a TOML file that names what differs from the defaults below and nothing else. An unknown key is refused,
with the nearest known one; `python -m unstable_lite check FILE` tells every mistake at once and prints the file with
all defaults. Any key can be given on the command line as `section.key=value`. "none" stands where a key has no value
unless it is given one.
"""
TOP = "What stands before the first section."
ENVS = {
    "train_envs": (TrainEnvSpec, "`[[train_envs]]`, at least once: an env to collect training games from."),
    "eval_envs": (
        EvalEnvSpec,
        "`[[eval_envs]]`, any number: an env to evaluate on. One seat is the current policy's, the others are "
        "`fixed_opponent`'s.",
    ),
}
BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


def page() -> str:
    scalars: list[str] = []
    sections: list[str] = []
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            sections += ["", f"## `[{name}]`", "", *_intro(kind), *_table(_rows(kind))]
            if name == "alarms":
                sections += ["", "Each alarm is a table of:", "", *_table(_rows(AlarmConfig))]
        elif name == "templates":
            sections += ["", "## `[templates.NAME]`", "", *_intro(TemplateConfig), *_table(_rows(TemplateConfig))]
        elif name in ENVS:
            spec, intro = ENVS[name]
            sections += ["", f"## `[[{name}]]`", "", intro, "", *_table(_env_rows(spec))]
        else:
            scalars.append(_row(name, _kind(kind, field.metadata), _written(field.default), field.description))
    return "\n".join([HEAD, "## Top level", "", TOP, "", *_table(scalars), *sections, ""])


def _table(rows: list[str]) -> list[str]:
    return ["| key | type | default | what it is |", "| --- | --- | --- | --- |", *rows]


def _row(name: str, kind: str, default: str, description: str | None) -> str:
    told = " ".join((description or "").split())
    cells = (f"`{name}`", kind, default, told)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rows(model: type[Section]) -> list[str]:
    return [
        _row(name, _kind(field.annotation, field.metadata), _default(field), field.description)
        for name, field in model.model_fields.items()
    ]


def _env_rows(spec: type[Any]) -> list[str]:
    hints = inspect.get_annotations(spec, eval_str=True)
    told = {**_docstrings(TrainEnvSpec), **_docstrings(spec)}
    return [
        _row(
            field.name,
            _kind(hints[field.name], ()),
            "needed" if field.default is MISSING else _written(field.default),
            told.get(field.name),
        )
        for field in fields(spec)
    ]


def _docstrings(spec: type[Any]) -> dict[str, str]:
    """The string under each attribute of a dataclass."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(spec))).body
    assert isinstance(made, ast.ClassDef)
    return {
        attribute.target.id: below.value.value
        for attribute, below in zip(made.body, made.body[1:], strict=False)
        if isinstance(attribute, ast.AnnAssign)
        and isinstance(attribute.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _intro(model: type[Section]) -> list[str]:
    """The model's own docstring; what is inherited is no description."""
    own = model.__dict__.get("__doc__")
    return [inspect.cleandoc(own), ""] if own else []


def _default(field: Any) -> str:
    return "needed" if field.is_required() else _written(field.default)


def _written(value: Any) -> str:
    """As TOML would have it."""
    if value is None:
        return "none"
    if isinstance(value, AlarmConfig):
        return f"`{value.threshold:g}`, {value.action}, {value.updates}"
    if isinstance(value, Path):
        value = str(value)
    inline = to_toml({"x": list(value) if isinstance(value, tuple) else value}, prefix="of a section")
    text = inline.removeprefix("x = ").strip()
    return f"`{text}`"


def _kind(annotation: Any, metadata: Any) -> str:
    return f"{_name(annotation)}{''.join(f', {bound}' for bound in _bounds(metadata))}"


def _bounds(metadata: Any) -> Iterator[str]:
    for one in metadata:
        for kind, attribute, sign in BOUNDS:
            if isinstance(one, kind):
                yield f"{sign} {getattr(one, attribute):g}"
        if isinstance(one, MinLen):
            yield "not empty"


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], [part for info in arguments[1:] for part in getattr(info, "metadata", [info])])
    if origin is Literal:
        return " or ".join(f'`"{argument}"`' for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(argument) for argument in arguments if argument is not types.NoneType)
    if origin is tuple:
        items = [_name(argument) for argument in arguments if argument is not Ellipsis]
        items = [f"({item})" if " or " in item else item for item in items]
        return f"list of {items[0]}" if Ellipsis in arguments else f"[{', '.join(items)}]"
    if origin is dict or annotation is Transformation:
        return "table"
    if annotation is AlarmConfig:
        return "alarm"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}[annotation]


if __name__ == "__main__":
    print(page(), end="")
