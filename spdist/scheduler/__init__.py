"""From sizes to a finished product: the memory bound, the plan, the graph of stages, and the run."""
