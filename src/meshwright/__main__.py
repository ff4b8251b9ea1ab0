"""`python -m meshwright` is the command line, so that `torchrun -m meshwright train run.yaml` works."""

import sys

from meshwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
