"""Files and folders that survive: written aside and renamed, locked for one owner at a time."""
