"""`expertmesh verify CONFIG`: proves on the user's own model, data, layout and machine that the sharded job is right.

`run` goes through the layers of the proof (`layers`, one file each), then plants known bugs (`self_test`, `bugs`).
`reference` is the unsharded model that they compare with, `job` the sharded one, built by `build`; `proof` holds both.
"""
