"""What is computed, in float32: one file a rule."""

from halfstep.contracts import Rule
from halfstep.rules.adam import ADAM

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAM,)}
"""Every rule by its name. Tests run each on every backend."""
