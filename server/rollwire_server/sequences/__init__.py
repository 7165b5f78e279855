"""The sequences of a server: admitted, sampled, read, kept to be picked up.

How a token goes through the server: an engine step has it in columns → ``Sequences.on_step``
appends it to its ``Sequence``, and puts the sequence's ``Cursor`` into the ``ReadyQueue`` of its
stream → the stream takes it from the cursor into the ``Columns`` of the next message
(StreamRollouts), or as a ``SequenceOutput`` (Generate).
"""
