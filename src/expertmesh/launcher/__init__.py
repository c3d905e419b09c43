"""Start the ranks of a local job, watch them, end them together, and report their failures as one."""
