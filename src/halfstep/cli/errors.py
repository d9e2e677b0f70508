"""What a person typed that cannot be done."""


class InputError(ValueError):
    """An argument that cannot be met; its text is one line, and nothing has been changed yet."""
