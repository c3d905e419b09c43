"""`expertmesh verify CONFIG`: proves on the user's own model, data, layout and machine that the sharded job is right.

One file for each layer of the proof (bytes, forward, backward, update, metamorphic, artifacts, mutations); `reference`
is the unsharded model they compare with, `subject` the sharded job, `run` goes through them in order.
"""
