"""GPU kernels that are compiled before they are installed: which there are, and the build step that makes them."""
