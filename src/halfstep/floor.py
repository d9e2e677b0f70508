"""What a gradient scaler says of overflows at its smallest scale."""

import warnings

from halfstep.gradients import described


class Floor:
    """Overflows at the smallest scale, which no smaller one mends.

    Args:
        at_floor: "warn" once, or "raise" each time.

    Raises:
        ValueError: ``at_floor`` is neither.
    """

    def __init__(self, at_floor: str) -> None:
        if at_floor not in ("warn", "raise"):
            raise ValueError(f"at_floor={at_floor!r}: must be 'warn' or 'raise'")
        self._raises, self._told = at_floor == "raise", False
        #: whether the next overflow may come at the floor: only then do gradients get looked through
        self.near = False
        self._overflowed: dict[str, str] | None = None

    def note(self, names: dict[str, str]) -> None:
        """Note the params that overflowed there, by name, and how."""
        self._overflowed = (self._overflowed or {}) | names

    def tell(self, least: float) -> None:
        """Tell of what was noted since the last time."""
        names, self._overflowed = self._overflowed, None
        if names is None:
            return
        text = f"A step was skipped at the smallest scale, {least:g}: {described(names)}."
        if self._raises:
            raise RuntimeError(text)
        if not self._told:
            self._told = True
            # past this function, update, and the two that keep the compiler out of it
            warnings.warn(text + " This is said once.", RuntimeWarning, stacklevel=5)
