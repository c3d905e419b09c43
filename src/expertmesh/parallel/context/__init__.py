"""cp: ranks share rows. plan.py decides how each layer sees whole rows; exchange.py trades positions for heads."""
