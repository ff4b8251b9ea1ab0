"""What ranks send one another: tensors (`collectives.py`) and Python objects (`objects.py`)."""
