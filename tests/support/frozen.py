"""The last that is imported by the process whose forks are servers.

A server looks through all objects for garbage before it serves. What is here already is left out,
else each would spend a quarter of a second on it, and get a copy of its own of all of that memory.
"""

import gc

gc.collect()
gc.freeze()
