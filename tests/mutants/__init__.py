"""A campaign of mutants: realistic faults of distributed training as patches of the source, run through `verify`."""
