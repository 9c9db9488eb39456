"""A stored product from request to finished C: check, reserve the target, plan, run, finish, verify, resume."""
