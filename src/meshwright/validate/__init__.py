"""The planner against published runs: tables read, doubts told, errors summed up."""
