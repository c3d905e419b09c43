"""`expertmesh verify CONFIG`: prove on the user's model, data, layout and machine that the sharded job is right.

`run` goes through the layers of the proof (`layers`), then plants known bugs.
`reference` is the unsharded model, with which they compare the job; `job` is the sharded model, which `build` makes;
`proof` holds both. `checkpoint` verifies a saved checkpoint without any of these.
"""
