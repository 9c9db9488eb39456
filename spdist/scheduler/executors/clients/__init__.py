"""A client with workers: of a cluster that is started here, or of a running scheduler; questions to its workers."""
