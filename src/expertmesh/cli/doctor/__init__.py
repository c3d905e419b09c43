"""`expertmesh doctor`: what this machine is and whether it can train."""
