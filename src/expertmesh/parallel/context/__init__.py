"""Context parallelism: ranks share rows. plan.py decides how each layer sees full rows; exchange.py runs Ulysses."""
