"""What every CUDA kernel needs: compiling, launching, page-locked memory."""
