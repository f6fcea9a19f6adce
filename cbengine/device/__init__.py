"""Where steps run: here, in a worker process, on modelled kernels, on a GPU."""
