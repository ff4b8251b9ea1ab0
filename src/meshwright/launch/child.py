"""The first code of a worker process: `python -m meshwright.launch.child PARENT MODULE ...` ends with its parent.

Loading torch takes seconds, in which a launcher may be killed; so the parent is watched before anything is loaded.
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
    sys.modules.pop(sys.argv[0], None)  # a fork of a process that has imported it runs it nevertheless
    with guarded_terminal():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
