"""Training: the loop, the step and the start of processes. `meshwright.trainer` is the public entry point."""
