"""The processes of a sharded trainer publish together.

together   ``Ranks``: what every process calls
lead       rank 0's part: says who does what next, and lets go of the others
follower   the other ranks' part
line       the words that they say, over TCP
meeting    how they find each other
"""

from rollwire_client._publishing.sharded.ranks import CATCHES_UP, Ranks, publishes

__all__ = ["CATCHES_UP", "Ranks", "publishes"]
