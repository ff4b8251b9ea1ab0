"""Files and folders that survive crashes: written to a temporary name and renamed; locks with one owner at a time."""
