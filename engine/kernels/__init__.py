"""Triton kernels for CUDA devices, one idea a file. They need nothing but torch and Triton, and are loaded on use."""
