"""Stands in for the interpreter of a process that tests beside others (``-n``), which becomes a
fork of the process whose forks are servers: it need not import torch and transformers again.

    python worker.py ADDRESS -u -c CODE
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from support import forked

    address, code = sys.argv[1], sys.argv[-1]
    forked.adopt(address)
    standard = [Connection(os.dup(0)), *(Connection(os.dup(fd), readable=False) for fd in (1, 2))]
    sys.exit(forked.interpret(code, standard))
