"""Ranks of a local job: started, watched, ended together, and their failures told as one."""
