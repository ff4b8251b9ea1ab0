"""Communication between ranks: tensors (`collectives.py`) and Python objects (`objects.py`)."""
