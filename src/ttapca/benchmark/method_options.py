"""What a text may say about a method: one rule for each option, made from its annotation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ttapca._checks import Either, Flag, ListOf, Maybe, Number, OneOf, Rule, Such, Text, Whole
from ttapca.adaptation.guards import GuardAction
from ttapca.adaptation.optimisation import Logits
from ttapca.methods.registry import RECIPES, own_options
from ttapca.spectral.closed_gains import ClosedFormOptions

LEARNING_RATE = Such(Number(0, 1e9), lambda lr: lr > 0, "a finite number above 0")
STEPS = Whole(1, 10**6)

# What every method takes beside its own options; a filter is for methods that can do without.
SHARED: dict[str, Rule] = {
    "steps": Maybe(STEPS),
    "lr": Maybe(LEARNING_RATE),
    "logits": Maybe(OneOf(get_args(Logits))),
    "guard": Maybe(OneOf(get_args(GuardAction))),
    "filter": Flag(),
}
_LARGE = 1e12  # in either direction; larger numbers overflow in float32 when they are squared
_PLAIN: dict[Any, Rule] = {
    bool: Flag(),
    int: Whole(-int(_LARGE), int(_LARGE)),
    float: Number(-_LARGE, _LARGE),
    str: Text(),
    Sequence[str]: ListOf(Text()),
}


@functools.lru_cache(maxsize=64)
def option_rules(method: str) -> dict[str, Rule]:
    """The rules of a method's options, those that all methods have included.

    Options that no text can say, such as a network, have no rule.

    Args:
        method: One of `ttapca.RECIPES`.

    Example:
        >>> option_rules("bn")["alpha"]
        Maybe(rule=Number(low=-1000000000000.0, high=1000000000000.0))
    """
    shared = get_type_hints(ClosedFormOptions)
    stated = inspect.signature(RECIPES[method].plan, eval_str=True).parameters
    rules = {
        name: _rule(stated[name].annotation if name in stated else shared[name])
        for name in own_options(method)
    }
    return {**SHARED, **{name: rule for name, rule in rules.items() if rule is not None}}


def _rule(annotation: Any) -> Rule | None:
    if get_origin(annotation) is Literal:
        return OneOf(get_args(annotation))
    if get_origin(annotation) is None or annotation in _PLAIN:
        return _PLAIN.get(annotation)
    if not _is_union(annotation):
        return None
    kinds = get_args(annotation)
    rules = [rule for rule in map(_rule, kinds) if rule is not None]
    if not rules:
        return None
    one = rules[0] if len(rules) == 1 else Either(rules, " or ".join(map(_said, rules)))
    return Maybe(one) if NoneType in kinds else one


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, type(int | None))


def _said(rule: Rule) -> str:
    return f"one of {', '.join(rule.choices)}" if isinstance(rule, OneOf) else "a number"
