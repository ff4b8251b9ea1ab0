"""The planner against published runs: reading of tables, doubtful cells, error summaries."""
