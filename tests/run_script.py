"""`python SCRIPT WORDS...`, as a module: so a fork of a process that has loaded everything can be one."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    script = Path(sys.argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
