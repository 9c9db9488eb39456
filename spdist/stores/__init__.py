"""Where bytes are: `registry.at` returns the location of a path or URL, whose methods do all that depends on it."""
