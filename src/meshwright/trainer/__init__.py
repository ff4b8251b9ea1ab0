"""Training: the loop, the step and how processes start. `meshwright.trainer` is the way in."""
