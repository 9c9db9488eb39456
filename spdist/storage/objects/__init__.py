"""Object stores by obstore: credentials, Zarr's store, and Zarr chunks that threads code and transfer."""
