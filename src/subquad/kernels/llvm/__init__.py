"""Innermost loops of the CPU kernels, written as LLVM code: see README.md in this folder."""
