"""What a draft is worth: acceptance estimates, the cost table and draft budgets."""
