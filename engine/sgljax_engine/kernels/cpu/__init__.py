"""JIT-compiled CPU kernels, where XLA's code is slow.

Kernels are written in LLVM IR (`emit`). llvmlite, a dependency of Tunix, compiles them for the
vectors of this processor (`machine`). They run on XLA's own threads (`threads`), and programs call
them as XLA foreign functions (`ffi`), whose memory layout is checked (`abi`). Where any of this is
missing, `ffi.unavailable` says why, and engines use XLA's own products.
"""
