"""Comparison of the planner with published runs: reading of tables, doubtful cells, error summaries."""
