"""Every sampling parameter of the API, with a value that is not its default."""

from __future__ import annotations

from rollwire.v1 import rollout_pb2

PARAMETERS = [field.name for field in rollout_pb2.SamplingParams.DESCRIPTOR.fields]

# What is new in the API needs a value here that changes what is sampled; each engine has to take it
# or refuse it.
NOT_DEFAULT = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.875,
    "max_new_tokens": 4,
    "min_new_tokens": 2,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "seed": 7,
}
