"""A state_dict on its way in: all of it is checked before anything is changed."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep import foreign
from halfstep.checkpoint import LAYOUT, Entry
from halfstep.contracts import Format, Rule
from halfstep.conversions import Conversion
from halfstep.formats import PLAIN
from halfstep.options import loaded
from halfstep.tensors import named

Held = tuple[Format, Sequence[Tensor]]
"""A weight: its format and its parts, the param first."""


class Loading:
    """What a state_dict has for an optimizer, checked.

    Args:
        state_dict: ours in any layout, or another library's.
        groups: the optimizer's.
        defaults: what a group's options are where the state does not say.
        live: the options that a state does not change.
        formats: gives a param's rule and formats in a group.
        held: gives a param's weight as the optimizer has it, by group, name and param.
        states: the optimizer's states.

    Raises:
        ValueError: something does not fit; the text names the group or the param, and says what differs.
    """

    def __init__(
        self,
        state_dict: Any,
        groups: Sequence[dict[str, Any]],
        defaults: Mapping[str, Any],
        live: Sequence[str],
        formats: Callable[[dict[str, Any], Tensor], tuple[Rule, Format, tuple[Format, ...]]],
        held: Callable[[dict[str, Any], str, Tensor], Held],
        states: Mapping[Tensor, dict[str, Any]],
    ) -> None:
        saved_groups, saved_states = parts(state_dict)
        sizes, own = ([len(group["params"]) for group in each] for each in (saved_groups, groups))
        if sizes != own:
            raise ValueError(
                f"the loaded state has groups of {sizes} params, this optimizer of {own}: give it the groups that the "
                "saved one had, by add_param_group where they came late"
            )
        _check_numbers(saved_groups, saved_states)
        #: the groups as they will be, with the params of the saved ones
        self.groups: list[dict[str, Any]] = []
        self._entries: dict[Tensor, Entry] = {}
        self._kept: dict[Tensor, dict[str, Any]] = {}
        places = itertools.count()
        for index, (saved_group, group) in enumerate(zip(saved_groups, groups, strict=True)):
            try:
                options = _options(saved_group, group, defaults, live)
            except ValueError as error:
                raise ValueError(f"group {index} of the loaded state does not fit: {error}") from None
            self.groups.append(options)
            for number, (name, param), place in zip(saved_group["params"], named(group, index), places, strict=False):
                saved, ours = saved_states.get(number, {}), "weights" in saved_group
                try:
                    entry = foreign.entry(_mapping(saved), saved_group, param)
                    if entry:
                        rule, weight, moments = formats(options, param)
                        # others say nothing of the weight, which stays as it is
                        own_weight = (PLAIN[param.dtype], (param,)) if ours else held(group, name, param)
                        pairs = list(zip(rule.moments, moments, strict=True))
                        seed = options["seed"]
                        self._entries[param] = Entry(name, entry, param, weight, pairs, seed, place, own_weight)
                    elif not ours and param in states and not states[param].get("step", 1):
                        self._kept[param] = states[param]  # `load_weights` put it there
                except ValueError as error:
                    raise ValueError(f"the state for {name} does not fit: {error}") from None

        self.conversions: list[Conversion] = []
        """What was converted on the way, once all is made."""

    def made(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each param, in tensors of its own; the optimizer is still as it was."""
        return self._kept | {param: entry.made(self.conversions) for param, entry in self._entries.items()}

    def write(self) -> None:
        """Give each param what its weight has become, where that changes it."""
        for entry in self._entries.values():
            entry.write()


def check_mapping(state_dict: Any) -> None:
    """Raise for a state_dict that is none."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"the loaded state is a {type(state_dict).__name__}, not the dict of an optimizer's state")


def parts(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return a state_dict's groups and states."""
    check_mapping(state_dict)
    if missing := [name for name in ("state", "param_groups") if name not in state_dict]:
        raise ValueError(
            f"the loaded state has no {' and no '.join(map(repr, missing))}: it has "
            f"{', '.join(map(repr, itertools.islice(state_dict, 5))) or 'nothing'}. Pass what optimizer.state_dict() "
            "gave, which in a checkpoint lies under a name of its own"
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(states, Mapping):
        raise ValueError(f"'state' of the loaded state is a {type(states).__name__}, not a dict with an entry a param")
    if not isinstance(groups, list | tuple):
        raise ValueError(f"'param_groups' of the loaded state is a {type(groups).__name__}, not a list")
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"group {index} of the loaded state is no dict with a list of 'params'")
    return list(groups), dict(states)


def _check_numbers(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> None:
    """Make sure that each param has one number, and each state a param."""
    numbers = [number for group in groups for number in group["params"]]
    if odd := [number for number in numbers if not isinstance(number, int | str)]:
        raise ValueError(f"the groups of the loaded state name a param {odd[0]!r}, neither a number nor a name")
    known = set(numbers)
    if len(known) < len(numbers):
        raise ValueError("the groups of the loaded state name a param twice")
    if extra := [number for number in states if number not in known]:
        raise ValueError(
            f"the loaded state has entries for {', '.join(map(repr, extra[:5]))}, which no group of it lists: take "
            "them out, or load it into the optimizer that it was saved from"
        )


def _mapping(saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, Mapping):
        raise ValueError(f"it is a {type(saved).__name__}, not a dict")
    return saved


def _options(
    saved: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any], live: Sequence[str]
) -> dict[str, Any]:
    """Return a group as it will be: the saved one's options, the live ones, and defaults for what neither has."""
    version = saved.get("layout", 1)
    if type(version) is not int or not 1 <= version <= LAYOUT:
        raise ValueError(
            f"layout={version!r}: this version reads 1 to {LAYOUT}; update halfstep to the version that saved it"
        )
    theirs = foreign.options({name: value for name, value in saved.items() if name != "params"})
    kept = {name: group[name] for name in live if name in group}
    options = loaded({**defaults, **theirs, **kept})
    names = options.get("param_names", group.get("param_names"))
    if names is not None:
        if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
            raise ValueError(f"param_names={names!r}: must be a list of {len(group['params'])} names")
        options["param_names"] = list(names)
    return {**options, "params": list(saved["params"])}
