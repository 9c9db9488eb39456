"""Object stores by obstore: how they are reached, Zarr's store, and Zarr chunks moved in threads."""
