"""Many small products on the GPU as one."""
