"""What is computed, in float32: one file a rule."""

from halfstep.contracts import Rule
from halfstep.rules.adam import ADAM
from halfstep.rules.lion import LION
from halfstep.rules.sgd import SGD, SGD_MOMENTUM

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAM, LION, SGD, SGD_MOMENTUM)}
"""Every rule by its name. Tests run each on every backend."""
