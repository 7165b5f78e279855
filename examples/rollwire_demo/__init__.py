"""``rollwire demo``: rollout servers, a trainer, and a policy that learns through the whole loop.

Server processes sample. A trainer in this process streams their rollouts and publishes each new
policy while sequences are under way. At the end tokens of sequences that updates interrupted are
scored again with the weights that their labels name.

    cli        the flags and exit codes
    run        the course: servers up, train and publish, servers down, check
    servers    starts, watches and ends the server processes
    task       a secret alphabet, and the reward of each letter
    trainer    the model, and a policy gradient
    check      labels and log-probabilities against the weights that the labels name
    results    what happened, and which goals it reached
    display    live panel, table and plot
"""

from rollwire_demo.cli import main

__all__ = ["main"]
