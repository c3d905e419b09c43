"""`python -m benchmarks.layer`: the same as `python -m expertmesh.bench.layer`, where it is described."""

from expertmesh.bench.layer import main

if __name__ == "__main__":
    main()
