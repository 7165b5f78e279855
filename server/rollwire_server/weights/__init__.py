"""The weights that serve, and the updates that replace them.

``manager`` takes the RPCs of an update, ``update`` is the one under way (its transport group, its
staged memory, its lease), and ``state`` is what serves, which a commit replaces.
"""
