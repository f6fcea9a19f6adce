"""The devices that run steps: inline, in a worker process, on modelled kernels, on a GPU."""
