"""The first code of a worker process: `python -m meshwright.launch.child PARENT MODULE ...` exits with its parent.

Loading torch takes seconds, in which a launcher may be killed, so the process watches its parent before it loads torch.
"""

import runpy
import signal
import sys

from meshwright.launch.signals import end_with
from meshwright.terminal import guarded_terminal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `StopRequest` listens: no stack trace during imports
    end_with(int(sys.argv[1]))
    del sys.argv[:2]
    sys.modules.pop(sys.argv[0], None)  # so that a fork runs it even if the process had imported it
    with guarded_terminal():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
