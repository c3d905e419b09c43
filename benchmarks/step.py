"""`python -m benchmarks.step`: the same as `python -m expertmesh.bench.step`, where it is described."""

from expertmesh.bench.step import main

if __name__ == "__main__":
    main()
