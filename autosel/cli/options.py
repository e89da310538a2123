"""Options that several commands share, and the types that check them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from autosel.core import ACT_DTYPES

F = TypeVar("F", bound=Callable[..., Any])

#: More tokens than any call has; keeps a mistyped count from being taken for a size.
MAX_TOKENS = 2**31 - 1

TOKENS = click.IntRange(1, MAX_TOKENS)


class Number(click.FloatRange):
    """A finite number in a range; click's own range lets NaN through, which is below nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"found {value!r}, expected a finite number", param, ctx)
        return number


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    word = text.strip()
    digits = word.lstrip("0") if word.isascii() and word.isdecimal() else ""
    # Counted before they are read: Python refuses to read thousands of digits.
    if not digits or len(digits) > len(str(MAX_TOKENS)) or int(digits) > MAX_TOKENS:
        raise click.BadParameter(f"found {text!r}, expected a whole number from 1 to {MAX_TOKENS}")
    return int(digits)


def token_counts(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """``1,4,16``: whole numbers of at least 1, in any order; doubles are dropped."""
    if isinstance(text, tuple):  # a default
        return text
    words = text.replace(",", " ").split()
    if not words:
        raise click.BadParameter("found no token count, expected for example 1,4,16")
    return tuple(sorted({whole_number(word) for word in words}))


def names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """``a,b``: names separated by commas; doubles are dropped, the order is kept."""
    if isinstance(text, tuple):
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.BadParameter("found no name, expected for example a,b")
    return tuple(dict.fromkeys(words))


def properties(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """``a,b``: names of properties that certificates speak of."""
    from autosel.core import check_properties
    from autosel.errors import AutoselError

    try:
        return check_properties(names(text))
    except AutoselError as error:
        raise click.BadParameter(str(error).removeprefix("require: ")) from None


def group_size(text: str) -> int:
    """A number of inputs, or ``channel`` (also ``-1``) for one group over all of them."""
    if text.lower() in ("channel", "-1"):
        return -1
    return whole_number(text)


def duration(text: str) -> float:
    """``120s``, ``2m``, ``1.5h``: seconds; a unit is required."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([smh])", text.strip().lower())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise click.BadParameter(f"found {text!r}, expected a time such as 120s, 5m or 1h")
    return seconds


@dataclass(frozen=True)
class Budget:
    """A wall time, or the number of settings that ``--budget`` meant before there were both."""

    seconds: float | None = None
    trials: int | None = None


def budget(text: str) -> Budget:
    """A duration; a plain number is the older spelling of ``--trials``."""
    if text.strip().isdecimal():
        return Budget(trials=whole_number(text))
    return Budget(seconds=duration(text))


@dataclass(frozen=True)
class LayerOptions:
    """Which layer is meant; None where an option was not given."""

    layer: int | None = None
    bits: int | None = None
    group_size: int | None = None
    asym: bool = False
    act_order: bool = False
    act_dtype: str | None = None
    experts: int | None = None
    tp: int = 1

    #: (attribute, option) of what only a preset can be asked for; a checkpoint says it itself.
    PRESET_ONLY = (
        ("bits", "--bits"),
        ("group_size", "--group-size"),
        ("asym", "--asym"),
        ("act_order", "--act-order"),
        ("experts", "--experts"),
    )


def refuse_options_without_a_name(options: LayerOptions) -> None:
    """UsageError where options of a layer are given and no layer: they would be left out."""
    given = [f"--{f.name.replace('_', '-')}" for f in fields(options)
             if getattr(options, f.name) != f.default]  # fmt: skip
    if given:
        raise click.UsageError(f"{', '.join(given)}: name the checkpoint or preset that is meant")


def refuse_given(reason: str, *names: str) -> None:
    """UsageError where the command line gives one of these parameters of the command."""
    context = click.get_current_context()
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: {reason}")


_LAYER_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--layer", type=click.IntRange(0), metavar="N", help="Layer number of a checkpoint."
    ),
    click.option("--bits", type=click.Choice([4, 8]), help="Preset: weight bits (default 4)."),
    click.option(
        "--group-size", type=group_size, metavar="N|channel",
        help="Preset: inputs sharing a scale (default 128).",
    ),
    click.option("--asym", is_flag=True, help="Preset: weights with zero points."),
    click.option("--act-order", is_flag=True, help="Preset: groups in activation order (g_idx)."),
    click.option(
        "--experts", type=click.IntRange(1), metavar="N",
        help="Preset: fewer experts than the model.",
    ),
    click.option(
        "--act-dtype", type=click.Choice(list(ACT_DTYPES)),
        help="Activation type (default: the checkpoint's; bfloat16 for presets).",
    ),
    click.option(
        "--tp", type=click.IntRange(1), metavar="N", default=1, show_default=True,
        help="Tensor-parallel ranks that share the layer; rank 0's part is meant.",
    ),
)  # fmt: skip


def layer_options(function: F) -> F:
    """Adds the options of :class:`LayerOptions`; the function gets them as ``layer_options``."""

    @functools.wraps(function)  # keeps the options that stand below this one
    def gathered(**kwargs: Any) -> Any:
        chosen = LayerOptions(**{item.name: kwargs.pop(item.name) for item in fields(LayerOptions)})
        return function(layer_options=chosen, **kwargs)

    wrapped: Any = gathered
    for option in reversed(_LAYER_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


db_option = click.option(
    "--db", type=click.Path(dir_okay=False, readable=False), envvar="AUTOSEL_DB",
    show_envvar=True,
    help="Database of measurements (default: autosel.db in the user's cache folder).",
)  # fmt: skip


def routing_kind(text: str) -> str:
    """A kind of routing; a recording's file is read and becomes its key."""
    from autosel import routing_file

    return routing_file.resolve(text)[0]


routing_option = click.option(
    "--routing", type=routing_kind, default="uniform", show_default=True, metavar="KIND",
    help="Which experts the tokens go to: uniform, zipf[:s], one_hot[:e], all_but_one[:e], or "
    "file:PATH with recorded topk ids (.csv, .json, .safetensors).",
)  # fmt: skip

cache_option = click.option(
    "--cache", type=click.Choice(["cold", "hot"]), default="cold", show_default=True,
    help="Timed with the weights out of the caches, as between a model's layers, or in them.",
)  # fmt: skip

device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda", "rocm", "xpu"]),
    help="Kind of device (default: the best one here).",
)  # fmt: skip

stored_device_option = click.option(
    "--stored-device", metavar="NAME",
    help="A device of the database by part of its name, instead of the one here.",
)  # fmt: skip

target_argument = click.argument("target", metavar="CHECKPOINT|PRESET")


require_option = click.option(
    "--require", type=properties, metavar="NAME,NAME,...", default=(), show_default=False,
    help="Choose only who is certified for these, for example deterministic,batch_invariant.",
)  # fmt: skip
