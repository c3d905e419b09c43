"""`python -m benchmarks.load`: the same as `python -m expertmesh.bench.load`, where it is described."""

from expertmesh.bench.load import main

if __name__ == "__main__":
    main()
