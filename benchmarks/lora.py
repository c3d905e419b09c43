"""`python -m benchmarks.lora`: the same as `python -m expertmesh.bench.lora`, where it is described."""

from expertmesh.bench.lora import main

if __name__ == "__main__":
    main()
