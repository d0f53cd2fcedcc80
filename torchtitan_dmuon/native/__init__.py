"""The C++ part of the package (csrc/): compiled on first use, called through a C ABI."""

from torchtitan_dmuon.native.build import NativeError, build, cache_folder, load, sources_folder

__all__ = ["NativeError", "build", "cache_folder", "load", "sources_folder"]
