"""From sizes and a memory limit to a plan."""
