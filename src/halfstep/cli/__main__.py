"""`python -m halfstep.cli` is the `halfstep` command."""

from halfstep.cli import main

main()
