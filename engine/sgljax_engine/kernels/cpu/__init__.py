"""JIT-compiled CPU kernels, for what XLA's code is slow at.

Operations are written in LLVM's language (`emit`), made for the vectors of the processor at hand by
llvmlite, which Tunix brings along (`machine`), run on XLA's own threads (`threads`) and are called
from programs as XLA's foreign functions (`ffi`), whose layout in memory is checked (`abi`). Where
any of that is not to be had, `ffi.unavailable` says why, and engines use XLA's own products.
"""
