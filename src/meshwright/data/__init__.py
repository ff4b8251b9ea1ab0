"""From the sources of a recipe to the batches of a rank, without torch."""
