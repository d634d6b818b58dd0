"""Triton kernels of the GPU engine. They run on GPUs, and on the CPU through Triton's interpreter."""
