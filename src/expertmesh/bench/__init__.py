"""What `expertmesh bench` measures, beside transformers and PEFT, on the user's own machine.

case.py says what is measured and how large, model.py (`step`, `load`), layer.py and lora.py measure it, worker.py is a
rank, probes.py are the instruments, result.py is what comes out. The scripts of `benchmarks/` build on them.
"""
