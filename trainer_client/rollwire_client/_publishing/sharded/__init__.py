"""The processes of a sharded trainer publish together: all gather, rank 0 sends.

ranks         ``Ranks``: what every process calls
coordinator   rank 0's part: directs the other ranks until the tensors are released
participant   the other ranks' part
connection    their messages, over TCP
rendezvous    how they connect
"""
