"""``rollwire demo``: servers, a trainer, and a policy that learns through the whole loop.

Server processes sample, a trainer in this process streams their rollouts and publishes each new
policy while sequences are under way. At the end every label is put to the test: tokens of sequences
that updates interrupted are scored again with the weights that their tags name.

    task       a secret alphabet, and the reward of each letter
    policy     the model
    rollouts   prompts, and what sequences were worth
    trainer    the policy gradient
    check      labels and log-probabilities against the weights that the labels name
    servers    processes, started, watched, ended
    history    what happened, for display, verdict, plot and check
    run        all of it together
"""

from rollwire_demo.command import main

__all__ = ["main"]
