"""Look after the workers of a run: ask them before work starts, outlive their deaths, say what is waited for."""
