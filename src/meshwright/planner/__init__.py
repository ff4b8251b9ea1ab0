"""The planner's pages: a plan as one page, the planner in a browser tab, and the same page from a local server."""
