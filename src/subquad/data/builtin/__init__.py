"""Data sets that are generated or come with packages of the `demo` extra, so that nothing has to be downloaded."""

from subquad.data.builtin.sets import SETS, SPLITS, BuiltinSet, load

__all__ = ["SETS", "SPLITS", "BuiltinSet", "load"]
