"""How fast a step is beside the machine's memory, torch and other libraries, in one run."""
